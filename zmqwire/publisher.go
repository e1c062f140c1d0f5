package zmqwire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"
)

// PublisherConfig is a publisher like vLLM's. Zero values mean the defaults
// named at each field, which are vLLM's own.
type PublisherConfig struct {
	// Endpoint is bound if it contains "*" or "::", is ipc:// or has port 0,
	// or if Bind says so; otherwise it is connected to, and the subscriber
	// binds. "tcp://127.0.0.1:*" takes a free port.
	Endpoint string
	Bind     bool
	// ReplayEndpoint is always bound; empty: no replay.
	ReplayEndpoint string
	Topic          string
	// DPRank is added to both ports; see OffsetEndpoint.
	DPRank int
	// RingSize is how many batches can be replayed, 10 000.
	RingSize int
	// HWM is how many messages may wait for one subscriber before its newest
	// ones are dropped, 100 000.
	HWM int
	// OldReplyLayout answers replays as vLLM up to 0.25 did, without a topic.
	OldReplyLayout bool
	// HandshakeTimeout is the budget of a connect and handshake, 5 s.
	HandshakeTimeout time.Duration
	// Linger is how long Close waits for what is queued, 1 s.
	Linger time.Duration
	// Logger gets one line per transition; nil is slog.Default().
	Logger *slog.Logger
}

// PublisherStats counts since NewPublisher.
type PublisherStats struct {
	// Published batches, and the messages that were Dropped because a
	// subscriber's queue was full.
	Published, Dropped uint64
	// Replays are requests that were answered, Replayed their batches.
	Replays, Replayed uint64
}

const (
	// maxSubscriptions and maxTopic bound what one subscriber makes us keep.
	maxSubscriptions = 1024
	maxTopic         = 1 << 10
	// maxSubscribers bounds the peers of each of a publisher's sockets.
	maxSubscribers = 1024
	// peerMinor is the version of ZMTP 3 that a publisher announces: with 1,
	// subscribers may ask it for a sign of life.
	peerMinor = 1
)

// Publisher publishes batches as vLLM's ZmqEventPublisher does: a PUB socket
// with a queue per subscriber, and a ROUTER that replays the last batches. Its
// methods may be called concurrently; Close ends everything it started.
type Publisher struct {
	cfg        PublisherConfig
	addr       string
	replayAddr string
	cancel     context.CancelFunc
	wg         sync.WaitGroup

	dropped, replays, replayed atomic.Uint64

	// mu guards what follows; the queues have locks of their own, taken
	// under it.
	mu        sync.Mutex
	seq       uint64 // the next
	published uint64
	ring      ring
	peers     map[*subscription]struct{}
	changed   chan struct{} // closed and replaced when a subscription changes
	closing   bool
}

// NewPublisher binds or begins to connect. Its errors wrap ErrEndpoint or are a
// *ConnError of ReasonBind.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	orDefault(&cfg.RingSize, 10_000)
	orDefault(&cfg.HWM, 100_000)
	orDefault(&cfg.HandshakeTimeout, defaultHandshakeTimeout)
	orDefault(&cfg.Linger, time.Second)
	cfg.Logger = loggerOr(cfg.Logger)
	ctx, cancel := context.WithCancel(context.Background())
	p := &Publisher{
		cfg: cfg, cancel: cancel,
		ring:    newRing(cfg.RingSize),
		peers:   make(map[*subscription]struct{}),
		changed: make(chan struct{}),
	}
	if err := p.start(ctx); err != nil {
		cancel()
		p.wg.Wait()
		return nil, err
	}
	return p, nil
}

func (p *Publisher) start(ctx context.Context) error {
	endpoint, ep, err := rankEndpoint(p.cfg.Endpoint, p.cfg.DPRank)
	if err != nil {
		return err
	}
	if p.cfg.ReplayEndpoint != "" {
		if err := p.startReplay(ctx, ep); err != nil {
			return err
		}
	}
	p.addr = endpoint
	if !p.cfg.Bind && !ep.binds() {
		p.wg.Go(func() { p.connect(ctx, endpoint, ep) })
		return nil
	}
	ln, err := listen(ep)
	if err != nil {
		return &ConnError{Reason: ReasonBind, Endpoint: endpoint, Err: err}
	}
	p.addr = endpointOf(ln.Addr())
	p.serve(ctx, ln, p.addr, zmq4.Pub, p.publishTo)
	return nil
}

