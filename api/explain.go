package api

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// Explanation says, per stream, why its match ended where it did.
type Explanation struct {
	Model        string           `json:"model"`
	LoraName     string           `json:"lora_name,omitempty"`
	RequestID    string           `json:"request_id,omitempty"`
	PromptTokens int              `json:"prompt_tokens"`
	Streams      []ExplainedMatch `json:"streams"`
}

// ExplainedMatch is one stream's match and its ends. Sizes are in tokens.
type ExplainedMatch struct {
	Worker    string `json:"worker"`
	Rank      int    `json:"dp_rank"`
	Namespace string `json:"namespace"`
	Role      string `json:"role"`
	State     string `json:"state"`
	BlockSize uint32 `json:"block_size"`
	Window    string `json:"window"`
	Device    int    `json:"device"`
	Host      int    `json:"host"`
	Disk      int    `json:"disk"`
	// Identified is how much of the prompt has an identity at this worker.
	Identified int `json:"identified_tokens"`
	// Ended has an entry for each tier: where its run ended and why.
	Ended []MatchEnd `json:"ended"`
	// Notes are what else an operator should know of the stream.
	Notes []Note `json:"notes"`
}

// MatchEnd is where the run of one tier ended: Block is the first that is not
// in it, Token where that begins.
type MatchEnd struct {
	Tier  string `json:"tier"`
	Block int    `json:"block"`
	Token int    `json:"token"`
	Note
}

// Note is a stable code and a plain sentence.
type Note struct {
	Code string `json:"code"`
	Text string `json:"text"`
}

// handleExplain answers POST /v1/explain.
func handleExplain(c *call) *Error {
	if err := c.decode(); err != nil {
		return err
	}
	x, err := c.srv.service.Explain(c.r.Context(), &c.req)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, x)
}

// Explain answers for every stream that the request may ask, whether it holds
// anything or not.
func (s *Service) Explain(ctx context.Context, r *MatchRequest) (*Explanation, *Error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	q := new(query)
	q.reset(r)
	if err := q.run(s.fleet, r); err != nil {
		return nil, err
	}
	slices.SortFunc(q.candidates, compareCandidates)
	x := &Explanation{Model: q.resolved.Model, LoraName: q.resolved.LoraName, RequestID: r.RequestID, PromptTokens: q.tokens, Streams: []ExplainedMatch{}}
	e := explainer{service: s, request: r, query: q}
	for i := range q.candidates {
		if ctx.Err() != nil {
			return nil, failf(http.StatusServiceUnavailable, ReasonUnavailable, "the request was given up")
		}
		x.Streams = append(x.Streams, e.explain(&q.candidates[i]))
	}
	return x, nil
}

// explainer keeps what the streams of one question share.
type explainer struct {
	service *Service
	request *MatchRequest
	query   *query
	// variants are the same tokens asked otherwise, each matched once.
	variants []variant
	asked    bool
}

// variant is the same prompt under another adapter or without its salt, and
// what each stream would hold of it.
type variant struct {
	note Note
	held map[*index.Stream]int
}

func (e *explainer) explain(c *candidate) ExplainedMatch {
	st := c.member.Status()
	m := ExplainedMatch{
		Worker: c.member.Worker, Rank: c.member.Rank, Namespace: c.member.Key.Namespace, Role: c.member.Key.Role,
		State: st.State.String(), BlockSize: c.shape.BlockSize, Window: windowName(c.shape.Window),
		Device: c.row.Device, Host: c.row.Host, Disk: c.row.Disk, Notes: []Note{},
	}
	blocks, end := e.identified(c)
	m.Identified = blocks * int(c.shape.BlockSize)
	_, known := c.member.Stream().Shape()
	for _, t := range []struct {
		name string
		run  int
	}{{"device", c.row.Device}, {"host", c.row.Host}, {"disk", c.row.Disk}} {
		at := MatchEnd{Tier: t.name, Block: t.run / int(c.shape.BlockSize), Token: t.run, Note: end}
		if at.Block < blocks {
			at.Note = e.notHeld(c, t.name, at.Block, known)
		}
		m.Ended = append(m.Ended, at)
	}
	m.Notes = append(m.Notes, streamNotes(c, &st)...)
	if c.row.Device == 0 && known {
		m.Notes = append(m.Notes, e.otherwise(c)...)
	}
	return m
}

