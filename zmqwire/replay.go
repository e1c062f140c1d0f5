package zmqwire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
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
	// Until, where set, is a seq from which on nothing is needed: the replay
	// is complete when all below it is there, without its end marker.
	Until uint64
	// HandshakeTimeout is the budget of connect and handshake, 5 s.
	HandshakeTimeout time.Duration
	// InactivityTimeout ends the replay when nothing came for so long, 2 s.
	InactivityTimeout time.Duration
	// MaxBytes bounds the replies that were read and wait for onReply, 64 MiB.
	MaxBytes int
	// MaxMessage and MaxFrames bound one reply: 16 MiB, 8 frames.
	MaxMessage, MaxFrames int
	// Attempts bounds the requests of ReplayAll in a row that bring nothing
	// new, 3. Replay makes one, whatever comes.
	Attempts int
	// Control and Resolver are SubscriberConfig's.
	Control  func(network, address string) error
	Resolver *net.Resolver
	// Logger gets a line per request of ReplayAll that has to be repeated;
	// nil is slog.Default().
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
	// Complete: the end marker came, or Until was reached.
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
	cfg.setDefaults()
	res := ReplayResult{First: cfg.From, Next: cfg.From}
	k, err := cfg.request(ctx)
	if err != nil {
		return res, err
	}
	defer context.AfterFunc(ctx, func() { k.conn.Close() })()
	q := newReplyQueue(cfg.MaxBytes)
	var reader sync.WaitGroup
	reader.Go(func() { q.close(q.readFrom(k)) })
	err = res.consume(q, &cfg, onReply)
	k.conn.Close()
	reader.Wait()
	res.Malformed = q.malformed
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return res, err
}

func (cfg *ReplayConfig) setDefaults() {
	orDefault(&cfg.HandshakeTimeout, defaultHandshakeTimeout)
	orDefault(&cfg.InactivityTimeout, 2*time.Second)
	orDefault(&cfg.MaxBytes, 64<<20)
	orDefault(&cfg.MaxMessage, defaultMaxMessage)
	orDefault(&cfg.MaxFrames, defaultMaxFrames)
	orDefault(&cfg.Attempts, 3)
	cfg.Logger = loggerOr(cfg.Logger)
}

const (
	replayBuffer = 256 << 10
	// replayRecvBuffer holds what comes while this process is not scheduled.
	replayRecvBuffer = 8 << 20
)

// request opens a connection of its own, as a DEALER without an identity (a
// ROUTER ignores a second peer of the same identity), and asks.
func (cfg *ReplayConfig) request(ctx context.Context) (*link, error) {
	ep, err := ParseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	t := target{
		endpoint: cfg.Endpoint, ep: ep, sock: zmq4.Dealer,
		timeout: cfg.HandshakeTimeout, options: socketOptions{userTimeout: true, recvBuffer: replayRecvBuffer},
		control: cfg.Control, resolver: cfg.Resolver,
	}
	conn, minor, err := t.dial(ctx)
	if err != nil {
		return nil, err
	}
	k := newLink(conn, cfg.Endpoint, minor, limits{replayBuffer, cfg.MaxMessage, cfg.MaxFrames})
	k.quietAfter = cfg.InactivityTimeout
	k.idle = func() error { return ErrReplayInactive }
	ask := appendFrame(nil, flagMore, nil)
	ask = appendFrame(ask, 0, binary.BigEndian.AppendUint64(nil, cfg.From))
	if err := k.write(ask); err != nil {
		conn.Close()
		return nil, k.fail(ctx, err)
	}
	return k, nil
}

// consume hands over what the reader queues. It returns nil when the replay is
// complete.
func (res *ReplayResult) consume(q *replyQueue, cfg *ReplayConfig, onReply func(Message) error) error {
	var batch replyBatch
	for {
		more := q.take(&batch)
		for m := range batch.messages {
			if !res.accept(m.Seq) {
				if res.Disordered == maxDisordered {
					return &ConnError{Reason: ReasonMalformedMessages, Endpoint: cfg.Endpoint, Err: errDisordered}
				}
				continue
			}
			if err := onReply(m); err != nil {
				return err
			}
			res.Replies++
			res.Bytes += int64(len(m.Payload))
			if cfg.Until != 0 && res.Next >= cfg.Until {
				res.Complete = true
				return nil
			}
		}
		if !more {
			res.Complete = q.err == nil
			return q.err
		}
	}
}

