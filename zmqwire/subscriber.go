package zmqwire

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"
)

// SubscriberConfig says where one publisher's live messages come from. Zero
// values mean the defaults named at each field.
type SubscriberConfig struct {
	// Endpoint is tcp://host:port, tcp://[v6]:port or ipc://path. One with
	// "*" is bound.
	Endpoint string
	// Bind binds the endpoint for publishers that connect; several may.
	Bind bool
	// Topic is the publisher's topic. Empty takes every message; otherwise
	// only messages of exactly this topic are handed over: the filter that
	// ZeroMQ applies is a prefix match and lets others through.
	Topic string

	// Buffer is the read buffer of a connection in bytes, 64 KiB. Where there
	// are many endpoints 16 KiB serve as well.
	Buffer int
	// MaxMessage and MaxFrames bound one message: 16 MiB, 8 frames.
	MaxMessage, MaxFrames int
	// HandshakeTimeout is the budget of connect and handshake together, 5 s.
	HandshakeTimeout time.Duration
	// PingInterval is how long a peer may be silent before it is asked for a
	// sign of life, 3 s; three of them without any make it dead. Peers of
	// ZMTP 3.0 cannot be asked: only TCP notices that they are gone.
	PingInterval time.Duration
	// BackoffMin and BackoffMax bound the wait between two attempts to
	// connect, 50 ms and 2 s. Only a valid message resets the wait.
	BackoffMin, BackoffMax time.Duration
	// MaxPending and MaxPeers bound the handshakes in flight and the
	// publishers of a bound endpoint, 64 each.
	MaxPending, MaxPeers int
	// Control, where set, is asked before each connect with the resolved
	// address (network "tcp4", "tcp6" or "unix"), and in bind mode for each
	// peer's address ("tcp" or "unix"); an error refuses it (ReasonDenied).
	Control func(network, address string) error
	// Resolver looks the endpoint's name up before each connect; nil is the
	// system's.
	Resolver *net.Resolver
	// Logger gets one line per transition; nil is slog.Default().
	Logger *slog.Logger
}

// ConnState is the state of a subscriber's connection.
type ConnState uint8

const (
	// Connecting: an attempt begins.
	Connecting ConnState = iota + 1
	// Listening: the endpoint is bound (bind mode only).
	Listening
	// Connected: a publisher finished the handshake and has our subscription.
	// What it published before that is lost to the live stream.
	Connected
	// Disconnected: a connection ended, or an attempt failed.
	Disconnected
)

// String is the state's name in lower case.
func (s ConnState) String() string {
	switch s {
	case Connecting:
		return "connecting"
	case Listening:
		return "listening"
	case Connected:
		return "connected"
	case Disconnected:
		return "disconnected"
	}
	return "unknown"
}

// ConnEvent is one transition of a subscriber's connection.
type ConnEvent struct {
	State ConnState
	// Reason and Err say why, for Disconnected only. Err is a *ConnError.
	Reason Reason
	Err    error
	// Peer is the publisher's address where there is one; the bound endpoint
	// for Listening.
	Peer string
	// Peers is how many publishers are connected after this event: 0 or 1,
	// and any number in bind mode, where a Disconnected may also tell of a
	// stranger whose handshake failed.
	Peers int
	// Retry is the wait until the next attempt, for Disconnected; 0 in bind
	// mode, where the publisher comes back by itself.
	Retry time.Duration
}

// SubscriberStats counts since NewSubscriber.
type SubscriberStats struct {
	// Messages and Bytes are what was handed over, Bytes of payload.
	Messages, Bytes uint64
	// Malformed messages had another frame count or seq length; ForeignTopic
	// ones another topic. Both were dropped.
	Malformed, ForeignTopic uint64
	// Connects and Disconnects count finished handshakes and their ends,
	// Failures attempts and handshakes that did not get there.
	Connects, Disconnects, Failures uint64
}

// Subscriber receives one publisher's live messages for as long as Run runs.
type Subscriber struct {
	cfg SubscriberConfig
	ep  Endpoint

	messages, bytes, malformed, foreign atomic.Uint64
	connects, disconnects, failures     atomic.Uint64

	// mu serialises the callbacks: in bind mode several peers call them. It
	// guards what follows.
	mu        sync.Mutex
	onMessage func(Message)
	onState   func(ConnEvent)
	peers     int
	told      Reason // of the last line logged about an attempt that failed

	bound atomic.Pointer[string] // Addr
}

