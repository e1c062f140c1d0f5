package api

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvindexd/kvindexd/fleet"
)

// Config of a Server. The zero value of a field means its default.
type Config struct {
	Fleet *fleet.Fleet
	// Logger, slog.Default.
	Logger *slog.Logger
	// Registry takes the metrics of the service and the fleet and serves them;
	// a new one with the process's and Go's collectors.
	Registry *prometheus.Registry

	// ReadTokens may read, ChangeTokens may read and change the fleet. With
	// neither, everyone who reaches the listener may do both.
	ReadTokens, ChangeTokens Tokens

	// MaxBody bounds one body in bytes, 16 MiB; MaxBodies the memory of all
	// bodies in flight, 256 MiB.
	MaxBody, MaxBodies int64
	// MaxConcurrent bounds the requests that are being answered at once, 256.
	// A body that is still coming counts against MaxBodies only.
	MaxConcurrent int
	// MaxConnections bounds the open connections, 4096; one more ends the one
	// that has been idle longest.
	MaxConnections int
	// MinWorkers is how many workers must be followed while /readyz says ready.
	MinWorkers int

	// HeaderTimeout, 5 s; BodyTimeout, from the request's first byte to the
	// body's last, 30 s; IdleTimeout between requests, 2 min; WriteTimeout for
	// an answer, 1 min.
	HeaderTimeout, BodyTimeout, IdleTimeout, WriteTimeout time.Duration
	// DrainDelay is how long /readyz says that the end is near, while all is
	// still served, before the listener closes; 0 for not at all.
	DrainDelay time.Duration

	// Peers are where /peers begins; PeersChanged, where set, is told the whole
	// list after every change of it, one change at a time.
	Peers        []string
	PeersChanged func([]string)
	// Snapshots, where there are any, are written by POST /v1/snapshot and tell
	// their metrics.
	Snapshots *fleet.Snapshots
	// Version is told by /healthz and the metrics.
	Version string
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
		c.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	}
	def := func(v *int64, d int64) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&c.MaxBody, 16<<20)
	def(&c.MaxBodies, max(256<<20, 4*c.MaxBody*memoryPerByte))
	if c.MaxConcurrent <= 0 {
		c.MaxConcurrent = 256
	}
	if c.MaxConnections <= 0 {
		c.MaxConnections = 4096
	}
	wait := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	wait(&c.HeaderTimeout, 5*time.Second)
	wait(&c.BodyTimeout, 30*time.Second)
	wait(&c.IdleTimeout, 2*time.Minute)
	wait(&c.WriteTimeout, time.Minute)
	return c
}

// Server answers the routes.
type Server struct {
	Config
	service     *Service
	metrics     *metrics
	peers       peers
	registering registering
	draining    atomic.Bool

	handler http.Handler
	origins *http.CrossOriginProtection
	bodies  budget
	slots   chan struct{}
	dumps   chan struct{}
	calls   sync.Pool
	now     func() time.Time
}

// NewServer makes a server; it listens on nothing yet.
func NewServer(c Config) (*Server, error) {
	if c.Fleet == nil {
		return nil, errors.New("api: no fleet")
	}
	s := &Server{Config: c.withDefaults(), origins: http.NewCrossOriginProtection(), now: time.Now}
	s.service = NewService(s.Fleet)
	s.metrics = s.service.metrics
	s.bodies.max = s.MaxBodies
	s.slots = make(chan struct{}, s.MaxConcurrent)
	s.dumps = make(chan struct{}, maxDumps)
	s.calls.New = func() any { return &call{srv: s} }
	s.peers.set(s.Peers)
	s.peers.changed = s.PeersChanged
	if err := errors.Join(s.Registry.Register(s.service), s.Registry.Register(s.Fleet)); err != nil {
		return nil, err
	}
	if s.Snapshots != nil {
		if err := s.Registry.Register(s.Snapshots); err != nil {
			return nil, err
		}
	}
	s.handler = s.mux()
	return s, nil
}