// identified is how many blocks of the prompt have an identity at c's worker,
// and why not more.
func (e *explainer) identified(c *candidate) (int, Note) {
	r := e.request
	if r.given&fieldTokens == 0 {
		if shape, ok := c.member.Stream().Shape(); ok && shape != c.shape {
			return 0, Note{"other_block_size", fmt.Sprintf("the hashes are of blocks of %d tokens, the stream's blocks have %d (window %s)", r.HashBlockSize, shape.BlockSize, windowName(shape.Window))}
		}
		return len(r.BlockHashes) + len(r.SequenceHashes), Note{"complete", "every block that was asked about is held"}
	}
	view := c.member.View
	pr := e.query.prompt.Project(view, c.shape)
	var chain normalize.Chain
	e.query.prompt.Chain(&chain, &pr, view, c.shape)
	n := len(chain.Seqs)
	next := (n+1)*int(c.shape.BlockSize) + c.shape.Window.Tokens()
	switch {
	case !pr.Exact:
		return n, Note{string(pr.Reason), fmt.Sprintf("the match cannot go past token %d, where the first image begins, because images cannot be identified here: %s", pr.Limit, explainReason(pr.Reason))}
	case next <= e.query.tokens:
		return n, Note{"image_without_identity", fmt.Sprintf("a placeholder token stands at token %d or after, in block %d, and the request's features declare no image there", min(pr.Limit, e.query.tokens), n)}
	}
	return n, Note{"complete", "every whole block of the prompt is held"}
}

// explainReason is a projection's reason in plain words.
func explainReason(r normalize.Reason) string {
	switch r {
	case normalize.NoImageTokenID:
		return "the worker's image token id is not known; give image_token_id or model_dir for it"
	case normalize.TowerConnectorLora:
		return "adapters reach this worker's vision tower, so that it names images by adapter"
	case normalize.ExtraKeysHidden:
		return "this worker's release does not publish extra keys"
	case normalize.TextOnlyAsked:
		return "the request asks for text only"
	case normalize.ImageTokenMismatch:
		return "the placeholder's tokens are not this worker's image token"
	case normalize.UndeclaredImageToken:
		return "an image token of this worker stands outside of every placeholder"
	case normalize.UnsupportedModality:
		return "the features have a modality that this worker is not configured for"
	}
	if r.Malformed() {
		return "the features are malformed (" + string(r) + ")"
	}
	return string(r)
}

// notHeld says why block b is not in the run of a tier.
func (e *explainer) notHeld(c *candidate, tier string, b int, known bool) Note {
	bs := int(c.shape.BlockSize)
	where := fmt.Sprintf("block %d (tokens %d to %d)", b, b*bs, (b+1)*bs-1)
	switch {
	case !known:
		return Note{"nothing_stored", "the stream has stored no block yet"}
	case tier != "device" && c.row.Device > 0 && b*bs == c.row.Device:
		return Note{"not_held", where + " is not held on the " + tier + " either"}
	}
	if i, ok := e.imageAt(c, b); ok {
		return Note{"image_block_not_held", fmt.Sprintf("%s is not held on the %s; image %d of the prompt touches it, so another image may be held in its place", where, tier, i)}
	}
	return Note{"not_held", where + " is not held on the " + tier + ": never stored, removed, or its parent is unknown"}
}

// imageAt is the number of the first image that touches block b.
func (e *explainer) imageAt(c *candidate, b int) (int, bool) {
	if e.request.given&fieldTokens == 0 {
		return 0, false
	}
	pr := e.query.prompt.Project(c.member.View, c.shape)
	from, to := b*int(c.shape.BlockSize), (b+1)*int(c.shape.BlockSize)+c.shape.Window.Tokens()
	i := slices.IndexFunc(pr.Ranges, func(r normalize.Range) bool { return r.Offset < to && r.End > from })
	return i, i >= 0
}