// NewSubscriber checks cfg and opens nothing. Its errors wrap ErrEndpoint.
func NewSubscriber(cfg SubscriberConfig) (*Subscriber, error) {
	ep, err := ParseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	cfg.Bind = cfg.Bind || ep.Wildcard
	if !cfg.Bind && ep.port() == 0 {
		return nil, fmt.Errorf("%w %q: port 0 cannot be connected to", ErrEndpoint, cfg.Endpoint)
	}
	orDefault(&cfg.Buffer, 64<<10)
	orDefault(&cfg.MaxMessage, defaultMaxMessage)
	orDefault(&cfg.MaxFrames, defaultMaxFrames)
	orDefault(&cfg.HandshakeTimeout, defaultHandshakeTimeout)
	orDefault(&cfg.PingInterval, 3*time.Second)
	orDefault(&cfg.BackoffMin, 50*time.Millisecond)
	orDefault(&cfg.BackoffMax, 2*time.Second)
	orDefault(&cfg.MaxPending, 64)
	orDefault(&cfg.MaxPeers, 64)
	cfg.Logger = loggerOr(cfg.Logger).With("endpoint", cfg.Endpoint)
	return &Subscriber{cfg: cfg, ep: ep}, nil
}

func orDefault[T int | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

func loggerOr(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.Default()
	}
	return l
}

// Run connects (or binds) and receives until ctx ends, and returns ctx's cause.
// It reconnects for ever. Both callbacks run one at a time, never both at once;
// a Message is valid during the call only. A slow onMessage holds the
// connection up, and beyond its high-water mark the publisher then drops
// messages: that shows as a gap of seq. onState may be nil. A Subscriber runs
// once at a time.
func (s *Subscriber) Run(ctx context.Context, onMessage func(Message), onState func(ConnEvent)) error {
	if onState == nil {
		onState = func(ConnEvent) {}
	}
	s.mu.Lock()
	s.onMessage, s.onState = onMessage, onState
	s.mu.Unlock()
	if s.cfg.Bind {
		s.accept(ctx)
	} else {
		s.connect(ctx)
	}
	return context.Cause(ctx)
}

// Stats is a snapshot of the counters; it may be called at any time.
func (s *Subscriber) Stats() SubscriberStats {
	return SubscriberStats{
		Messages: s.messages.Load(), Bytes: s.bytes.Load(),
		Malformed: s.malformed.Load(), ForeignTopic: s.foreign.Load(),
		Connects: s.connects.Load(), Disconnects: s.disconnects.Load(), Failures: s.failures.Load(),
	}
}

// Addr is the endpoint that Run has bound, with its real port; "" before the
// Listening event and outside bind mode.
func (s *Subscriber) Addr() string {
	if a := s.bound.Load(); a != nil {
		return *a
	}
	return ""
}

// connect dials, receives and dials again, all in Run's goroutine.
func (s *Subscriber) connect(ctx context.Context) {
	t := target{
		endpoint: s.cfg.Endpoint, ep: s.ep, sock: zmq4.Sub,
		timeout: s.cfg.HandshakeTimeout, options: receiving, control: s.cfg.Control, resolver: s.cfg.Resolver,
	}
	wait := backoff{min: s.cfg.BackoffMin, max: s.cfg.BackoffMax}
	for ctx.Err() == nil {
		s.event(ConnEvent{State: Connecting})
		conn, minor, err := t.dial(ctx)
		if err != nil {
			retry := wait.next()
			s.failed(ctx, err, retry)
			pause(ctx, retry)
			continue
		}
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		s.receive(ctx, conn, minor, &wait)
		stop()
		conn.Close()
		pause(ctx, wait.last)
	}
}

// accept binds and serves every publisher that connects.
func (s *Subscriber) accept(ctx context.Context) {
	wait := backoff{min: s.cfg.BackoffMin, max: s.cfg.BackoffMax}
	ln, err := listen(s.ep)
	for err != nil && ctx.Err() == nil {
		retry := wait.next()
		s.failed(ctx, &ConnError{Reason: ReasonBind, Endpoint: s.cfg.Endpoint, Err: err}, retry)
		pause(ctx, retry)
		ln, err = listen(s.ep)
	}
	if err != nil {
		return
	}
	defer ln.Close()
	addr := endpointOf(ln.Addr())
	s.bound.Store(&addr)
	s.event(ConnEvent{State: Listening, Peer: addr})
	a := acceptor{
		endpoint: s.cfg.Endpoint, sock: zmq4.Sub, timeout: s.cfg.HandshakeTimeout,
		options: receiving, control: s.cfg.Control, maxPending: s.cfg.MaxPending, maxPeers: s.cfg.MaxPeers,
		serve: func(ctx context.Context, conn net.Conn, minor byte) {
			s.receive(ctx, conn, minor, nil)
		},
		refused: func(err error) { s.failed(ctx, err, 0) },
	}
	a.run(ctx, ln)
}