// maxDisordered is more than any ring in use holds: who sends so many replies
// that were not asked for never ends.
const maxDisordered = 1 << 20

var errDisordered = errors.New("replay: too many replies that do not ascend from the seq asked for")

// maxHoles bounds ReplayResult.Holes: a peer that lies can make one of every
// second number.
const maxHoles = 256

// accept places a reply's number, and refuses one that does not ascend.
func (res *ReplayResult) accept(seq uint64) bool {
	switch {
	case seq < res.Next:
		res.Disordered++
		return false
	case res.Replies == 0:
		res.First = seq
	case seq > res.Next:
		res.Missing += seq - res.Next
		if len(res.Holes) < maxHoles {
			res.Holes = append(res.Holes, SeqRange{res.Next, seq})
		}
	}
	res.Next = seq + 1
	return true
}

// replyBatch is some replies in one piece of memory.
type replyBatch struct {
	data  []byte
	items []replyItem
}

type replyItem struct {
	seq            uint64
	topic, payload int // lengths, in this order in data
}

func (b *replyBatch) messages(yield func(Message) bool) {
	at := 0
	for _, it := range b.items {
		mid, end := at+it.topic, at+it.topic+it.payload
		m := Message{Topic: b.data[at:mid:mid], Seq: it.seq, Payload: b.data[mid:end:end]}
		if !yield(m) {
			return
		}
		at = end
	}
}

// replyQueue stands between the goroutine that reads replies and the one that
// uses them; they swap two batches.
type replyQueue struct {
	maxBytes  int
	malformed int // the reader's, until it has ended

	mu     sync.Mutex
	wake   *sync.Cond
	filled replyBatch
	ended  bool
	err    error // of the reader; nil: the end marker came
}

func newReplyQueue(maxBytes int) *replyQueue {
	q := &replyQueue{maxBytes: maxBytes}
	q.wake = sync.NewCond(&q.mu)
	return q
}

// readFrom reads replies to the end marker, which gives nil.
func (q *replyQueue) readFrom(k *link) error {
	for {
		frames, err := k.receive()
		if errors.Is(err, ErrReplayInactive) {
			return err
		}
		if err != nil {
			return k.fail(context.Background(), err)
		}
		m, end, err := ParseReply(frames)
		switch {
		case err != nil:
			if q.malformed++; q.malformed == maxMalformed {
				return k.fail(context.Background(), faultf(ReasonMalformedMessages, "%d replies, the last one: %w", q.malformed, err))
			}
		case end:
			return nil
		default:
			if err := q.add(m); err != nil {
				return err
			}
		}
	}
}

func (q *replyQueue) add(m Message) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	b := &q.filled
	if len(b.data)+len(m.Topic)+len(m.Payload) > q.maxBytes {
		return ErrReplayBytes
	}
	b.data = append(append(b.data, m.Topic...), m.Payload...)
	b.items = append(b.items, replyItem{m.Seq, len(m.Topic), len(m.Payload)})
	q.wake.Signal()
	return nil
}

func (q *replyQueue) close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended, q.err = true, err
	q.wake.Signal()
}

// take swaps the caller's used batch for the filled one. It reports whether
// more may come.
func (q *replyQueue) take(b *replyBatch) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.filled.items) == 0 && !q.ended {
		q.wake.Wait()
	}
	*b, q.filled = q.filled, replyBatch{b.data[:0], b.items[:0]}
	return !q.ended
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
	cfg.setDefaults()
	r := replayer{cfg: cfg, onReply: onReply, seed: maphash.MakeSeed()}
	r.res.Next = cfg.From
	wait := backoff{min: 50 * time.Millisecond, max: time.Second}
	for fruitless := 0; ; {
		before := r.res.Replies
		err := r.request(ctx)
		if err == nil || r.fatal(ctx, err) {
			return r.res, err
		}
		if r.res.Replies > before {
			fruitless = 0
			wait.reset()
		} else {
			fruitless++
		}
		if fruitless >= cfg.Attempts || r.res.Requests >= maxRequests {
			return r.res, fmt.Errorf("%w: at seq %d after %d requests: %w", ErrReplayAttempts, r.res.Next, r.res.Requests, err)
		}
		cfg.Logger.Info("replay goes on", "endpoint", cfg.Endpoint, "seq", r.res.Next, "requests", r.res.Requests, "reason", err)
		if fruitless > 0 {
			pause(ctx, wait.next())
		}
	}
}

