package zmqwire

import (
	"context"
	"encoding/binary"
	"net"
	"sync"
	"time"
)

// batchWire is one batch as it goes over the wire: the three frames topic, seq,
// payload. Immutable; queues and ring share its bytes.
type batchWire struct {
	seq   uint64
	bytes []byte
	// afterTopic is where the frame of the seq begins.
	afterTopic int
}

func newBatchWire(topic string, seq uint64, payload []byte) batchWire {
	b := make([]byte, 0, 3*maxFrameHeader+len(topic)+seqBytes+len(payload))
	b = appendFrameHeader(b, flagMore, len(topic))
	b = append(b, topic...)
	w := batchWire{seq: seq, afterTopic: len(b)}
	b = append(b, flagMore, seqBytes)
	b = binary.BigEndian.AppendUint64(b, seq)
	w.bytes = appendFrame(b, 0, payload)
	return w
}

// ring holds a publisher's last batches.
type ring struct {
	batches []batchWire
	next    int // where the next goes once the ring is full
	size    int
}

func newRing(size int) ring { return ring{size: size} }

func (r *ring) add(w batchWire) {
	if len(r.batches) < r.size {
		r.batches = append(r.batches, w)
		return
	}
	r.batches[r.next] = w
	r.next = (r.next + 1) % r.size
}

// from returns the batches of seq start and later, oldest first.
func (r *ring) from(start uint64) []batchWire {
	var out []batchWire
	for i := range r.batches {
		if w := r.batches[(r.next+i)%len(r.batches)]; w.seq >= start {
			out = append(out, w)
		}
	}
	return out
}

// replayTo answers one peer's requests in turn: [""] [seq of 8 bytes]. Like
// vLLM it does not answer what is of another form. It waits for a slow reader
// instead of dropping replies, for as long as the peer reads at all.
func (p *Publisher) replayTo(ctx context.Context, k *link) {
	for {
		frames, err := k.receive()
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[1]) != seqBytes {
			p.cfg.Logger.Debug("no replay request", "peer", k.conn.RemoteAddr(), "frames", len(frames))
			continue
		}
		start := binary.BigEndian.Uint64(frames[1])
		p.mu.Lock()
		batches := p.ring.from(start)
		p.mu.Unlock()
		if err := p.writeReplay(ctx, k.conn, batches); err != nil {
			return
		}
		p.replays.Add(1)
	}
}

func (p *Publisher) writeReplay(ctx context.Context, conn net.Conn, batches []batchWire) error {
	w := batchWriter{conn: conn, stall: replayStall}
	for _, b := range batches {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := w.write(p.replyHead(), p.replyBody(b)); err != nil {
			return err
		}
		p.replayed.Add(1)
	}
	end := appendFrame(nil, flagMore, nil)
	if !p.cfg.OldReplyLayout {
		end = appendFrame(end, flagMore, nil)
	}
	end = appendFrame(end, flagMore, binary.BigEndian.AppendUint64(nil, endSeq))
	if err := w.write(end, appendFrame(nil, 0, nil)); err != nil {
		return err
	}
	return w.flush()
}

// replyHead is the empty delimiter.
func (p *Publisher) replyHead() []byte { return []byte{flagMore, 0} }

// replyBody is the live message, without its topic in the old layout.
func (p *Publisher) replyBody(b batchWire) []byte {
	if p.cfg.OldReplyLayout {
		return b.bytes[b.afterTopic:]
	}
	return b.bytes
}

// replayStall is how long who asked for a replay may take nothing of it.
const replayStall = 30 * time.Second

// batchWriter gathers small messages and writes large ones as they are.
type batchWriter struct {
	conn net.Conn
	// stall is how long the peer may take nothing at all, 0 for ever: a
	// subscriber may be as slow as it likes, its queue is bounded.
	stall time.Duration
	buf   []byte
}

const writeBuffer = 64 << 10