// receive subscribes and hands messages over until the connection ends. wait is
// the caller's backoff, nil in bind mode.
func (s *Subscriber) receive(ctx context.Context, conn net.Conn, minor byte, wait *backoff) {
	k := newLink(conn, s.cfg.Endpoint, minor, limits{s.cfg.Buffer, s.cfg.MaxMessage, s.cfg.MaxFrames})
	k.heartbeat(s.cfg.PingInterval)
	if err := k.write(appendFrame(nil, 0, append([]byte{1}, s.cfg.Topic...))); err != nil {
		s.failed(ctx, k.fail(ctx, err), wait.next())
		return
	}
	s.connects.Add(1)
	s.event(ConnEvent{State: Connected, Peer: conn.RemoteAddr().String()})
	err := s.messagesOf(k, wait)
	s.disconnects.Add(1)
	s.ended(k.fail(ctx, err), wait.next())
}

func (s *Subscriber) messagesOf(k *link, wait *backoff) error {
	for malformed := 0; ; {
		frames, err := k.receive()
		if err != nil {
			return err
		}
		m, err := ParseMessage(frames)
		if err != nil {
			s.malformed.Add(1)
			if malformed++; malformed == maxMalformed {
				return faultf(ReasonMalformedMessages, "%d in a row, the last one: %w", malformed, err)
			}
			continue
		}
		malformed = 0
		wait.reset()
		if s.cfg.Topic != "" && string(m.Topic) != s.cfg.Topic {
			s.foreign.Add(1)
			continue
		}
		s.deliver(m)
	}
}

func (s *Subscriber) deliver(m Message) {
	s.messages.Add(1)
	s.bytes.Add(uint64(len(m.Payload)))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onMessage(m)
}

// event tells the caller, and the log where the state changes for good.
func (s *Subscriber) event(e ConnEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e.State {
	case Connected:
		s.peers++
		s.told = ""
		s.cfg.Logger.Info("connected to publisher", "peer", e.Peer)
	case Listening:
		s.cfg.Logger.Info("listening for publishers", "bound", e.Peer)
	}
	e.Peers = s.peers
	s.onState(e)
}

// ended tells of the end of a connection that was established.
func (s *Subscriber) ended(err *ConnError, retry time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers--
	if err.Reason != ReasonStopped {
		s.cfg.Logger.Warn("connection to publisher ended", "peer", err.Peer, "reason", err.Reason, "error", err)
	}
	s.onState(ConnEvent{State: Disconnected, Reason: err.Reason, Err: err, Peer: err.Peer, Peers: s.peers, Retry: retry})
}

// failed tells of an attempt that came to nothing. The log has a line when the
// reason is another than the last time.
func (s *Subscriber) failed(ctx context.Context, err error, retry time.Duration) {
	e := ConnEvent{State: Disconnected, Reason: ReasonOf(err), Err: err, Retry: retry}
	if ce, ok := err.(*ConnError); ok {
		e.Peer = ce.Peer
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() == nil {
		s.failures.Add(1)
		if s.told != e.Reason {
			s.told = e.Reason
			s.cfg.Logger.Warn("no connection to publisher", "peer", e.Peer, "reason", e.Reason, "error", err)
		}
	}
	e.Peers = s.peers
	s.onState(e)
}

// backoff is the wait between attempts: doubling from min to max, of which a
// random half is taken off so that many subscribers do not return at once. A
// nil backoff never waits.
type backoff struct {
	min, max time.Duration
	cur      time.Duration // upper bound of the last wait, 0 after a reset
	last     time.Duration
}

func (b *backoff) next() time.Duration {
	if b == nil {
		return 0
	}
	b.cur = min(max(2*b.cur, b.min), b.max)
	b.last = max(b.min, b.cur/2+rand.N(b.cur/2+1))
	return b.last
}

func (b *backoff) reset() {
	if b != nil {
		b.cur = 0
	}
}
