package zmqwire

import (
	"context"
	"errors"
	"log/slog"
	"time"
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

// Publisher publishes batches as vLLM's ZmqEventPublisher does: a PUB socket
// with a queue per subscriber, and a ROUTER that replays the last batches. Its
// methods may be called concurrently; Close ends everything it started.
type Publisher struct{}

// NewPublisher binds or begins to connect. Its errors wrap ErrEndpoint or are a
// *ConnError of ReasonBind.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) { return nil, errors.ErrUnsupported }

// Publish sends one payload to every subscriber of the topic, keeps it for
// replays, and returns its seq. It never blocks on a subscriber and copies the
// payload.
func (p *Publisher) Publish(payload []byte) uint64 { return 0 }

// PublishSeq is Publish under a number of the caller's, to repeat a recorded
// stream; Publish goes on from there.
func (p *Publisher) PublishSeq(seq uint64, payload []byte) {}

// Hold keeps a batch for replays without sending it: a message that was lost on
// the way. Publish goes on after seq.
func (p *Publisher) Hold(seq uint64, payload []byte) {}

// Burn uses up a number as a failed encode in vLLM does, and returns it.
func (p *Publisher) Burn() uint64 { return 0 }

// Addr is the events' endpoint with its real port.
func (p *Publisher) Addr() string { return "" }

// ReplayAddr is the replay endpoint with its real port, "" without one.
func (p *Publisher) ReplayAddr() string { return "" }

// Subscribers is how many connected peers have subscribed to the topic.
func (p *Publisher) Subscribers() int { return 0 }

// WaitSubscribers waits until at least n peers have subscribed to the topic:
// what is published before a subscription arrives is not for it.
func (p *Publisher) WaitSubscribers(ctx context.Context, n int) error { return errors.ErrUnsupported }

// Stats is a snapshot of the counters.
func (p *Publisher) Stats() PublisherStats { return PublisherStats{} }

// Close waits up to Linger for queued messages, then closes every connection
// and waits for every goroutine.
func (p *Publisher) Close() error { return nil }
