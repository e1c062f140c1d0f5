package api

import (
	"net/http"
	"strings"
)

// routes are all of them. docs/api.md and openapi.json say the same; tests
// compare.
func (s *Server) routes() []route {
	routes := []route{
		{method: "POST", path: "/v1/match", access: read, body: true, handle: handleMatch},
		{method: "POST", path: "/v1/match/batch", access: read, body: true, handle: handleBatch},
		{method: "POST", path: "/v1/explain", access: read, body: true, handle: handleExplain},
		{method: "POST", path: "/v1/outcomes", access: read, body: true, handle: handleOutcome},
		{method: "GET", path: "/v1/workers", access: read, handle: handleWorkers},
		{method: "GET", path: "/v1/workers/{id}", access: read, handle: handleWorker},
		{method: "PUT", path: "/v1/workers/{id}", access: change, body: true, handle: handlePutWorker},
		{method: "DELETE", path: "/v1/workers/{id}", access: change, handle: handleDeleteWorker},
		{method: "POST", path: "/v1/workers/{id}/reset", access: change, handle: handleResetWorker},
		{method: "GET", path: "/v1/models", access: read, handle: handleModels},
		{method: "GET", path: "/v1/dump", access: read, streams: true, handle: handleDump},
		{method: "POST", path: "/v1/snapshot", access: change, handle: handleSnapshot},
		{method: "GET", path: "/healthz", access: public, handle: handleHealth},
		{method: "GET", path: "/readyz", access: public, handle: handleReady},
		{method: "GET", path: "/metrics", access: read, streams: true, handle: s.handleMetrics()},
		{method: "GET", path: "/openapi.json", access: public, handle: handleOpenAPI},
		{method: "GET", path: "/{$}", access: public, handle: handleDashboard},

		{method: "POST", path: "/register", access: change, dropin: true, body: true, handle: handleRegister},
		{method: "POST", path: "/unregister", access: change, dropin: true, body: true, handle: handleUnregister},
		{method: "GET", path: "/workers", access: read, dropin: true, handle: handleInstances},
		{method: "POST", path: "/query", access: read, dropin: true, body: true, handle: handleQuery},
		{method: "POST", path: "/query_by_hash", access: read, dropin: true, body: true, handle: handleQueryByHash},
		{method: "GET", path: "/dump", access: read, dropin: true, streams: true, handle: handleDropInDump},
		{method: "GET", path: "/health", access: public, dropin: true, handle: handleHealth},
		{method: "POST", path: "/register_peer", access: change, dropin: true, body: true, handle: handleRegisterPeer},
		{method: "POST", path: "/deregister_peer", access: change, dropin: true, body: true, handle: handleDeregisterPeer},
		{method: "GET", path: "/peers", access: read, dropin: true, handle: handlePeers},
	}
	for i := range routes {
		routes[i].name = strings.TrimSuffix(routes[i].path, "{$}")
	}
	return routes
}

// acceptsMsgpack says whether the answer is wanted in msgpack.
func acceptsMsgpack(r *http.Request) bool {
	a := r.Header.Get("Accept")
	return a != "" && strings.Contains(a, "msgpack") && !strings.HasPrefix(a, "application/json")
}

// handleMatch answers POST /v1/match.
func handleMatch(c *call) *Error {
	if err := c.decode(); err != nil {
		return err
	}
	if err := c.srv.service.match(c.r.Context(), &c.req, &c.res); err != nil {
		return err
	}
	c.res.encode(&c.out)
	return nil
}

// decode reads the body as one match request. An array of one is taken as that
// one: the render route for plain completions answers so.
func (c *call) decode() *Error {
	if c.msgpackIn {
		c.mp.b, c.mp.i = c.body, 0
		if err := decodeMatchMsgpack(&c.mp, &c.req); err != nil {
			return err
		}
		return c.mp.end()
	}
	s := &c.in
	s.b, s.i = c.body, 0
	if s.space() != '[' {
		if err := decodeMatch(s, &c.req); err != nil {
			return err
		}
		return s.end()
	}
	err := s.array(func(i int) *Error {
		if i > 0 {
			return failf(http.StatusBadRequest, ReasonMalformedBody, "the body is a list of several requests; send it to /v1/match/batch")
		}
		return decodeMatch(s, &c.req)
	})
	if err == nil && c.req.seen == 0 {
		err = failf(http.StatusBadRequest, ReasonMalformedBody, "the body is an empty list")
	}
	if err != nil {
		return err
	}
	return s.end()
}

// maxBatch bounds the requests of a batch.
const maxBatch = 256

// handleBatch answers POST /v1/match/batch: {"requests": [...]} or the bare
// array, with {"responses": [...]} in the same order. A request that fails has
// its error in its place.
func handleBatch(c *call) *Error {
	parts, err := c.batch()
	if err != nil {
		return err
	}
	whole := c.body
	defer func() { c.body = whole }()
	out := &c.out
	out.openMap(1)
	out.key("responses").openArray(len(parts))
	for _, part := range parts {
		c.body = part
		err := c.decode()
		if err == nil {
			err = c.srv.service.match(c.r.Context(), &c.req, &c.res)
		}
		if err != nil {
			err.encode(out)
			continue
		}
		c.res.encode(out)
	}
	out.closeArray()
	out.closeMap()
	return nil
}

