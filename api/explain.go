package api

import (
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
	// Usable is what vLLM would take; nil where that is not known.
	Usable *int `json:"usable_tokens"`
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
	// Seq is the batch that removed the block, for the code removed.
	Seq *uint64 `json:"seq,omitempty"`
	// Others is how many other streams of the worker set hold the block on
	// their device.
	Others int `json:"others,omitempty"`
	// Param is the field of the request at which the match ended.
	Param string `json:"param,omitempty"`
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
// anything or not, in the order of the rows of a match.
func (s *Service) Explain(ctx context.Context, r *MatchRequest) (*Explanation, *Error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	e := explainer{fleet: s.fleet, request: r, query: new(query)}
	q := e.query
	q.reset(r)
	if err := q.resolve(s.fleet, r); err != nil {
		return nil, err
	}
	var streams []ExplainedMatch
	for _, p := range q.resolved.Pictures {
		from := len(q.candidates)
		q.ask(p, r)
		for i := from; i < len(q.candidates); i++ {
			if ctx.Err() != nil {
				return nil, failf(http.StatusServiceUnavailable, ReasonUnavailable, "the request was given up")
			}
			streams = append(streams, e.explain(&q.candidates[i], &q.views[q.of[i-from]]))
		}
	}
	x := &Explanation{Model: q.resolved.Model, LoraName: q.resolved.LoraName, RequestID: r.RequestID, PromptTokens: q.tokens, Streams: []ExplainedMatch{}}
	for _, i := range ranked(q.candidates) {
		x.Streams = append(x.Streams, streams[i])
	}
	return x, nil
}

// ranked is the candidates' places, the best first.
func ranked(cs []candidate) []int {
	order := make([]int, len(cs))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return compareCandidates(cs[a], cs[b]) })
	return order
}

// explainer keeps what the streams of one question share.
type explainer struct {
	fleet   *fleet.Fleet
	request *MatchRequest
	query   *query
	// variants are the same tokens asked otherwise, each matched once, when
	// the first stream wants to know.
	variants []variant
	varied   bool
}

func (e *explainer) explain(c *candidate, view *index.QueryView) ExplainedMatch {
	st := c.member.Status()
	x := e.held(c, view)
	bs := int(c.shape.BlockSize)
	m := ExplainedMatch{
		Worker: c.member.Worker, Rank: c.member.Rank, Namespace: c.member.Key.Namespace, Role: c.member.Key.Role,
		State: st.State.String(), BlockSize: c.shape.BlockSize, Window: windowName(c.shape.Window),
		Device: x.Device * bs, Host: x.Host * bs, Disk: x.Disk * bs, Identified: x.Asked * bs,
		Notes: streamNotes(c, &st),
	}
	if c.row.UsableReason == index.UsableKnown {
		m.Usable = &c.row.Usable
	}
	device := e.deviceEnd(c, &x)
	m.Ended = []MatchEnd{device, e.lowerEnd(c, &x, device, "host", x.Host), e.lowerEnd(c, &x, device, "disk", x.Disk)}
	return m
}

// held is the index's account of the candidate's stream. A stream that holds
// nothing in any tree asked has no shape of its own there.
func (e *explainer) held(c *candidate, view *index.QueryView) index.Explanation {
	for _, x := range c.picture.Index.Explain(c.member.Stream(), view) {
		if x.Shape == c.shape {
			return x
		}
	}
	return index.Explanation{Shape: c.shape, Ending: index.EndOtherShape}
}

func (c *candidate) end(tier string, block int, n Note) MatchEnd {
	return MatchEnd{Tier: tier, Block: block, Token: block * int(c.shape.BlockSize), Note: n}
}

// deviceEnd says why the run on the device ended: what the index knows, or,
// where the stream never had the block, what the question makes of it.
func (e *explainer) deviceEnd(c *candidate, x *index.Explanation) MatchEnd {
	if x.Device == x.Asked && x.Ending != index.EndOtherShape {
		return c.end("device", x.Device, e.limit(c, x.Asked))
	}
	end := c.end("device", x.Device, indexNote(c, x))
	end.Others = x.Others
	switch x.Ending {
	case index.EndRemoved:
		if x.HasSeq {
			end.Seq = &x.RemovedSeq
		}
	case index.EndNeverStored, index.EndTrimmed:
		if n, ok := e.otherwise(c, x); ok {
			end.Note = n
		} else if r := e.imageAt(c, x.Device); r != nil {
			end.Note, end.Param = otherImage(c, x.Device, r), r.Param()
		}
	}
	return end
}

