package api

import (
	"time"

	"github.com/kvindexd/kvindexd/normalize"
)

// MatchResponse is the answer to a MatchRequest.
type MatchResponse struct {
	// Model is the canonical name of the (base) model, LoraName the adapter
	// that the prompt was matched under.
	Model     string
	LoraName  string
	RequestID string
	// PromptTokens is the prompt's length; for hashes, of its whole blocks.
	PromptTokens int
	MM           MMAnswer
	// Workers are the rows, the best first.
	Workers []WorkerRow
	// Refused are the streams that could not answer exactly although the
	// request insists on it.
	Refused []Refusal
	// Best is the worker of the first row, empty without one.
	Best string
	// Projection, where asked for, is the first row's kind of worker's.
	Projection *Projected
	// Hashes, one entry per kind of worker and shape, where asked for.
	Hashes []Hashed
}

// MMAnswer says how the images of the prompt were taken.
type MMAnswer struct {
	// Mode is "none" for a prompt without images; "exact" or "text_only"
	// where all rows are so, "mixed" otherwise.
	Mode string
	// Reason is the first row's that is not exact.
	Reason normalize.Reason
	// Param is the field that Reason is about.
	Param  string
	Images int
	// ImageTokenID is the workers', where all that answer know the same.
	ImageTokenID    uint32
	HasImageTokenID bool
}

// WorkerRow is what one stream holds of the prompt, in tokens.
type WorkerRow struct {
	Worker    string
	Rank      int
	Namespace string
	Role      string
	BlockSize uint32
	// Device <= Host <= Disk: the unbroken run from the prompt's start on the
	// device, continued on the host, continued on disk.
	Device, Host, Disk int
	// Usable is what vLLM will report as cached tokens, where UsableReason is
	// empty.
	Usable       int
	UsableReason string
	// ExactMM says that the images, if any, were matched; otherwise the match
	// ended before the first one, for the Reason given.
	ExactMM bool
	Reason  normalize.Reason
	// State, Seq, Age and Lost say how far to trust the row.
	State  string
	Seq    uint64
	HasSeq bool
	// Age is the time since the last message, negative where there was none.
	Age  time.Duration
	Lost uint64
	// Trimmed counts the stream's blocks that the byte budget took: the row may
	// be shorter than what the worker holds.
	Trimmed int64
}

// Refusal is one stream that cannot answer exactly.
type Refusal struct {
	Worker    string
	Rank      int
	Namespace string
	Role      string
	Reason    normalize.Reason
	// TextOnlyDevice is what it holds on its device before the first image.
	TextOnlyDevice int
}

// Projected is the prompt as one kind of worker identifies it.
type Projected struct {
	Shape  normalize.Shape
	IDs    normalize.TokenIDs
	Exact  bool
	Reason normalize.Reason
	// RoutingTokenIDs have the placeholders replaced, padded with 0 to a
	// whole number of blocks; ExpandedPromptLen is the length before that.
	RoutingTokenIDs   []uint32
	ExpandedPromptLen int
	// Markers are the images' in the order of the prompt.
	Markers []string
}

// Hashed are the hashes of the blocks that are identified.
type Hashed struct {
	Shape  normalize.Shape
	IDs    normalize.TokenIDs
	Locals []normalize.LocalHash
	Seqs   []normalize.SequenceHash
}

// reset empties r and keeps its memory.
func (r *MatchResponse) reset() {
	*r = MatchResponse{Workers: r.Workers[:0], Refused: r.Refused[:0], Hashes: r.Hashes[:0]}
}

// encode appends r.
func (r *MatchResponse) encode(e *encoder) {
	n := 5
	for _, set := range []bool{r.LoraName != "", r.RequestID != "", r.Best != "", r.Projection != nil, len(r.Hashes) > 0} {
		if set {
			n++
		}
	}
	e.openMap(n)
	if r.RequestID != "" {
		e.key("request_id").str(r.RequestID)
	}
	e.key("model").str(r.Model)
	if r.LoraName != "" {
		e.key("lora_name").str(r.LoraName)
	}
	e.key("prompt_tokens").int(r.PromptTokens)
	e.key("mm")
	r.MM.encode(e)
	e.key("workers").openArray(len(r.Workers))
	for i := range r.Workers {
		r.Workers[i].encode(e)
	}
	e.closeArray()
	e.key("refused")
	encodeRefused(e, r.Refused)
	if r.Best != "" {
		e.key("best").str(r.Best)
	}
	r.encodeAsked(e)
	e.closeMap()
}

func (m *MMAnswer) encode(e *encoder) {
	n := 2
	for _, set := range []bool{m.Reason != "", m.Param != "", m.HasImageTokenID} {
		if set {
			n++
		}
	}
	e.openMap(n)
	e.key("mode").str(m.Mode)
	if m.Reason != "" {
		e.key("reason").str(string(m.Reason))
	}
	if m.Param != "" {
		e.key("param").str(m.Param)
	}
	e.key("images").int(m.Images)
	if m.HasImageTokenID {
		e.key("image_token_id").uint(uint64(m.ImageTokenID))
	}
	e.closeMap()
}