// Service is the core that the routes ask.
func (s *Server) Service() *Service { return s.service }

// Handler is all routes.
func (s *Server) Handler() http.Handler { return s.handler }

// maxHeader bounds a request's headers in bytes.
const maxHeader = 32 << 10

// Serve answers on l until ctx ends. Then /readyz is not ready for DrainDelay,
// and the requests in flight finish within five seconds. It closes l.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	open := connections{max: s.MaxConnections}
	h := &http.Server{
		ConnState:         open.state,
		Handler:           s.handler,
		ReadHeaderTimeout: s.HeaderTimeout,
		ReadTimeout:       s.BodyTimeout,
		WriteTimeout:      s.BodyTimeout + s.WriteTimeout,
		IdleTimeout:       s.IdleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.Logger.Handler(), slog.LevelDebug),
	}
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		s.draining.Store(true)
		time.Sleep(s.DrainDelay)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if h.Shutdown(grace) != nil {
			h.Close()
		}
	})
	err := h.Serve(l)
	if stop() {
		return err // the listener failed by itself
	}
	<-ended
	return nil
}

// route is one method of one path.
type route struct {
	method, path string
	// name is the label in metrics: the path, without ids.
	name   string
	access access
	// dropin routes have their errors in the form of the indexers they stand
	// in for.
	dropin bool
	// body says that the handler reads one.
	body bool
	// streams says that the answer is written as it comes: it holds no place
	// among the requests being answered.
	streams bool
	handle  func(*call) *Error
}

// mux is the routes, and what answers where there is none.
func (s *Server) mux() http.Handler {
	mux := http.NewServeMux()
	methods, dropin := map[string]string{}, map[string]bool{}
	for _, rt := range s.routes() {
		mux.Handle(rt.method+" "+rt.path, s.serve(rt))
		dropin[rt.path] = rt.dropin
		if methods[rt.path] != "" {
			methods[rt.path] += ", "
		}
		methods[rt.path] += rt.method
	}
	for path, allowed := range methods {
		mux.Handle(path, s.serve(route{name: "other", dropin: dropin[path], handle: func(c *call) *Error {
			c.w.Header().Set("Allow", allowed)
			return failf(http.StatusMethodNotAllowed, ReasonMethod, "this path takes %s", allowed)
		}}))
	}
	mux.Handle("/", s.serve(route{name: "other", handle: notFound}))
	return mux
}

func notFound(*call) *Error {
	return failf(http.StatusNotFound, ReasonNotFound, "there is no such route (GET /openapi.json lists them)")
}

// call is one request and its working memory, used again for the next.
type call struct {
	srv *Server
	w   http.ResponseWriter
	r   *http.Request

	body      []byte
	reserved  int64 // of the server's budget
	msgpackIn bool

	in  scanner
	mp  mcursor
	req MatchRequest
	res MatchResponse

	out         encoder
	status      int
	contentType string
	// streamed says that the handler has written its answer itself.
	streamed bool
}

// serve wraps a route: guards, body, a place among the requests in flight, and
// the one place where an error becomes status, body, log line and metric.
func (s *Server) serve(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := s.now()
		c := s.calls.Get().(*call)
		c.begin(w, r)
		err := c.run(&rt)
		c.finish(&rt, err)
		s.log(&rt, c, err)
		s.metrics.served(rt.name, c.status, err, s.now().Sub(start))
		c.end()
	})
}

func (c *call) begin(w http.ResponseWriter, r *http.Request) {
	c.w, c.r = w, r
	c.status, c.contentType = http.StatusOK, ""
	c.msgpackIn, c.streamed = false, false
	c.out.reset(acceptsMsgpack(r))
}

