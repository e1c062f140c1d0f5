package index

import (
	"math/bits"
	"sync"

	"github.com/kvindexd/kvindexd/normalize"
)

// Match answers for each of the streams: rows[i] for streams[i], all of them at
// one moment. A stream with blocks of several shapes answers from the tree in
// which it holds most. It allocates nothing in the steady state.
//
// q.Of and rows must be as long as streams.
func (x *Set) Match(q *Query, streams []*Stream, rows []Row) {
	w := walks.Get().(*walk)
	defer walks.Put(w)
	w.reset()
	clear(rows)
	x.mu.RLock()
	defer x.mu.RUnlock()
	for v := range q.Views {
		view := &q.Views[v]
		for c := range view.Chains {
			chain := &view.Chains[c]
			if t := x.findTree(chain.Shape); t != nil {
				w.tree(t, v, chain, q.Of, streams, rows)
			}
		}
	}
	for i, s := range streams {
		w.usable(q, s, viewOf(q.Of, i), &rows[i])
	}
}

func viewOf(of []int, i int) int {
	if of == nil {
		return 0
	}
	return of[i]
}

// walk is the scratch of one query.
type walk struct {
	steps []step // all paths, one after the other
	paths []path

	rowOf  []int32  // by slot: the row asked for, -1 for none
	active []uint64 // by slot: the streams that hold everything so far
	stayed []uint64
	hosts  []int32 // rows of the streams with blocks on other tiers
}

// A step is one run on a query's path: its first m blocks match the query's
// blocks from base on.
type step struct {
	run     uint32
	base, m int32
}

// A path is where one view's chain leads in one tree.
type path struct {
	t        *tree
	view     int
	from, to int // in walk.steps
}

var walks = sync.Pool{New: func() any { return new(walk) }}

func (w *walk) reset() { w.steps, w.paths = w.steps[:0], w.paths[:0] }

// tree walks one chain through one tree and credits the streams of the view.
func (w *walk) tree(t *tree, view int, chain *normalize.Chain, of []int, streams []*Stream, rows []Row) {
	if !w.enlist(t, view, of, streams) {
		return
	}
	p := path{t: t, view: view, from: len(w.steps)}
	w.follow(t, chain.Seqs, chain.Locals)
	p.to = len(w.steps)
	w.paths = append(w.paths, p)
	bs := int(t.shape.BlockSize)
	end := int32(0)
	for _, st := range w.steps[p.from:p.to] {
		if !w.credit(t, st, bs, rows) {
			end = -1
			break
		}
		end = st.base + st.m
	}
	if end > 0 {
		w.creditRest(int(end)*bs, t.shape, rows)
	}
	for _, i := range w.hosts {
		w.creditTiers(t, streams[i].member(t), w.steps[p.from:p.to], &rows[i])
	}
	w.dismiss(t, view, of, streams)
}

// enlist makes the view's streams active; false if none has a part in the tree.
func (w *walk) enlist(t *tree, view int, of []int, streams []*Stream) bool {
	slots := len(t.members)
	words := (slots + 63) / 64
	if cap(w.rowOf) < slots {
		w.rowOf = make([]int32, slots)
		for i := range w.rowOf {
			w.rowOf[i] = -1
		}
	}
	w.rowOf = w.rowOf[:cap(w.rowOf)]
	if cap(w.active) < words {
		w.active, w.stayed = make([]uint64, words), make([]uint64, words)
	}
	w.active, w.stayed = w.active[:words], w.stayed[:words]
	clear(w.active)
	w.hosts = w.hosts[:0]
	any := false
	for i, s := range streams {
		if viewOf(of, i) != view || s == nil {
			continue
		}
		m := s.member(t)
		if m == nil {
			continue
		}
		any = true
		w.rowOf[m.slot] = int32(i)
		w.active[m.slot/64] |= 1 << (m.slot % 64)
		if m.tiers[normalize.Host]|m.tiers[normalize.Disk]|m.tiers[normalize.External] != 0 {
			w.hosts = append(w.hosts, int32(i))
		}
	}
	return any
}

// dismiss leaves rowOf as it was found.
func (w *walk) dismiss(t *tree, view int, of []int, streams []*Stream) {
	for i, s := range streams {
		if viewOf(of, i) == view && s != nil {
			if m := s.member(t); m != nil {
				w.rowOf[m.slot] = -1
			}
		}
	}
}

// follow appends the chain's path. Where a run's last sequence hash equals the
// query's at that place, the whole run matches: a sequence hash stands for
// everything before it.
func (w *walk) follow(t *tree, seqs []normalize.SequenceHash, locals []normalize.LocalHash) {
	cur := noRef
	for i := 0; i < len(seqs); {
		id := t.runAfter(cur, seqs[i])
		if id == 0 {
			return
		}
		r := t.run(id)
		m := t.matched(r, seqs[i:], locals, i)
		w.steps = append(w.steps, step{run: id, base: int32(i), m: int32(m)})
		i += m
		cur = makeRef(id, m-1)
	}
}

// runAfter returns the run that hangs at cur and begins with seq, 0 for none.
func (t *tree) runAfter(cur ref, seq normalize.SequenceHash) uint32 {
	if cur != noRef {
		r := t.run(cur.run())
		if r.forks&cur.bit() == 0 {
			return 0
		}
		if cur.off() == int(r.n)-1 && r.next != 0 && t.run(r.next).first == seq {
			return r.next
		}
	}
	id := t.children.get(uint64(seq))
	if id == 0 || t.run(id).parent != cur {
		return 0
	}
	return id
}

