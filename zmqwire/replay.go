package zmqwire

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// How a replay ends without its end marker; what came before was handed over.
var (
	// ErrReplayInactive: nothing came for InactivityTimeout.
	ErrReplayInactive = errors.New("replay: no reply within the inactivity timeout")
	// ErrReplayBytes: the replies that wait for onReply reached MaxBytes.
	ErrReplayBytes = errors.New("replay: more bytes waiting than allowed")
	// ErrReplayRestarted: the publisher answers as another process than the
	// one that gave the replies so far.
	ErrReplayRestarted = errors.New("replay: the publisher restarted")
	// ErrReplayAttempts: ReplayAll used up its attempts.
	ErrReplayAttempts = errors.New("replay: holes left after all attempts")
)

// ReplayConfig is one request to a publisher's replay endpoint. Zero values
// mean the defaults named at each field.
type ReplayConfig struct {
	Endpoint string
	// From is the first seq that is asked for.
	From uint64
	// HandshakeTimeout is the budget of connect and handshake, 5 s.
	HandshakeTimeout time.Duration
	// InactivityTimeout ends the replay when nothing came for so long, 2 s.
	InactivityTimeout time.Duration
	// MaxBytes bounds the replies that were read and wait for onReply, 64 MiB.
	MaxBytes int
	// MaxMessage and MaxFrames bound one reply: 16 MiB, 8 frames.
	MaxMessage, MaxFrames int
	// Attempts bounds the requests of ReplayAll in a row that bring nothing
	// new, 3. Replay makes one.
	Attempts int
	// Control is SubscriberConfig's.
	Control func(network, address string) error
	// Logger gets a line for what went wrong; nil is slog.Default().
	Logger *slog.Logger
}

// SeqRange is the seqs From..To-1.
type SeqRange struct{ From, To uint64 }

// Len is how many seqs the range has.
func (r SeqRange) Len() uint64 { return r.To - r.From }

// ReplayResult is what one request brought.
type ReplayResult struct {
	// Replies and Bytes were handed over, Bytes of payload.
	Replies int
	Bytes   int64
	// First is the first reply's seq and Next the last one's + 1; both are
	// From where there was no reply. First > From: the publisher no longer
	// holds what is in between.
	First, Next uint64
	// Complete: the end marker came.
	Complete bool
	// Holes are the seqs that were skipped between First and Next, the first
	// 256 of them; Missing counts all. Burnt numbers and replies that the
	// publisher's socket dropped look alike here: ReplayAll tells them apart.
	Holes   []SeqRange
	Missing uint64
	// Malformed replies could not be read, Disordered ones did not ascend or
	// lay below From. Both were dropped.
	Malformed, Disordered int
}

// Replay asks once for the batches from cfg.From on and hands each reply to
// onReply in the order of ascending seq; the Message is valid during the call.
// An own goroutine reads as fast as replies come, because a publisher drops
// what its socket cannot hold; onReply runs in the caller's. The error is nil
// if and only if the result is Complete: otherwise ErrReplayInactive,
// ErrReplayBytes, onReply's error, ctx's cause or a *ConnError. The result
// counts what was handed over in any case.
func Replay(ctx context.Context, cfg ReplayConfig, onReply func(Message) error) (ReplayResult, error) {
	return ReplayResult{}, errors.ErrUnsupported
}

// Replayed is a replayed message with what was found out about the numbers that
// were skipped directly before it.
type Replayed struct {
	Message
	// Lost numbers are no longer in the publisher's ring.
	Lost uint64
	// Burnt numbers were never published: the ring still holds the number
	// before them, and the one after them follows it there.
	Burnt uint64
}

// ReplayAllResult is what ReplayAll brought.
type ReplayAllResult struct {
	Replies int
	Bytes   int64
	// Next is the seq after the last one that is accounted for: replayed,
	// lost or burnt. It is From where there was no reply.
	Next uint64
	// Complete: everything the publisher holds from From on was handed over.
	Complete bool
	// Lost and Burnt sum up those of Replayed.
	Lost, Burnt uint64
	// Requests is the number of connections that were used.
	Requests int
	// Malformed and Disordered are ReplayResult's, of all requests.
	Malformed, Disordered int
}

// ReplayAll replays everything from cfg.From on without holes: at a hole it
// asks anew, from the number before it on, until the hole is filled or shown
// to be burnt or lost. Replies come in order and once each. The error is nil
// if and only if the result is Complete; what was handed over stays good.
//
// Complete with no reply means that the publisher holds nothing from From on:
// asked for a number that it once sent, it is another process.
func ReplayAll(ctx context.Context, cfg ReplayConfig, onReply func(Replayed) error) (ReplayAllResult, error) {
	return ReplayAllResult{}, errors.ErrUnsupported
}