func (p *Publisher) startReplay(ctx context.Context, events Endpoint) error {
	endpoint, ep, err := rankEndpoint(p.cfg.ReplayEndpoint, p.cfg.DPRank)
	if err != nil {
		return err
	}
	if n := ep.port(); n > 0 && n == events.port() {
		return fmt.Errorf("%w: events and replay both on port %d", ErrEndpoint, n)
	}
	ln, err := listen(ep)
	if err != nil {
		return &ConnError{Reason: ReasonBind, Endpoint: endpoint, Err: err}
	}
	p.replayAddr = endpointOf(ln.Addr())
	p.serve(ctx, ln, p.replayAddr, zmq4.Router, p.replayTo)
	return nil
}

func rankEndpoint(endpoint string, rank int) (string, Endpoint, error) {
	endpoint, err := OffsetEndpoint(endpoint, rank)
	if err != nil {
		return "", Endpoint{}, err
	}
	ep, err := ParseEndpoint(endpoint)
	return endpoint, ep, err
}

// serve accepts peers of a bound endpoint until ctx ends.
func (p *Publisher) serve(ctx context.Context, ln net.Listener, addr string, sock zmq4.SocketType, peer func(context.Context, *link)) {
	a := acceptor{
		endpoint: addr, sock: sock, announce: peerMinor, timeout: p.cfg.HandshakeTimeout,
		maxPending: 64, maxPeers: maxSubscribers,
		serve: func(ctx context.Context, conn net.Conn, minor byte) {
			peer(ctx, newLink(conn, addr, minor, peerLimits))
		},
		refused: func(err error) {
			p.cfg.Logger.Debug("peer refused", "reason", ReasonOf(err), "error", err)
		},
	}
	p.wg.Go(func() { a.run(ctx, ln) })
}

// peerLimits are for what peers of a publisher send: subscriptions and replay
// requests.
var peerLimits = limits{buffer: 4 << 10, maxMessage: maxTopic + 1, maxFrames: 4}

// connect serves the one subscriber that binds, and comes back to it.
func (p *Publisher) connect(ctx context.Context, endpoint string, ep Endpoint) {
	t := target{endpoint: endpoint, ep: ep, sock: zmq4.Pub, announce: peerMinor, timeout: p.cfg.HandshakeTimeout}
	wait := backoff{min: 50 * time.Millisecond, max: 2 * time.Second}
	told := Reason("")
	for ctx.Err() == nil {
		conn, minor, err := t.dial(ctx)
		if err == nil {
			wait.reset()
			told = ""
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			p.publishTo(ctx, newLink(conn, endpoint, minor, peerLimits))
			stop()
			conn.Close()
		} else if r := ReasonOf(err); r != told && ctx.Err() == nil {
			told = r
			p.cfg.Logger.Warn("no connection to subscriber", "endpoint", endpoint, "reason", r, "error", err)
		}
		pause(ctx, wait.next())
	}
}

// Publish sends one payload to every subscriber of the topic, keeps it for
// replays, and returns its seq. It never blocks on a subscriber and copies the
// payload.
func (p *Publisher) Publish(payload []byte) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	seq := p.seq
	p.send(p.keep(seq, payload))
	return seq
}

// PublishSeq is Publish under a number of the caller's, to repeat a recorded
// stream; Publish goes on from there.
func (p *Publisher) PublishSeq(seq uint64, payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.send(p.keep(seq, payload))
}

// Hold keeps a batch for replays without sending it: a message that was lost on
// the way. Publish goes on after seq.
func (p *Publisher) Hold(seq uint64, payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keep(seq, payload)
}

// Burn uses up a number as a failed encode in vLLM does, and returns it.
func (p *Publisher) Burn() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seq++
	return p.seq - 1
}

// keep puts a batch into the ring, as it goes over the wire. p.mu is held.
func (p *Publisher) keep(seq uint64, payload []byte) batchWire {
	w := newBatchWire(p.cfg.Topic, seq, payload)
	p.ring.add(w)
	p.seq = seq + 1
	return w
}

// send queues a batch for every subscriber of the topic. p.mu is held, so that
// all see one order.
func (p *Publisher) send(w batchWire) {
	p.published++
	for s := range p.peers {
		if s.matches && !s.queue.push(w.bytes) {
			p.dropped.Add(1)
		}
	}
}

// Addr is the events' endpoint with its real port.
func (p *Publisher) Addr() string { return p.addr }

// ReplayAddr is the replay endpoint with its real port, "" without one.
func (p *Publisher) ReplayAddr() string { return p.replayAddr }