// streamNotes are what the stream's own state says about its answer.
func streamNotes(c *candidate, st *fleet.Status) []Note {
	var notes []Note
	add := func(code, format string, args ...any) {
		notes = append(notes, Note{code, fmt.Sprintf(format, args...)})
	}
	switch st.State {
	case fleet.Connecting:
		add("connecting", "no message and no replay answer has come yet")
	case fleet.Replaying:
		add("replaying", "a gap is being filled; the answer is that of before")
	case fleet.Partial:
		add("partial", "the start of the history is lost: what is held is true, more may exist")
	case fleet.Suspect:
		add("suspect", "%d batches are lost and no replay has them: removals may be missing", st.Lost)
	case fleet.Disconnected:
		add("disconnected", "the connection is down")
	case fleet.Restored:
		add("restored", "from a snapshot, not yet confirmed by the worker")
	}
	if st.LastError != "" {
		add("last_error", "the stream's last fault: %s", st.LastError)
	}
	x := c.member.Stream().Stats()
	if x.Orphans > 0 {
		add("orphans", "%d blocks are announced whose parent is unknown; they match nobody until it appears", x.Orphans)
	}
	if x.Trimmed > 0 {
		add("trimmed", "%d blocks were dropped to keep the memory budget, the deepest and oldest first", x.Trimmed)
	}
	if x.ContentConflicts > 0 {
		add("content_conflicts", "%d blocks were announced again under another handle; the newer one counts", x.ContentConflicts)
	}
	if c.row.UsableReason != index.UsableKnown {
		add(string(c.row.UsableReason), "what vLLM would use is not known: the stream has cache groups that are not indexed, or whose blocks have no known place")
	}
	return notes
}

// otherwise asks the same tokens without the salt and under the model's other
// adapters: what anyone may ask who has the prompt.
func (e *explainer) otherwise(c *candidate) []Note {
	if !e.asked {
		e.asked = true
		e.variants = e.vary()
	}
	var notes []Note
	for _, v := range e.variants {
		if n := v.held[c.member.Stream()]; n > 0 {
			notes = append(notes, Note{v.note.Code, fmt.Sprintf(v.note.Text, n)})
		}
	}
	return notes
}

// maxVariants bounds the adapters that are tried.
const maxVariants = 16

func (e *explainer) vary() []variant {
	r := *e.request
	if r.given&fieldTokens == 0 {
		return nil
	}
	var out []variant
	if r.CacheSalt != "" {
		open := r
		open.CacheSalt = ""
		out = append(out, e.try(&open, Note{"other_salt", "%d tokens of the same prompt are held without the salt"}))
	}
	own := e.query.prompt.LoraName
	names := map[string]bool{"": true}
	for _, p := range e.query.resolved.Pictures {
		for _, a := range p.Adapters {
			names[a] = true
		}
	}
	delete(names, own)
	r.Model = e.query.resolved.Model
	for _, a := range slices.Sorted(maps.Keys(names))[:min(len(names), maxVariants)] {
		other := r
		other.LoraName = a
		out = append(out, e.try(&other, Note{"other_lora", "%d tokens of the same prompt are held under " + cmp.Or(quoteAdapter(a), "the base model")}))
	}
	return out
}

// quoteAdapter makes a name safe to stand in a format.
func quoteAdapter(name string) string {
	if name == "" {
		return ""
	}
	out := []byte("adapter ")
	for _, c := range []byte(fmt.Sprintf("%q", name)) {
		if c == '%' {
			out = append(out, '%')
		}
		out = append(out, c)
	}
	return string(out)
}

func (e *explainer) try(r *MatchRequest, n Note) variant {
	v := variant{note: n, held: map[*index.Stream]int{}}
	q := new(query)
	q.reset(r)
	if q.run(e.service.fleet, r) == nil {
		for i := range q.candidates {
			v.held[q.candidates[i].member.Stream()] = q.candidates[i].row.Disk
		}
	}
	return v
}