func (w *batchWriter) write(parts ...[]byte) error {
	for _, b := range parts {
		if len(b) >= writeBuffer/2 || len(w.buf)+len(b) > writeBuffer {
			if err := w.flush(); err != nil { // What was gathered goes first.
				return err
			}
		}
		if len(b) >= writeBuffer/2 {
			if err := w.put(b); err != nil {
				return err
			}
			continue
		}
		if w.buf == nil {
			w.buf = make([]byte, 0, writeBuffer)
		}
		w.buf = append(w.buf, b...)
	}
	return nil
}

func (w *batchWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	err := w.put(w.buf)
	w.buf = w.buf[:0]
	return err
}

// put writes in pieces, so that a slow reader is not taken for one that stalls.
func (w *batchWriter) put(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), 4*writeBuffer)
		if w.stall > 0 {
			if err := w.conn.SetWriteDeadline(time.Now().Add(w.stall)); err != nil {
				return err
			}
		}
		if _, err := w.conn.Write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// sendQueue is what waits for one subscriber. push never blocks.
type sendQueue struct {
	hwm int

	mu      sync.Mutex
	wake    *sync.Cond // writer and drain wait for changes here
	waiting [][]byte   // pushed, not yet taken by the writer
	taken   int        // taken by the writer, not yet written
	control []byte     // PONGs: they go before what waits
	closed  bool
}

// maxControl bounds the PONGs that wait for a peer that does not read.
const maxControl = 1 << 10

func newSendQueue(hwm int) *sendQueue {
	q := &sendQueue{hwm: hwm}
	q.wake = sync.NewCond(&q.mu)
	return q
}

// push queues a message, or reports that there is no room: as with ZeroMQ's PUB
// the newest is dropped.
func (q *sendQueue) push(b []byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || len(q.waiting)+q.taken >= q.hwm {
		return false
	}
	q.waiting = append(q.waiting, b)
	q.wake.Broadcast()
	return true
}

// pushControl queues a PONG, copied. One for which there is no room is dropped:
// the peer has others before it.
func (q *sendQueue) pushControl(frame []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.control)+len(frame) <= maxControl {
		q.control = append(q.control, frame...)
		q.wake.Broadcast()
	}
	return nil
}

func (q *sendQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.waiting = nil
	q.wake.Broadcast()
}

// writeTo writes what is queued until close or an error.
func (q *sendQueue) writeTo(conn net.Conn) {
	defer q.close()
	w := batchWriter{conn: conn}
	var batch [][]byte
	var control []byte
	for q.take(&batch, &control) {
		if err := q.writeBatch(&w, batch, control); err != nil {
			return
		}
	}
}

func (q *sendQueue) writeBatch(w *batchWriter, batch [][]byte, control []byte) error {
	if err := w.write(control); err != nil {
		return err
	}
	for i, b := range batch {
		if err := w.write(b); err != nil {
			return err
		}
		batch[i] = nil
		if i < len(batch)-1 {
			q.written() // The last one counts until it is flushed.
		}
	}
	return w.flush()
}

// take waits for messages and swaps them with the writer's empty slice.
func (q *sendQueue) take(batch *[][]byte, control *[]byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.taken = 0
	q.wake.Broadcast()
	for len(q.waiting) == 0 && len(q.control) == 0 && !q.closed {
		q.wake.Wait()
	}
	*batch, q.waiting = q.waiting, (*batch)[:0]
	*control, q.control = q.control, (*control)[:0]
	q.taken = len(*batch)
	return !q.closed
}

func (q *sendQueue) written() {
	q.mu.Lock()
	q.taken--
	q.mu.Unlock()
}

// drain waits until everything is written, or ctx or the queue ends.
func (q *sendQueue) drain(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.wake.Broadcast()
	})
	defer stop()
	q.mu.Lock()
	defer q.mu.Unlock()
	for ctx.Err() == nil && !q.closed && len(q.waiting)+q.taken > 0 {
		q.wake.Wait()
	}
}