// lowerEnd is where the run goes on over a lower tier ends.
func (e *explainer) lowerEnd(c *candidate, x *index.Explanation, device MatchEnd, tier string, n int) MatchEnd {
	switch {
	case n == x.Asked && x.Ending != index.EndOtherShape:
		return c.end(tier, n, e.limit(c, n))
	case n == x.Device && x.Ending != index.EndOtherTier:
		device.Tier = tier
		return device
	}
	return c.end(tier, n, Note{"not_held", c.where(n) + " is not held on the " + tier + " or above"})
}

// limit is why no more than n blocks of the prompt can be matched at c's
// worker, whatever it holds.
func (e *explainer) limit(c *candidate, n int) Note {
	if e.request.given&fieldTokens == 0 {
		return Note{"complete", "every block that was asked about is held"}
	}
	pr := e.query.prompt.Project(c.member.View, c.shape)
	next := (n+1)*int(c.shape.BlockSize) + c.shape.Window.Tokens()
	switch {
	case !pr.Exact:
		return Note{string(pr.Reason), fmt.Sprintf("the match cannot go past token %d, where the first image begins, because images cannot be identified here: %s", pr.Limit, explainReason(pr.Reason))}
	case next <= e.query.tokens:
		return Note{"image_without_identity", fmt.Sprintf("a placeholder token stands at token %d or after, in block %d, and the request's features declare no image there", min(pr.Limit, e.query.tokens), n)}
	}
	return Note{"complete", "every whole block of the prompt is held"}
}

// imageAt is the first image or video that touches block b, nil if none does.
func (e *explainer) imageAt(c *candidate, b int) *normalize.Range {
	if e.request.given&fieldTokens == 0 {
		return nil
	}
	pr := e.query.prompt.Project(c.member.View, c.shape)
	from, to := b*int(c.shape.BlockSize), (b+1)*int(c.shape.BlockSize)+c.shape.Window.Tokens()
	for i := range pr.Ranges {
		if r := &pr.Ranges[i]; r.Offset < to && r.End > from {
			return r
		}
	}
	return nil
}

// variant is the same prompt under another adapter or without its salt, and
// what each stream holds of it on its tiers.
type variant struct {
	code, how string
	held      map[*index.Stream]int
}

// otherwise finds the variant of which c's stream holds most, if that is more
// than what was asked: everyone who has the prompt may ask it so.
func (e *explainer) otherwise(c *candidate, x *index.Explanation) (Note, bool) {
	if !e.varied {
		e.varied = true
		e.vary()
	}
	most := x.Disk * int(c.shape.BlockSize)
	var best *variant
	for i := range e.variants {
		if v := &e.variants[i]; v.held[c.member.Stream()] > most {
			most, best = v.held[c.member.Stream()], v
		}
	}
	if best == nil {
		return Note{}, false
	}
	return Note{best.code, fmt.Sprintf("%s was never stored as it was asked, but %d tokens of the same prompt are held %s", c.where(x.Device), most, best.how)}, true
}

// maxVariants bounds the adapters that are tried.
const maxVariants = 16

func (e *explainer) vary() {
	if e.request.given&fieldTokens == 0 {
		return
	}
	if e.request.CacheSalt != "" {
		open := *e.request
		open.CacheSalt = ""
		e.try(&open, "other_salt", "without a salt")
	}
	names := map[string]bool{"": true}
	for _, p := range e.query.resolved.Pictures {
		for _, a := range p.Adapters {
			names[a] = true
		}
	}
	delete(names, e.query.prompt.LoraName)
	for _, a := range slices.Sorted(maps.Keys(names))[:min(len(names), maxVariants)] {
		other := *e.request
		other.Model, other.LoraName = e.query.resolved.Model, a
		how := "under the base model"
		if a != "" {
			how = fmt.Sprintf("under the adapter %q", a)
		}
		e.try(&other, "other_lora", how)
	}
}

func (e *explainer) try(r *MatchRequest, code, how string) {
	v := variant{code, how, map[*index.Stream]int{}}
	q := new(query)
	q.reset(r)
	if q.run(e.fleet, r) != nil {
		return
	}
	for i := range q.candidates {
		v.held[q.candidates[i].member.Stream()] = q.candidates[i].row.Disk
	}
	e.variants = append(e.variants, v)
}