// batch splits the body into its requests, checking its grammar as a whole.
func (c *call) batch() (parts [][]byte, err *Error) {
	if c.msgpackIn {
		m := &c.mp
		m.b, m.i = c.body, 0
		if err := batchOf(m, m.i < len(m.b) && isMap(m.b[m.i]), m.raw, &parts); err != nil {
			return nil, err
		}
		return parts, m.end()
	}
	s := &c.in
	s.b, s.i = c.body, 0
	if err := batchOf(s, s.space() == '{', s.raw, &parts); err != nil {
		return nil, err
	}
	return parts, s.end()
}

func isMap(b byte) bool { return b >= 0x80 && b < 0x90 || b == 0xde || b == 0xdf }

// container is what batchOf needs of either encoding.
type container interface {
	value
	isString() bool
	u64() (uint64, *Error)
	object(func(key []byte) *Error) *Error
	array(func(i int) *Error) *Error
}

func batchOf(v container, wrapped bool, raw func() ([]byte, *Error), parts *[][]byte) *Error {
	list := func() *Error {
		return v.array(func(i int) *Error {
			if i >= maxBatch {
				return failf(http.StatusBadRequest, ReasonTooManyRequests, "a batch has at most %d requests", maxBatch)
			}
			part, err := raw()
			*parts = append(*parts, part)
			return err
		})
	}
	if !wrapped {
		return list()
	}
	seen := false
	err := v.object(func(key []byte) *Error {
		if string(key) != "requests" {
			return skipUnknown(key, v, nil)
		}
		if seen {
			return duplicate("requests")
		}
		seen = true
		return list()
	})
	if err == nil && !seen {
		err = failf(http.StatusBadRequest, ReasonMissingField, "give the requests as an array")
		err.Param = "requests"
	}
	return err
}

// Outcome is what really happened to a request that was routed.
type Outcome struct {
	RequestID string
	Model     string
	Worker    string
	Rank      int
	// Predicted is what the answer promised, Cached what the engine reported,
	// Prompt the prompt's length, all in tokens.
	Predicted, Cached, Prompt int
}

// handleOutcome answers POST /v1/outcomes.
func handleOutcome(c *call) *Error {
	o, err := c.outcome()
	if err != nil {
		return err
	}
	if err := c.srv.service.Outcome(o); err != nil {
		return err
	}
	c.out.openMap(1)
	c.out.key("status")
	c.out.str("ok")
	c.out.closeMap()
	return nil
}

func (c *call) outcome() (*Outcome, *Error) {
	o := new(Outcome)
	v, end := c.reader()
	fields := newFields("model", "worker", "predicted_tokens", "cached_tokens", "prompt_tokens")
	err := v.object(func(key []byte) *Error {
		return fields.read(key, v, nil, func(field string) (err *Error) {
			switch field {
			case "request_id":
				o.RequestID, err = name(v)
			case "model":
				o.Model, err = name(v)
			case "worker":
				o.Worker, err = name(v)
			case "dp_rank":
				o.Rank, err = count(v)
			case "predicted_tokens":
				o.Predicted, err = count(v)
			case "cached_tokens":
				o.Cached, err = count(v)
			case "prompt_tokens":
				o.Prompt, err = count(v)
			default:
				return errUnread
			}
			return err
		})
	})
	if err == nil {
		err = fields.missing()
	}
	if err == nil {
		err = end()
	}
	return o, err
}

// Outcome records what really happened, as metrics.
func (s *Service) Outcome(o *Outcome) *Error {
	known := s.knowsWorker(o.Worker)
	if !known {
		e := failf(http.StatusNotFound, ReasonUnknownWorker, "no worker of this id is known")
		e.Param = "worker"
		return e
	}
	m := s.metrics
	off := o.Predicted - o.Cached
	m.predictionError.Observe(float64(off))
	switch {
	case off > 0:
		m.outcomes.WithLabelValues("too_long").Inc()
	case off < 0:
		m.outcomes.WithLabelValues("too_short").Inc()
	default:
		m.outcomes.WithLabelValues("exact").Inc()
	}
	m.selected.WithLabelValues(o.Worker).Inc()
	if o.RequestID != "" && wrongWorker(s.recent.of(o.RequestID), o) {
		m.wrongWorker.Inc()
	}
	return nil
}

// wrongWorker says whether another stream was told to hold more than the one
// that was chosen.
func wrongWorker(rows []toldRow, o *Outcome) bool {
	if len(rows) == 0 {
		return false
	}
	best, held := 0, 0
	if len(rows) == recentRows {
		held = rows[recentRows-1].tokens
	}
	for _, r := range rows {
		best = max(best, r.tokens)
		if r.worker == o.Worker && r.rank == o.Rank {
			held = r.tokens
		}
	}
	return best > held
}
