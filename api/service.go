package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// Service is the core behind the routes, as plain calls. It is safe for
// concurrent use.
type Service struct {
	fleet   *fleet.Fleet
	metrics *metrics
	recent  *recent
	queries sync.Pool
}

// NewService answers from f. It is a prometheus.Collector of the metrics of its
// questions and outcomes.
func NewService(f *fleet.Fleet) *Service {
	s := &Service{fleet: f, metrics: newMetrics(), recent: newRecent()}
	s.queries.New = func() any { return new(query) }
	return s
}

// Match says who holds how much of the prompt. The response is the caller's.
func (s *Service) Match(ctx context.Context, r *MatchRequest) (*MatchResponse, *Error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	a := new(MatchResponse)
	if err := s.match(ctx, r, a); err != nil {
		return nil, err
	}
	return a, nil
}

// match is Match into a response whose memory is used again.
func (s *Service) match(ctx context.Context, r *MatchRequest, a *MatchResponse) *Error {
	if ctx.Err() != nil {
		return failf(http.StatusServiceUnavailable, ReasonUnavailable, "the request was given up")
	}
	q := s.queries.Get().(*query)
	defer func() {
		q.release()
		s.queries.Put(q)
	}()
	q.reset(r)
	err := q.run(s.fleet, r)
	if err == nil {
		err = q.rank(r, a)
	}
	if err == nil {
		if r.RequestID != "" {
			s.recent.add(r.RequestID, q.candidates)
		}
		q.answer(r, a)
	}
	s.metrics.matched(q, a, err)
	return err
}

// query is the working memory of one match.
type query struct {
	prompt   normalize.Prompt
	resolved fleet.Resolved
	tokens   int

	// asked are the members of the picture in hand that the request allows;
	// streams, of and rows are parallel to it.
	asked   []*fleet.Member
	streams []*index.Stream
	of      []int
	rows    []index.Row

	shapes []normalize.Shape
	// views are parallel to the picture's; each keeps a chain per shape.
	views []index.QueryView
	// projections of view v and shape s are at [v*len(shapes)+s].
	projections []normalize.Projection
	used        []bool // parallel to views: a member that is asked has it

	// candidates of all pictures; after answer, those that became rows.
	candidates []candidate
	// bestBlocks is what the first row holds on its nearest tiers, in blocks.
	bestBlocks int
	hashed     []Hashed
}

// candidate is one stream's answer before it is a row or a refusal.
type candidate struct {
	picture *fleet.Picture
	member  *fleet.Member
	row     index.Row
	shape   normalize.Shape
	exact   bool
	reason  normalize.Reason
	param   string
}

// score orders rows: what vLLM would take, or what is on the device where that
// is not known.
func (c *candidate) score() int {
	if c.row.UsableReason == index.UsableKnown {
		return c.row.Usable
	}
	return c.row.Device
}

func compareCandidates(a, b candidate) int {
	return cmp.Or(
		b.score()-a.score(),
		b.row.Device-a.row.Device,
		b.row.Host-a.row.Host,
		b.row.Disk-a.row.Disk,
		strings.Compare(a.member.Worker, b.member.Worker),
		a.member.Rank-b.member.Rank,
		strings.Compare(a.member.Key.Namespace, b.member.Key.Namespace),
		strings.Compare(a.member.Key.Role, b.member.Key.Role),
	)
}

// release lets go of the pictures, members and prompt, so that an idle query
// keeps no worker's memory alive.
func (q *query) release() {
	q.prompt, q.resolved, q.hashed, q.shapes = normalize.Prompt{}, fleet.Resolved{}, nil, nil
	clear(q.asked[:cap(q.asked)])
	clear(q.streams[:cap(q.streams)])
	clear(q.candidates[:cap(q.candidates)])
	q.candidates = q.candidates[:0]
}

// reset prepares q for r.
func (q *query) reset(r *MatchRequest) {
	q.prompt = normalize.Prompt{Tokens: r.Tokens, Features: r.Features, CacheSalt: r.CacheSalt, Mode: r.Mode}
	q.bestBlocks = 0
	q.tokens = len(r.Tokens)
	if r.given&fieldTokens == 0 {
		q.tokens = (len(r.BlockHashes) + len(r.SequenceHashes)) * int(r.HashBlockSize)
	}
}