// maxRequests bounds one ReplayAll against a peer that gives a little each time.
const maxRequests = 64

// errHole: the request ended, and numbers at its first hole are still open.
var errHole = errors.New("replay: numbers are missing")

// replayer is the state of one ReplayAll.
type replayer struct {
	cfg     ReplayConfig
	onReply func(Replayed) error
	res     ReplayAllResult
	stopped error // what ends it for good: onReply's error or a restart

	// have: a reply was handed over, the last one of digest and number
	// res.Next-1. Every later request asks from it.
	have   bool
	seed   maphash.Seed
	digest uint64

	holes []SeqRange // that the request before this one had

	// Of the running request:
	replies  int    // its replies
	anchored bool   // its first reply was the last one handed over
	seen     uint64 // the seq after its latest reply
	blocked  bool   // at an open hole: what follows is not handed over
}

func (r *replayer) fatal(ctx context.Context, err error) bool {
	return r.stopped != nil || ctx.Err() != nil || errors.Is(err, ErrEndpoint) || errors.Is(err, ErrReplayRestarted)
}

// request makes one request; nil means that all is there.
func (r *replayer) request(ctx context.Context) error {
	cfg := r.cfg
	cfg.From = r.res.Next
	if r.have {
		cfg.From--
	}
	r.replies, r.anchored, r.blocked, r.seen = 0, false, false, cfg.From
	res, err := Replay(ctx, cfg, r.reply)
	r.res.Requests++
	r.res.Malformed += res.Malformed
	r.res.Disordered += res.Disordered
	r.holes = res.Holes
	switch {
	case r.stopped != nil:
		return r.stopped
	case err != nil:
		return err
	case r.blocked:
		return errHole
	case r.have && res.Replies == 0:
		return fmt.Errorf("%w: it holds nothing from seq %d on, which it gave before", ErrReplayRestarted, cfg.From)
	}
	r.res.Complete = true
	return nil
}

// reply takes one reply of the running request.
func (r *replayer) reply(m Message) error {
	first, hole := r.replies == 0, SeqRange{r.seen, m.Seq}
	r.replies++
	r.seen = m.Seq + 1
	switch {
	case r.blocked:
		return nil // Read on for the holes: the next request compares them.
	case r.have && first && m.Seq == r.res.Next-1:
		r.anchored = true
		if maphash.Bytes(r.seed, m.Payload) != r.digest {
			r.stopped = fmt.Errorf("%w: seq %d has another content than before", ErrReplayRestarted, m.Seq)
		}
		return r.stopped
	case m.Seq == r.res.Next:
		return r.deliver(m, 0, 0)
	case first:
		return r.deliver(m, m.Seq-r.res.Next, 0)
	case r.burnt(hole):
		return r.deliver(m, 0, hole.Len())
	}
	r.blocked = true
	return nil
}

// burnt tells numbers that were never published from replies that a full
// socket dropped. Either the hole follows at once on the reply with which this
// connection began, when its socket was empty; or two requests in a row had
// exactly this hole.
func (r *replayer) burnt(hole SeqRange) bool {
	return r.anchored && r.replies == 2 || slices.Contains(r.holes, hole)
}

func (r *replayer) deliver(m Message, lost, burnt uint64) error {
	if err := r.onReply(Replayed{Message: m, Lost: lost, Burnt: burnt}); err != nil {
		r.stopped = err
		return err
	}
	r.have = true
	r.digest = maphash.Bytes(r.seed, m.Payload)
	r.res.Next = m.Seq + 1
	r.res.Replies++
	r.res.Bytes += int64(len(m.Payload))
	r.res.Lost += lost
	r.res.Burnt += burnt
	return nil
}