// Subscribers is how many connected peers have subscribed to the topic.
func (p *Publisher) Subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.subscribers()
}

func (p *Publisher) subscribers() int {
	n := 0
	for s := range p.peers {
		if s.matches {
			n++
		}
	}
	return n
}

// WaitSubscribers waits until at least n peers have subscribed to the topic:
// what is published before a subscription arrives is not for it.
func (p *Publisher) WaitSubscribers(ctx context.Context, n int) error {
	for {
		p.mu.Lock()
		have, changed := p.subscribers(), p.changed
		p.mu.Unlock()
		if have >= n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d subscribers: %w", have, n, context.Cause(ctx))
		case <-changed:
		}
	}
}

// Stats is a snapshot of the counters.
func (p *Publisher) Stats() PublisherStats {
	p.mu.Lock()
	published := p.published
	p.mu.Unlock()
	return PublisherStats{
		Published: published, Dropped: p.dropped.Load(),
		Replays: p.replays.Load(), Replayed: p.replayed.Load(),
	}
}

// Close waits up to Linger for queued messages, then closes every connection
// and waits for every goroutine.
func (p *Publisher) Close() error {
	p.mu.Lock()
	if !p.closing {
		p.closing = true
		p.notify()
	}
	queues := make([]*sendQueue, 0, len(p.peers))
	for s := range p.peers {
		queues = append(queues, s.queue)
	}
	p.mu.Unlock()
	linger, cancel := context.WithTimeout(context.Background(), p.cfg.Linger)
	defer cancel()
	for _, q := range queues {
		q.drain(linger)
	}
	p.cancel()
	p.wg.Wait()
	return nil
}

// notify wakes those who wait for subscriptions. p.mu is held.
func (p *Publisher) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// subscription is one subscriber's connection.
type subscription struct {
	topics map[string]int // prefix -> times subscribed; its reader's
	queue  *sendQueue
	// matches: one of topics is a prefix of the publisher's topic. Guarded by
	// Publisher.mu.
	matches bool
}

// publishTo serves one subscriber until its connection ends: this goroutine
// reads subscriptions and PINGs, a second one writes.
func (p *Publisher) publishTo(ctx context.Context, k *link) {
	s := &subscription{topics: make(map[string]int), queue: newSendQueue(p.cfg.HWM)}
	p.mu.Lock()
	p.peers[s] = struct{}{}
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() {
		s.queue.writeTo(k.conn)
		k.conn.Close() // Wakes the reader.
	})
	k.send = s.queue.pushControl
	k.subscription = func(subscribe bool, topic []byte) error { return p.subscribe(s, subscribe, topic) }
	err := p.subscriptionsOf(s, k)
	if ctx.Err() == nil {
		p.cfg.Logger.Debug("subscriber left", "endpoint", k.endpoint, "peer", k.conn.RemoteAddr(), "reason", k.fail(ctx, err).Reason)
	}
	p.mu.Lock()
	delete(p.peers, s)
	p.notify()
	p.mu.Unlock()
	k.conn.Close()
	s.queue.close()
	writer.Wait()
}

// subscriptionsOf reads what a subscriber of ZMTP 3.0 sends as messages: 1 or 0
// before a topic. SUBSCRIBE and CANCEL of 3.1 come to subscribe as commands.
func (p *Publisher) subscriptionsOf(s *subscription, k *link) error {
	for {
		frames, err := k.receive()
		if err != nil {
			return err
		}
		if len(frames) != 1 || len(frames[0]) == 0 || frames[0][0] > 1 {
			continue // An XSUB's message upstream: a PUB drops those.
		}
		if err := p.subscribe(s, frames[0][0] == 1, frames[0][1:]); err != nil {
			return err
		}
	}
}

var errTooManySubscriptions = errors.New("too many subscriptions")

func (p *Publisher) subscribe(s *subscription, subscribe bool, topic []byte) error {
	n := s.topics[string(topic)]
	switch {
	case subscribe && n == 0 && (len(s.topics) == maxSubscriptions || len(topic) > maxTopic):
		return errTooManySubscriptions
	case subscribe:
		s.topics[string(topic)] = n + 1
	case n > 1:
		s.topics[string(topic)] = n - 1
	default:
		delete(s.topics, string(topic))
	}
	matches := false
	for t := range s.topics {
		matches = matches || len(t) <= len(p.cfg.Topic) && p.cfg.Topic[:len(t)] == t
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.matches != matches {
		s.matches = matches
		p.notify()
	}
	return nil
}
