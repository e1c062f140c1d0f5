package index

import (
	"sync/atomic"

	"github.com/kvindexd/kvindexd/normalize"
)

// A Roster is a list of streams that is asked again and again: the picture of a
// worker set that queries share. It remembers where the streams stand in the
// set's trees, so that a query costs nothing for those that hold nothing of it.
type Roster struct {
	set     *Set
	streams []*Stream
	of      []int
	plan    atomic.Pointer[plan]
}

// NewRoster lists streams, and for each the view of a Query that answers it;
// of nil: all 0. Neither may change afterwards. A nil stream holds nothing.
func (x *Set) NewRoster(streams []*Stream, of []int) *Roster {
	return &Roster{set: x, streams: streams, of: of}
}

// Len is how many streams are listed.
func (r *Roster) Len() int { return len(r.streams) }

func (r *Roster) view(i int32) int {
	if r.of == nil {
		return 0
	}
	return r.of[i]
}

// A plan is where the streams of a roster stood when the set's layout was of
// this version. It never changes.
type plan struct {
	layout  uint64
	trees   []planTree
	special []specialRow
}

// A specialRow is one whose usable tokens need more than the length. What it says
// of the stream changes with the layout.
type specialRow struct {
	row       int32
	blockSize int  // of the stream's full-attention groups
	uneven    bool // see Stream.uneven
}

type planTree struct {
	t     *tree
	rowOf []int32 // by slot
	views []planView
}

type planView struct {
	active []uint64 // by slot; nil: no stream of this view has a part in the tree
	tiered []int32  // rows of streams with blocks on other tiers than the device
}

// current returns the plan of the set as it is. The caller holds its lock.
func (r *Roster) current() *plan {
	if p := r.plan.Load(); p != nil && p.layout == r.set.layout {
		return p
	}
	p := r.build()
	r.plan.Store(p)
	return p
}

func (r *Roster) build() *plan {
	p := &plan{layout: r.set.layout}
	for _, t := range r.set.trees {
		p.trees = append(p.trees, planTree{t: t, rowOf: make([]int32, len(t.members))})
	}
	for i, s := range r.streams {
		if s == nil {
			continue
		}
		for _, m := range s.members {
			if !s.lacks(m.t.shape) {
				p.of(m.t).add(m, int32(i), r.view(int32(i)))
			}
		}
		if s.special() {
			p.special = append(p.special, specialRow{int32(i), s.blockSize(), s.uneven()})
		}
	}
	return p
}

func (p *plan) of(t *tree) *planTree {
	for i := range p.trees {
		if p.trees[i].t == t {
			return &p.trees[i]
		}
	}
	panic("BUG: a stream has a part in a tree that its set does not know")
}

func (p *plan) tree(s normalize.Shape) *planTree {
	for i := range p.trees {
		if p.trees[i].t.shape == s {
			return &p.trees[i]
		}
	}
	return nil
}

func (pt *planTree) add(m *member, row int32, view int) {
	for len(pt.views) <= view {
		pt.views = append(pt.views, planView{})
	}
	v := &pt.views[view]
	if v.active == nil {
		v.active = make([]uint64, (len(pt.rowOf)+63)/64)
	}
	pt.rowOf[m.slot] = row
	v.active[m.slot/64] |= 1 << (m.slot % 64)
	if m.tiers[normalize.Host]|m.tiers[normalize.Disk]|m.tiers[normalize.External] != 0 {
		v.tiered = append(v.tiered, row)
	}
}
