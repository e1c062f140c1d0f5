package fleet

import (
	"sync"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// workspace is what one batch needs on its way into the index. It is lent to
// one publisher at a time, so that idle streams hold none.
type workspace struct {
	dec   zmqwire.Decoder
	batch normalize.Batch
}

var workspaces = sync.Pool{New: func() any { return new(workspace) }}

// apply takes one payload from bytes to residency: under mu.
func (p *publisher) apply(now time.Time, payload []byte) outcome {
	w := workspaces.Get().(*workspace)
	defer workspaces.Put(w)
	b, err := w.dec.Decode(payload)
	if err != nil {
		p.n.unreadable.Add(1)
		return outcome{unreadable: true}
	}
	p.count(now, b)
	rs := p.streamOf(b.Rank)
	if rs == nil {
		return outcome{unreadable: true}
	}
	rs.norm.Normalize(&w.batch, b)
	w.batch.Seq = p.st.last // the stream has moved there before it calls
	p.n.skipped(&w.batch.Skips)
	p.checkBlockSize(&w.batch)
	a := rs.stream.Apply(&w.batch)
	p.n.conflicts.Add(uint64(a.Conflicts))
	p.n.contentConflicts.Add(uint64(a.ContentConflicts))
	return outcome{cleared: a.Cleared, lostRemovals: b.LostRemovals, conflicted: a.SuspectRestart}
}

// clear empties every rank that this publisher feeds: under mu.
func (p *publisher) clear() {
	for _, rs := range p.ranks {
		rs.stream.Clear()
	}
}

func (p *publisher) count(now time.Time, b *zmqwire.Batch) {
	var stored, removed, cleared uint64
	for i := range b.Events {
		switch b.Events[i].Kind {
		case zmqwire.BlockStored:
			stored++
		case zmqwire.BlockRemoved:
			removed++
		case zmqwire.AllBlocksCleared:
			cleared++
		}
	}
	add(&p.n.stored, stored)
	add(&p.n.removed, removed)
	add(&p.n.cleared, cleared)
	add(&p.n.malformedEvents, uint64(b.Malformed-b.LostRemovals))
	add(&p.n.lostRemovals, uint64(b.LostRemovals))
	add(&p.n.unknownEvents, uint64(b.Unknown))
	const aDay = 86400
	if d := float64(now.UnixNano())/1e9 - b.Timestamp; d > -aDay && d < 365*aDay {
		p.n.lag.Store(int64(d * 1e9))
	}
}

// streamOf is the rank that a batch speaks of: its own, where it names one.
// Nil: no more ranks are taken.
func (p *publisher) streamOf(rank int32) *rankStream {
	own := p.ranks[0]
	if rank < 0 || int(rank) == own.rank {
		return own
	}
	if rs, ok := p.byRank[rank]; ok {
		return rs
	}
	if p.renamed(int(rank)) {
		own.rank = int(rank)
		p.byRank[rank] = own
		p.listMembers()
		p.fleet.refresh(p.worker.life.key.set)
		return own
	}
	if len(p.ranks) > maxUndeclared {
		p.n.rankConflicts.Add(1)
		p.warn("too many ranks", "rank %d: the publisher of rank %d has named %d others already", rank, p.at.rank, maxUndeclared)
		return nil
	}
	if !p.worker.claim(int(rank), p) {
		p.n.rankConflicts.Add(1)
		p.warn("rank of another publisher", "batches name rank %d, which is another publisher's; they are taken as rank %d", rank, p.at.rank)
		p.byRank[rank] = own
		return own
	}
	rs := p.addRank(int(rank), true)
	p.log.Warn("undeclared rank", "batch_rank", rank)
	p.fleet.refresh(p.worker.life.key.set)
	return rs
}

// renamed: a replica at a position on a shared host has one rank, and until a
// batch says which, it is taken for 0.
func (p *publisher) renamed(rank int) bool {
	i := p.worker.life.spec.RankIndex
	return i != nil && *i == rank && p.ranks[0].rank == p.at.rank && p.worker.claim(rank, p)
}

// checkBlockSize compares what was configured with what comes. The index goes
// by the events in any case.
func (p *publisher) checkBlockSize(b *normalize.Batch) {
	want := p.worker.life.blockSize
	if want == 0 {
		return
	}
	for i := range b.Ops {
		op := &b.Ops[i]
		if op.Kind != normalize.OpStore || op.Spec == normalize.SpecOther || op.Spec == normalize.SpecWindow || op.Shape.BlockSize == 0 {
			continue
		}
		if op.Shape.BlockSize%want != 0 {
			p.n.blockSizeMismatch.Add(1)
			p.warn("block size", "block_size: configured %d, the events say %d", want, op.Shape.BlockSize)
		}
	}
}