// matched returns how many blocks of r are the query's: seqs are the query's
// from the run's first block on, locals all of its local hashes, at from there.
// A query by sequence hashes has no locals.
func (t *tree) matched(r *run, seqs []normalize.SequenceHash, locals []normalize.LocalHash, at int) int {
	n := int(r.n)
	if n <= len(seqs) && r.last == seqs[n-1] {
		return n
	}
	mine := t.locals(r)
	if locals == nil {
		return matchedBySequence(r.first, mine, seqs)
	}
	locals = locals[at:]
	m := 1 // the first is known to be equal
	for m < n && m < len(locals) && normalize.LocalHash(mine[m]) == locals[m] {
		m++
	}
	return m
}

func matchedBySequence(first normalize.SequenceHash, mine []uint64, seqs []normalize.SequenceHash) int {
	m := 1
	for seq := first; m < len(mine) && m < len(seqs); m++ {
		if seq = normalize.NextSequence(seq, normalize.LocalHash(mine[m])); seq != seqs[m] {
			break
		}
	}
	return m
}

// credit drops the streams that do not hold all of the step and credits them
// with what they hold up to there; false once no stream is left.
func (w *walk) credit(t *tree, st step, bs int, rows []Row) bool {
	r := t.run(st.run)
	clear(w.stayed)
	want := lowBits(int(st.m))
	if r.wide != 0 {
		for i, word := range t.words.array(r.wide, min(1<<r.wideClass, len(w.active))) {
			w.stayed[i] = w.active[i] & word
		}
		w.creditLeft(t, r, st, bs, want, rows)
	} else {
		for i := range t.all(r) {
			e := t.entries.at(r.entries + uint32(i))
			if w.active[e.slot/64]>>(e.slot%64)&1 == 0 {
				continue
			}
			if e.held&want == want {
				w.stayed[e.slot/64] |= 1 << (e.slot % 64)
			} else if k := bits.TrailingZeros64(^e.held); k > 0 {
				w.raise(e.slot, (int(st.base)+k)*bs, t.shape, rows)
				w.active[e.slot/64] &^= 1 << (e.slot % 64)
			}
		}
		w.dropRest(int(st.base)*bs, t.shape, rows)
	}
	left := uint64(0)
	for i := range w.active {
		w.active[i] = w.stayed[i]
		left |= w.stayed[i]
	}
	return left != 0
}

// creditLeft looks one by one at the active streams that the run's bitset does
// not vouch for.
func (w *walk) creditLeft(t *tree, r *run, st step, bs int, want uint64, rows []Row) {
	for i := range w.active {
		for left := w.active[i] &^ w.stayed[i]; left != 0; left &= left - 1 {
			slot := uint32(i*64 + bits.TrailingZeros64(left))
			k := 0
			if at, ok := t.find(r, slot); ok {
				held := t.entries.at(r.entries + uint32(at)).held
				if held&want == want {
					w.stayed[i] |= 1 << (slot % 64)
					continue
				}
				k = bits.TrailingZeros64(^held)
			}
			w.raise(slot, (int(st.base)+k)*bs, t.shape, rows)
		}
	}
}

// dropRest credits the active streams that did not stay with tokens.
func (w *walk) dropRest(tokens int, shape normalize.Shape, rows []Row) {
	if tokens == 0 {
		return
	}
	for i := range w.active {
		for left := w.active[i] &^ w.stayed[i]; left != 0; left &= left - 1 {
			w.raise(uint32(i*64+bits.TrailingZeros64(left)), tokens, shape, rows)
		}
	}
}

// creditRest credits the streams that are still active with tokens.
func (w *walk) creditRest(tokens int, shape normalize.Shape, rows []Row) {
	clear(w.stayed)
	w.dropRest(tokens, shape, rows)
}

// raise gives the row of a slot tokens on the device, if that is more than
// another tree gave it.
func (w *walk) raise(slot uint32, tokens int, shape normalize.Shape, rows []Row) {
	row := &rows[w.rowOf[slot]]
	if tokens > row.Device {
		*row = Row{Shape: shape, Device: tokens, Host: tokens, Disk: tokens}
	}
}

// creditTiers continues a stream's run over its other tiers: host over device
// or host residency, disk over disk and external.
func (w *walk) creditTiers(t *tree, m *member, steps []step, row *Row) {
	bs := int(t.shape.BlockSize)
	here := Row{Shape: t.shape}
	if row.Shape == t.shape {
		here.Device = row.Device
	}
	device := here.Device / bs
	host := m.extend(steps, device, func(e *entry) uint64 { return e.held | m.tierBits(e, normalize.Host) })
	disk := m.extend(steps, host, func(e *entry) uint64 {
		return m.tierBits(e, normalize.Disk) | m.tierBits(e, normalize.External)
	})
	here.Host, here.Disk = host*bs, disk*bs
	if here.Device > row.Device || here.Device == row.Device && (here.Host > row.Host ||
		here.Host == row.Host && here.Disk > row.Disk) {
		*row = here
	}
}

// extend returns how far, in blocks, the run of n blocks goes on over what held
// says of each entry.
func (m *member) extend(steps []step, n int, held func(*entry) uint64) int {
	for _, st := range steps {
		base, end := int(st.base), int(st.base+st.m)
		if n >= end {
			continue
		}
		e := m.t.entry(m, m.t.run(st.run))
		if e == nil {
			return n
		}
		run := bits.TrailingZeros64(^(held(e) >> (n - base)))
		if n = min(n+run, end); n < end {
			return n
		}
	}
	return n
}