// run fills q.candidates with every stream's answer.
func (q *query) run(f *fleet.Fleet, r *MatchRequest) *Error {
	if err := q.resolve(f, r); err != nil {
		return err
	}
	for _, p := range q.resolved.Pictures {
		q.ask(p, r)
	}
	return nil
}

// resolve finds whom the request asks.
func (q *query) resolve(f *fleet.Fleet, r *MatchRequest) *Error {
	resolved, err := f.Resolve(fleet.Selector{Model: r.Model, LoraName: r.LoraName, Namespace: r.Namespace, Role: r.Role})
	if err != nil {
		return resolveError(err, r)
	}
	q.resolved = resolved
	q.prompt.LoraName = resolved.LoraName
	return nil
}

// resolveError names the model only as far as the caller gave it.
func resolveError(err error, r *MatchRequest) *Error {
	switch {
	case errors.Is(err, fleet.ErrLoraContradiction):
		e := failf(http.StatusBadRequest, ReasonLoraContradiction, "model %q is another adapter than lora_name; give one of the two", safe(r.Model))
		e.Param = "lora_name"
		return e
	case errors.Is(err, fleet.ErrAmbiguousModel):
		e := failf(http.StatusConflict, ReasonAmbiguousModel, "several models fit; name one in model (GET /v1/models lists them)")
		e.Param = "model"
		return e
	}
	e := failf(http.StatusNotFound, ReasonUnknownModel, "%s (GET /v1/models lists what there is)", unknownModel(r))
	e.Param = "model"
	return e
}

// unknownModel does not repeat the namespace: on the drop-in routes a tenant is
// in it.
func unknownModel(r *MatchRequest) string {
	where := ""
	if r.Namespace != "" || r.Role != "" {
		where = " in the namespace and role asked for"
	}
	if r.Model == "" {
		return "no model is known yet" + where
	}
	return fmt.Sprintf("no model, alias or served adapter %q is known%s", safe(r.Model), where)
}

// ask matches the prompt against one worker set.
func (q *query) ask(p *fleet.Picture, r *MatchRequest) {
	q.choose(p, r)
	if len(q.asked) == 0 {
		return
	}
	q.shapes = p.Index.Shapes()
	if len(q.shapes) == 0 {
		q.shapes = []normalize.Shape{defaultShape(q.asked[0], r)}
	}
	if r.given&fieldTokens != 0 {
		q.hash(p)
	} else {
		q.takeHashes(p, r)
	}
	if r.Include&IncludeHashes != 0 {
		q.keepHashes(p)
	}
	q.match(p)
	for i, m := range q.asked {
		q.candidates = append(q.candidates, q.candidate(p, m, q.rows[i], q.of[i]))
	}
}

// match asks the index: by the picture's roster where all its members are
// asked.
func (q *query) match(p *fleet.Picture) {
	q.rows = slices.Grow(q.rows[:0], len(q.asked))[:len(q.asked)]
	iq := index.Query{PromptTokens: q.tokens, Views: q.views, Of: q.of}
	if len(q.asked) == len(p.Members) {
		p.Roster.Match(&iq, q.rows)
		return
	}
	p.Index.Match(&iq, q.streams, q.rows)
}

// choose fills asked, streams and of with the members that may answer.
func (q *query) choose(p *fleet.Picture, r *MatchRequest) {
	q.asked, q.streams, q.of = q.asked[:0], q.streams[:0], q.of[:0]
	q.used = slices.Grow(q.used[:0], len(p.Views))[:len(p.Views)]
	clear(q.used)
	for i, m := range p.Members {
		if r.given&fieldWorkers != 0 && !slices.Contains(r.Workers, m.Worker) {
			continue
		}
		q.asked = append(q.asked, m)
		q.streams = append(q.streams, p.Streams[i])
		q.of = append(q.of, p.ViewOf[i])
		q.used[p.ViewOf[i]] = true
	}
}

// defaultShape stands in while a set has no blocks: only the reasons of a
// projection are wanted of it.
func defaultShape(m *fleet.Member, r *MatchRequest) normalize.Shape {
	const usual = 16
	return normalize.Shape{BlockSize: cmp.Or(m.BlockSize, r.HashBlockSize, usual)}
}

