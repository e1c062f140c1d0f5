package index

import (
	"math/bits"
	"sync"

	"github.com/kvindexd/kvindexd/normalize"
)

// Match answers for each of the roster's streams, all at one moment: rows[i] is
// stream i's. A stream with blocks of several shapes answers from the tree in
// which it holds most. rows must be as long as the roster. It allocates nothing
// in the steady state.
func (r *Roster) Match(q *Query, rows []Row) {
	w := walks.Get().(*walk)
	defer walks.Put(w)
	clear(rows)
	r.set.mu.RLock()
	defer r.set.mu.RUnlock()
	w.start(q, r.current(), r, rows)
	for v := range q.Views {
		view := &q.Views[v]
		for c := range view.Chains {
			w.tree(v, &view.Chains[c], view.Limits[c])
		}
	}
	for _, sp := range w.plan.special {
		w.usable(r.streams[sp.row], sp, r.view(sp.row), &rows[sp.row])
	}
	w.end()
}

// Match is Roster.Match for streams that are asked once: rows[i] is
// streams[i]'s, whose view is q.Of[i].
func (x *Set) Match(q *Query, streams []*Stream, rows []Row) {
	x.NewRoster(streams, q.Of).Match(q, rows)
}

// walk is the scratch of one query.
type walk struct {
	q      *Query
	plan   *plan
	roster *Roster
	rows   []Row

	steps []step // all paths, one after the other
	paths []path

	active []uint64 // by slot: the streams that hold everything so far
	stayed []uint64
	cap    int // what of the prompt can be used at most, in whole blocks
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

func (w *walk) start(q *Query, p *plan, r *Roster, rows []Row) {
	w.q, w.plan, w.roster, w.rows = q, p, r, rows
	w.steps, w.paths = w.steps[:0], w.paths[:0]
}

// end lets go of what the query brought.
func (w *walk) end() { w.q, w.plan, w.roster, w.rows = nil, nil, nil, nil }

// tree walks one chain through its tree and credits the streams of the view.
func (w *walk) tree(view int, chain *normalize.Chain, limit int) {
	pt := w.plan.tree(chain.Shape)
	if pt == nil || view >= len(pt.views) || len(pt.views[view].active) == 0 {
		return
	}
	pv := &pt.views[view]
	t := pt.t
	w.active = append(w.active[:0], pv.active...)
	w.stayed = append(w.stayed[:0], pv.active...)
	bs := int(t.shape.BlockSize)
	w.cap = max(0, min(w.q.PromptTokens-1, limit)) / bs * bs

	p := path{t: t, view: view, from: len(w.steps)}
	w.follow(t, chain.Seqs, chain.Locals)
	p.to = len(w.steps)
	w.paths = append(w.paths, p)
	steps := w.steps[p.from:p.to]
	w.creditAll(pt, steps, bs)
	for _, i := range pv.tiered {
		w.creditTiers(t, w.roster.streams[i].member(t), steps, &w.rows[i])
	}
}

// creditAll credits every active stream with its run along the path.
func (w *walk) creditAll(pt *planTree, steps []step, bs int) {
	end := int32(0)
	for _, st := range steps {
		if !w.credit(pt, st, bs) {
			return
		}
		end = st.base + st.m
	}
	clear(w.stayed)
	w.dropRest(pt, int(end)*bs)
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

// matched returns how many blocks of r are the query's: seqs are the query's
// from the run's first block on, locals all of its local hashes, at from there.
// A query by sequence hashes has no locals.
func (t *tree) matched(r *run, seqs []normalize.SequenceHash, locals []normalize.LocalHash, at int) int {
	n := int(r.n)
	if n <= len(seqs) && r.last != 0 && r.last == seqs[n-1] {
		return n
	}
	mine := t.locals(r)
	if len(locals) == 0 {
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
func (w *walk) credit(pt *planTree, st step, bs int) bool {
	r := pt.t.run(st.run)
	clear(w.stayed)
	if r.wide != 0 {
		w.creditWide(pt, r, st, bs)
	} else {
		w.creditFew(pt, r, st, bs)
	}
	left := uint64(0)
	for i := range w.active {
		w.active[i] = w.stayed[i]
		left |= w.stayed[i]
	}
	return left != 0
}

// creditFew goes through the run's entries.
func (w *walk) creditFew(pt *planTree, r *run, st step, bs int) {
	want := lowBits(int(st.m))
	for i := range pt.t.all(r) {
		e := pt.t.entries.at(r.entries + uint32(i))
		word, bit := e.slot/64, uint64(1)<<(e.slot%64)
		if int(word) >= len(w.active) || w.active[word]&bit == 0 {
			continue
		}
		if e.held&want == want {
			w.stayed[word] |= bit
		} else if k := bits.TrailingZeros64(^e.held); k > 0 {
			w.raise(pt, e.slot, (int(st.base)+k)*bs)
			w.active[word] &^= bit
		}
	}
	w.dropRest(pt, int(st.base)*bs)
}

// creditWide keeps the streams that the run's bitset vouches for, and looks at
// the others one by one.
func (w *walk) creditWide(pt *planTree, r *run, st step, bs int) {
	t := pt.t
	want := lowBits(int(st.m))
	for i, word := range t.words.array(r.wide, min(int(t.wideWords(r)), len(w.active))) {
		w.stayed[i] = w.active[i] & word
	}
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
			w.raise(pt, slot, (int(st.base)+k)*bs)
		}
	}
}

// dropRest credits the active streams that did not stay with tokens.
func (w *walk) dropRest(pt *planTree, tokens int) {
	if tokens == 0 {
		return
	}
	for i := range w.active {
		for left := w.active[i] &^ w.stayed[i]; left != 0; left &= left - 1 {
			w.raise(pt, uint32(i*64+bits.TrailingZeros64(left)), tokens)
		}
	}
}

// raise gives the row of a slot tokens on the device, if that is more than
// another tree gave it.
func (w *walk) raise(pt *planTree, slot uint32, tokens int) {
	if row := &w.rows[pt.rowOf[slot]]; tokens > row.Device {
		*row = Row{Shape: pt.t.shape, Device: tokens, Host: tokens, Disk: tokens, Usable: min(tokens, w.cap)}
	}
}

// creditTiers continues a stream's run over its other tiers: host over device
// or host residency, disk over disk and external.
func (w *walk) creditTiers(t *tree, m *member, steps []step, row *Row) {
	bs := int(t.shape.BlockSize)
	here := Row{Shape: t.shape}
	if row.Shape == t.shape {
		here.Device, here.Usable = row.Device, row.Usable
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