func (w *WorkerRow) encode(e *encoder) {
	n := 14
	if w.UsableReason != "" {
		n++
	}
	if w.Reason != "" {
		n++
	}
	if w.Trimmed > 0 {
		n++
	}
	e.openMap(n)
	e.key("worker").str(w.Worker)
	e.key("dp_rank").int(w.Rank)
	e.key("namespace").str(w.Namespace)
	e.key("role").str(w.Role)
	e.key("block_size").uint(uint64(w.BlockSize))
	e.key("device").int(w.Device)
	e.key("host").int(w.Host)
	e.key("disk").int(w.Disk)
	e.key("usable_tokens")
	if w.UsableReason == "" {
		e.int(w.Usable)
	} else {
		e.null()
		e.key("usable_reason").str(w.UsableReason)
	}
	w.encodeTrust(e)
	e.closeMap()
}

// encodeTrust appends the members that say how far to trust the row.
func (w *WorkerRow) encodeTrust(e *encoder) {
	e.key("exact_mm").bool(w.ExactMM)
	if w.Reason != "" {
		e.key("reason").str(string(w.Reason))
	}
	e.key("state").str(w.State)
	e.key("seq")
	if w.HasSeq {
		e.uint(w.Seq)
	} else {
		e.null()
	}
	e.key("age_ms")
	if w.Age >= 0 {
		e.uint(uint64(w.Age.Milliseconds()))
	} else {
		e.null()
	}
	e.key("lost").uint(w.Lost)
	if w.Trimmed > 0 {
		e.key("trimmed").uint(uint64(w.Trimmed))
	}
}

func encodeRefused(e *encoder, rs []Refusal) {
	e.openArray(len(rs))
	for i := range rs {
		r := &rs[i]
		e.openMap(6)
		e.key("worker").str(r.Worker)
		e.key("dp_rank").int(r.Rank)
		e.key("namespace").str(r.Namespace)
		e.key("role").str(r.Role)
		e.key("reason").str(string(r.Reason))
		e.key("text_only_device").int(r.TextOnlyDevice)
		e.closeMap()
	}
	e.closeArray()
}

// encodeAsked appends what include asked for.
func (r *MatchResponse) encodeAsked(e *encoder) {
	if r.Projection != nil {
		e.key("projection")
		r.Projection.encode(e)
	}
	if len(r.Hashes) > 0 {
		e.key("hashes").openArray(len(r.Hashes))
		for i := range r.Hashes {
			r.Hashes[i].encode(e)
		}
		e.closeArray()
	}
}

// shapeMembers is how many members encodeShape appends.
const shapeMembers = 4

// encodeShape appends the members that name a shape and a view.
func encodeShape(e *encoder, s normalize.Shape, ids normalize.TokenIDs) {
	e.key("block_size").uint(uint64(s.BlockSize))
	e.key("window").str(windowName(s.Window))
	encodeTokenID(e, "image_token_id", ids.Image, ids.HasImage)
	encodeTokenID(e, "video_token_id", ids.Video, ids.HasVideo)
}

func encodeTokenID(e *encoder, key string, id uint32, known bool) {
	e.key(key)
	if known {
		e.uint(uint64(id))
	} else {
		e.null()
	}
}

func windowName(w normalize.Window) string {
	switch {
	case w == normalize.Plain:
		return "plain"
	case w == normalize.Pairs:
		return "pairs"
	}
	return "lookahead_" + itoa(w.Tokens())
}

func (p *Projected) encode(e *encoder) {
	n := shapeMembers + 4
	if p.Reason != "" {
		n++
	}
	e.openMap(n)
	encodeShape(e, p.Shape, p.IDs)
	e.key("exact").bool(p.Exact)
	if p.Reason != "" {
		e.key("reason").str(string(p.Reason))
	}
	e.key("routing_token_ids").openArray(len(p.RoutingTokenIDs))
	for _, t := range p.RoutingTokenIDs {
		e.uint(uint64(t))
	}
	e.closeArray()
	e.key("expanded_prompt_len").int(p.ExpandedPromptLen)
	e.key("markers").openArray(len(p.Markers))
	for _, m := range p.Markers {
		e.str(m)
	}
	e.closeArray()
	e.closeMap()
}

func (h *Hashed) encode(e *encoder) {
	e.openMap(shapeMembers + 2)
	encodeShape(e, h.Shape, h.IDs)
	e.key("block_hashes").openArray(len(h.Locals))
	for _, l := range h.Locals {
		e.uint(uint64(l))
	}
	e.closeArray()
	e.key("sequence_hashes").openArray(len(h.Seqs))
	for _, q := range h.Seqs {
		e.uint(uint64(q))
	}
	e.closeArray()
	e.closeMap()
}

// encodeError appends the body of an error.
func (err *Error) encode(e *encoder) {
	n := 1
	if err.Refused != nil {
		n++
	}
	e.openMap(n)
	e.key("error")
	m := 4
	if err.Param != "" {
		m++
	}
	e.openMap(m)
	e.key("message").str(err.Message)
	e.key("type").str(err.kind())
	e.key("code").int(err.Status)
	e.key("reason").str(string(err.Reason))
	if err.Param != "" {
		e.key("param").str(err.Param)
	}
	e.closeMap()
	if err.Refused != nil {
		e.key("refused")
		encodeRefused(e, err.Refused)
	}
	e.closeMap()
}