// grow makes room for the picture's views and shapes and keeps the chains'
// memory.
func (q *query) grow(p *fleet.Picture) {
	q.views = slices.Grow(q.views[:0], len(p.Views))[:len(p.Views)]
	n := len(p.Views) * len(q.shapes)
	q.projections = slices.Grow(q.projections[:0], n)[:n]
	clear(q.projections)
	for v := range q.views {
		view := &q.views[v]
		view.Chains = slices.Grow(view.Chains[:0], len(q.shapes))[:len(q.shapes)]
		view.Limits = slices.Grow(view.Limits[:0], len(q.shapes))[:len(q.shapes)]
	}
}

// hash identifies the prompt's blocks once per view and shape.
func (q *query) hash(p *fleet.Picture) {
	q.grow(p)
	for v := range q.views {
		view := &q.views[v]
		if !q.used[v] {
			view.Chains, view.Limits = view.Chains[:0], view.Limits[:0]
			continue
		}
		for s, shape := range q.shapes {
			pr := q.prompt.Project(p.Views[v], shape)
			q.projections[v*len(q.shapes)+s] = pr
			view.Limits[s] = pr.Limit
			q.prompt.Chain(&view.Chains[s], &pr, p.Views[v], shape)
		}
	}
}

// takeHashes makes chains of the hashes that the request gives. They were made
// with plain windows; other shapes hold nothing of them.
func (q *query) takeHashes(p *fleet.Picture, r *MatchRequest) {
	q.shapes = []normalize.Shape{{BlockSize: r.HashBlockSize}}
	q.grow(p)
	for v := range q.views {
		view := &q.views[v]
		view.Limits[0] = q.tokens
		if len(r.SequenceHashes) > 0 {
			normalize.ChainFromSequences(&view.Chains[0], q.shapes[0], r.SequenceHashes)
		} else {
			normalize.ChainFromLocals(&view.Chains[0], q.shapes[0], r.BlockHashes)
		}
		q.projections[v] = normalize.Projection{Exact: true, Limit: q.tokens}
	}
}

// keepHashes copies the chains for the answer.
func (q *query) keepHashes(p *fleet.Picture) {
	for v, view := range q.views {
		for _, c := range view.Chains {
			q.hashed = append(q.hashed, Hashed{Shape: c.Shape, IDs: p.Views[v].IDs, Locals: slices.Clone(c.Locals), Seqs: slices.Clone(c.Seqs)})
		}
	}
}

// candidate joins a stream's row with what its view made of the prompt.
func (q *query) candidate(p *fleet.Picture, m *fleet.Member, row index.Row, view int) candidate {
	shape := row.Shape
	if shape.BlockSize == 0 {
		shape, _ = m.Stream().Shape()
	}
	at := slices.Index(q.shapes, shape)
	asked := max(0, at)
	pr := q.projections[view*len(q.shapes)+asked]
	if at < 0 && shape.BlockSize != 0 && !q.prompt.Features.Empty() {
		// Nothing was asked in blocks of the stream's size: nobody holds any.
		// Whether they would tell the images apart depends on it all the same.
		pr = q.prompt.Project(p.Views[view], shape)
	}
	return candidate{picture: p, member: m, row: row, shape: q.shapes[asked], exact: pr.Exact, reason: pr.Reason, param: pr.Param}
}

// rank takes out whom the request refuses, and sorts the others, best first.
func (q *query) rank(r *MatchRequest, a *MatchResponse) *Error {
	a.reset()
	if err := q.refuse(r, a); err != nil {
		return err
	}
	slices.SortFunc(q.candidates, compareCandidates)
	return nil
}

// answer makes rows of the ranked candidates.
func (q *query) answer(r *MatchRequest, a *MatchResponse) {
	a.Model, a.LoraName, a.RequestID, a.PromptTokens = q.resolved.Model, q.resolved.LoraName, r.RequestID, q.tokens
	a.Hashes = append(a.Hashes, q.hashed...)
	q.describe(a)
	q.project(r, a)
	q.bestBlocks = q.best()
	q.cut(r)
	for i := range q.candidates {
		a.Workers = append(a.Workers, q.candidates[i].asRow())
	}
	if len(a.Workers) > 0 {
		a.Best = a.Workers[0].Worker
	}
}

