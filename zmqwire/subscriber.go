package zmqwire

import (
	"context"
	"errors"
	"log/slog"
	"time"
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
	// address (network "tcp4", "tcp6" or "unix"), and for each accepted peer;
	// an error refuses it (ReasonDenied).
	Control func(network, address string) error
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
}

// NewSubscriber checks cfg and opens nothing. Its errors wrap ErrEndpoint.
func NewSubscriber(cfg SubscriberConfig) (*Subscriber, error) {
	return &Subscriber{cfg: cfg}, nil
}

// Run connects (or binds) and receives until ctx ends, and returns ctx's cause.
// It reconnects for ever. Both callbacks run one at a time, never both at once;
// a Message is valid during the call only. A slow onMessage holds the
// connection up, and beyond its high-water mark the publisher then drops
// messages: that shows as a gap of seq. onState may be nil.
func (s *Subscriber) Run(ctx context.Context, onMessage func(Message), onState func(ConnEvent)) error {
	return errors.ErrUnsupported
}

// Stats is a snapshot of the counters; it may be called at any time.
func (s *Subscriber) Stats() SubscriberStats { return SubscriberStats{} }

// Addr is the endpoint that Run has bound, with its real port; "" before the
// Listening event and outside bind mode.
func (s *Subscriber) Addr() string { return "" }
