package fleet

import (
	"slices"
	"sync/atomic"
)

// What one stream may keep waiting, and a process all together.
const (
	maxPendingMessages = 16384
	maxPendingBytes    = 32 << 20
	maxPendingTotal    = 512 << 20
)

// byteBudget is a bound shared by many.
type byteBudget struct {
	max  int64
	used atomic.Int64
}

func (b *byteBudget) take(n int64) bool {
	if b == nil {
		return true
	}
	if b.used.Add(n) > b.max {
		b.used.Add(-n)
		return false
	}
	return true
}

func (b *byteBudget) give(n int64) {
	if b != nil {
		b.used.Add(-n)
	}
}

// waiting is one batch that came before its turn.
type waiting struct {
	digest  uint64
	payload []byte
}

// pending are the batches of one stream that wait for those before them. It is
// bounded: what does not fit is not kept, and comes again by replay.
type pending struct {
	bySeq  map[uint64]waiting
	bytes  int64
	budget *byteBudget
}

func (p *pending) len() int { return len(p.bySeq) }

func (p *pending) get(seq uint64) (waiting, bool) {
	w, ok := p.bySeq[seq]
	return w, ok
}

// put keeps a copy of payload and reports whether there was room.
func (p *pending) put(seq, digest uint64, payload []byte) bool {
	if _, ok := p.bySeq[seq]; ok {
		return true
	}
	n := int64(len(payload))
	if len(p.bySeq) >= maxPendingMessages || p.bytes+n > maxPendingBytes || !p.budget.take(n) {
		return false
	}
	if p.bySeq == nil {
		p.bySeq = make(map[uint64]waiting)
	}
	p.bySeq[seq] = waiting{digest, append([]byte(nil), payload...)}
	p.bytes += n
	return true
}

// take removes the batch of that number.
func (p *pending) take(seq uint64) (waiting, bool) {
	w, ok := p.bySeq[seq]
	if !ok {
		return w, false
	}
	delete(p.bySeq, seq)
	p.bytes -= int64(len(w.payload))
	p.budget.give(int64(len(w.payload)))
	if len(p.bySeq) == 0 {
		p.bySeq = nil
	}
	return w, true
}

// upTo are the numbers that wait, up to seq and ascending.
func (p *pending) upTo(seq uint64) (seqs []uint64) {
	for at := range p.bySeq {
		if at <= seq {
			seqs = append(seqs, at)
		}
	}
	slices.Sort(seqs)
	return seqs
}

// last is the highest number that waits.
func (p *pending) last() (high uint64, ok bool) {
	for at := range p.bySeq {
		high, ok = max(high, at), true
	}
	return high, ok
}

// drop forgets everything.
func (p *pending) drop() {
	p.budget.give(p.bytes)
	p.bySeq, p.bytes = nil, 0
}

// detach takes the content out, budget and all.
func (p *pending) detach() pending {
	d := *p
	p.bySeq, p.bytes = nil, 0
	return d
}