// refuse takes the candidates that are not exact out of an answer that must
// be, and refuses the request where none is left.
func (q *query) refuse(r *MatchRequest, a *MatchResponse) *Error {
	if r.Mode != normalize.Exact {
		return nil
	}
	kept := q.candidates[:0]
	var param string
	for _, c := range q.candidates {
		switch {
		case c.exact:
			kept = append(kept, c)
			continue
		case c.reason.Malformed():
			e := failf(http.StatusBadRequest, Reason(c.reason), "the features are malformed, so no worker can answer exactly")
			e.Param = cmp.Or(c.param, "features")
			return e
		}
		param = cmp.Or(param, c.param)
		a.Refused = append(a.Refused, Refusal{
			Worker: c.member.Worker, Rank: c.member.Rank, Namespace: c.member.Key.Namespace, Role: c.member.Key.Role,
			Reason: c.reason, TextOnlyDevice: c.row.Device,
		})
	}
	q.candidates = kept
	if len(kept) > 0 || len(a.Refused) == 0 {
		return nil
	}
	e := failf(http.StatusConflict, ReasonExactUnavailable,
		"no worker can match the images exactly (%s); ask with mm auto or text_only, or see each worker's reason under refused", a.Refused[0].Reason)
	e.Param = cmp.Or(param, "mm")
	e.Refused = slices.Clone(a.Refused)
	return e
}

// describe says how the images were taken by those who answer.
func (q *query) describe(a *MatchResponse) {
	exact, other, same := 0, 0, true
	ids := normalize.TokenIDs{}
	for i := range q.candidates {
		c := &q.candidates[i]
		if c.exact {
			exact++
		} else {
			if other == 0 {
				a.MM.Reason, a.MM.Param = c.reason, c.param
			}
			other++
		}
		if i == 0 {
			ids = c.member.View.IDs
		}
		same = same && c.member.View.IDs == ids
	}
	switch {
	case other == 0:
		a.MM.Mode = "exact"
	case exact == 0:
		a.MM.Mode = "text_only"
	default:
		a.MM.Mode = "mixed"
	}
	a.MM.Images = q.prompt.Features.Images()
	a.MM.ImageTokenID, a.MM.HasImageTokenID = ids.Image, ids.HasImage && same
}

// project adds the prompt as the best row's kind of worker identifies it.
func (q *query) project(r *MatchRequest, a *MatchResponse) {
	if r.Include&IncludeProjection == 0 || len(q.candidates) == 0 || r.given&fieldTokens == 0 {
		return
	}
	c := &q.candidates[0]
	view := c.member.View
	pr := q.prompt.Project(view, c.shape)
	out := &Projected{Shape: c.shape, IDs: view.IDs, Exact: pr.Exact, Reason: pr.Reason, ExpandedPromptLen: q.prompt.ExpandedLen()}
	if pr.Exact {
		out.RoutingTokenIDs = q.prompt.RoutingTokens(nil, &pr, c.shape.BlockSize)
		out.Markers = pr.Markers()
	}
	a.Projection = out
}

// cut leaves the rows that the request wants.
func (q *query) cut(r *MatchRequest) {
	least := max(r.MinTokens, 1)
	if r.Include&IncludeZero != 0 {
		least = r.MinTokens
	}
	q.candidates = slices.DeleteFunc(q.candidates, func(c candidate) bool { return c.row.Disk < least })
	if r.TopK > 0 && len(q.candidates) > r.TopK {
		q.candidates = q.candidates[:r.TopK]
	}
}

// best is the longest match of the first candidate, in blocks.
func (q *query) best() int {
	if len(q.candidates) == 0 || q.candidates[0].shape.BlockSize == 0 {
		return 0
	}
	c := &q.candidates[0]
	return c.row.Disk / int(c.shape.BlockSize)
}

// asRow adds the stream's state of now.
func (c *candidate) asRow() WorkerRow {
	st := c.member.Status()
	bs := c.row.Shape.BlockSize
	if bs == 0 {
		bs = c.member.BlockSize
	}
	return WorkerRow{
		Worker: c.member.Worker, Rank: c.member.Rank, Namespace: c.member.Key.Namespace, Role: c.member.Key.Role,
		BlockSize: bs, Device: c.row.Device, Host: c.row.Host, Disk: c.row.Disk,
		Usable: c.row.Usable, UsableReason: string(c.row.UsableReason),
		ExactMM: c.exact && c.member.ExactMM, Reason: c.reason,
		State: st.State.String(), Seq: st.Seq, HasSeq: st.HasSeq, Age: st.Age, Lost: st.Lost,
		Trimmed: c.member.Stream().Trimmed(),
	}
}