// run is everything of a request that can fail.
func (c *call) run(rt *route) (err *Error) {
	s := c.srv
	defer func() {
		if v := recover(); v != nil {
			if v == http.ErrAbortHandler {
				panic(v)
			}
			s.Logger.Error("BUG: a handler panicked", "route", rt.name, "panic", v)
			err = failf(http.StatusInternalServerError, ReasonInternal, "the server failed; its log says why")
		}
	}()
	if s.origins.Check(c.r) != nil {
		return failf(http.StatusForbidden, ReasonCrossOrigin, "a page of another origin may not ask this")
	}
	if err := s.authorize(rt.access, c.r); err != nil {
		return err
	}
	if rt.body {
		if err := c.readBody(s.MaxBody); err != nil {
			return err
		}
		if rt.dropin {
			c.answersInKind()
		}
	}
	if !rt.streams {
		select {
		case s.slots <- struct{}{}:
			defer func() { <-s.slots }()
		default:
			e := failf(http.StatusTooManyRequests, ReasonOverloaded, "more than %d requests at once; try again", s.MaxConcurrent)
			e.RetryAfter = time.Second
			return e
		}
	}
	return rt.handle(c)
}

// Header values that all answers share; nobody writes to them.
var typeJSON, typeMsgpack = []string{"application/json"}, []string{"application/msgpack"}

// finish writes the answer, or the error in its place.
func (c *call) finish(rt *route, err *Error) {
	if c.streamed {
		return
	}
	if err != nil {
		c.fail(rt, err)
	}
	h := c.w.Header()
	switch {
	case c.contentType != "":
		h.Set("Content-Type", c.contentType)
	case c.out.msgpack:
		h["Content-Type"] = typeMsgpack
	default:
		h["Content-Type"] = typeJSON
	}
	h.Set("Content-Length", itoa(len(c.out.b)))
	c.w.WriteHeader(c.status)
	c.w.Write(c.out.b)
}

func (c *call) fail(rt *route, err *Error) {
	c.status, c.contentType = err.Status, ""
	c.out.reset(c.out.msgpack)
	if rt.dropin {
		encodeDropinError(&c.out, err)
	} else {
		err.encode(&c.out)
	}
	h := c.w.Header()
	if err.RetryAfter > 0 {
		h.Set("Retry-After", itoa(int((err.RetryAfter+time.Second-1)/time.Second)))
	}
	if err.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="kvindexd"`)
	}
	if err.Status == http.StatusRequestEntityTooLarge || err.Status == http.StatusRequestTimeout {
		h.Set("Connection", "close") // what is left of the body is not read
	}
}

// log says what happened: a fault of ours aloud, a request only to who wants
// to see each. Neither shows anything of the body but the request's id.
func (s *Server) log(rt *route, c *call, err *Error) {
	ctx := c.r.Context()
	switch {
	case err != nil && err.Status >= 500:
		s.Logger.Warn("request failed", "route", rt.name, "status", err.Status, "reason", err.Reason, "request_id", safe(c.req.RequestID))
	case s.Logger.Enabled(ctx, slog.LevelDebug):
		reason := ""
		if err != nil {
			reason = string(err.Reason)
		}
		s.Logger.Debug("request", "route", rt.name, "status", c.status, "reason", reason, "request_id", safe(c.req.RequestID), "best", c.res.Best)
	}
}

// end gives the memory back; what a rare large request needed is let go.
func (c *call) end() {
	if c.reserved > 0 {
		c.srv.bodies.give(c.reserved)
		c.reserved = 0
	}
	if cap(c.body) > keepBuffer || cap(c.out.b) > keepBuffer || cap(c.req.Tokens)*4 > keepBuffer ||
		cap(c.req.BlockHashes)+cap(c.req.SequenceHashes) > keepBuffer/8 || cap(c.mp.json) > keepBuffer {
		return
	}
	c.w, c.r = nil, nil
	c.body = c.body[:0]
	c.req.reset()
	c.res.reset()
	c.srv.calls.Put(c)
}
