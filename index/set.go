package index

import (
	"slices"
	"sync/atomic"

	"github.com/kvindexd/kvindexd/normalize"
)

// Set holds the trees of one worker set, one tree per shape.
type Set struct {
	options Options

	// mu is held for writing during one batch, for reading during one query.
	mu       turns
	trees    []*tree
	streams  int
	trimmed  int64
	stores   int    // since the budget was last looked at
	removals int    // since the trees were last compacted
	weighed  int64  // what of the budget's use is this set's
	layout   uint64 // changes with which stream stands where, and how

	budget   *Budget // nil: no bound
	trimming atomic.Bool

	shapes atomic.Pointer[[]normalize.Shape] // of trees, for who does not lock
}

// New returns an empty set.
func New(o Options) *Set {
	if o.MaxOrphans <= 0 {
		o.MaxOrphans = 4096
	}
	x := &Set{options: o, budget: o.Budget}
	if x.budget == nil && o.MaxBytes > 0 {
		x.budget = NewBudget(o.MaxBytes)
	}
	x.shapes.Store(new([]normalize.Shape))
	return x
}

// Shapes returns the shapes of the blocks that stand in the set now.
func (x *Set) Shapes() []normalize.Shape { return *x.shapes.Load() }

// Stats counts what the set holds.
func (x *Set) Stats() SetStats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	st := SetStats{Streams: x.streams, Trimmed: x.trimmed}
	for _, t := range x.trees {
		st.Blocks += t.nblocks
		st.Runs += t.nruns
		st.Memberships += t.memberships
	}
	st.Bytes = x.bytes()
	return st
}

// tree returns the tree of a shape, made where it is new.
func (x *Set) tree(s normalize.Shape) *tree {
	if t := x.findTree(s); t != nil {
		return t
	}
	t := newTree(s, x.budget != nil && x.budget.most < chunksFrom)
	x.trees = append(x.trees, t)
	x.publishShapes()
	x.layout++
	return t
}

func (x *Set) findTree(s normalize.Shape) *tree {
	for _, t := range x.trees {
		if t.shape == s {
			return t
		}
	}
	return nil
}

// dropEmpty gives back the trees in which no stream has a part.
func (x *Set) dropEmpty() {
	n := len(x.trees)
	x.trees = slices.DeleteFunc(x.trees, func(t *tree) bool { return t.nmembers == 0 })
	if len(x.trees) != n {
		x.publishShapes()
		x.layout++
	}
}

func (x *Set) publishShapes() {
	shapes := make([]normalize.Shape, len(x.trees))
	for i, t := range x.trees {
		shapes[i] = t.shape
	}
	x.shapes.Store(&shapes)
}

// enter gives a new member of t a slot.
func (t *tree) enter(x *Set) *member {
	x.layout++
	m := &member{t: t, owner: x}
	if n := len(t.freeSlots); n > 0 {
		m.slot, t.freeSlots = t.freeSlots[n-1], t.freeSlots[:n-1]
		t.members[m.slot] = m
	} else {
		m.slot = uint32(len(t.members))
		t.members = append(t.members, m)
	}
	t.nmembers++
	return m
}

// sweepRuns is how many runs a sweep clears before it lets others in: some 10 µs,
// or 50 where half of the handles are stale and pages are swept of them.
const sweepRuns = 8

// sweep takes the entries of a member that nobody asks for any more out of its
// tree, letting go of the lock between short slices. What the member's stream
// holds by then has nothing to do with it.
func (x *Set) sweep(m *member) {
	for done := false; !done; {
		x.mu.Lock()
		done = m.sweepSome(sweepRuns)
		m.t.compact()
		if done {
			m.t.members[m.slot] = nil
			m.t.freeSlots = append(m.t.freeSlots, m.slot)
			m.t.nmembers--
			x.dropEmpty()
			if x.budget != nil {
				x.weigh()
			}
		}
		x.mu.Unlock()
	}
}

func (m *member) sweepSome(n int) (done bool) {
	t := m.t
	for ; n > 0 && len(m.runs) > 0; n-- {
		id := m.runs[len(m.runs)-1]
		t.memberships -= ones(t.entry(m, t.run(id)).known)
		t.leave(m, id)
		t.reap(id)
	}
	return len(m.runs) == 0
}
