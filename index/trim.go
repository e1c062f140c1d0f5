package index

import (
	"cmp"
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/kvindexd/kvindexd/normalize"
)

// Budget is a bound in bytes on what one or several sets keep.
type Budget struct {
	most int64
	used atomic.Int64
}

// NewBudget allows so many bytes.
func NewBudget(bytes int64) *Budget { return &Budget{most: bytes} }

// Most is the bound, Used what the sets kept when they last looked, in bytes.
func (b *Budget) Most() int64 { return b.most }

// Used is what the sets kept when they last looked, in bytes.
func (b *Budget) Used() int64 { return b.used.Load() }

const (
	// trimEvery is how many stores pass between two looks at the budget: some
	// 100 KB of new content.
	trimEvery = 2048
	// A trim goes this far below the bound, so that the walk over all runs
	// that it begins with is paid for by many stores.
	trimTo = 0.95
	// trimRuns is how many runs go before others are let in.
	trimRuns = 64
	// zombiesMax is how many run numbers wait to be used again before the own
	// handles that may still lead there are searched for.
	zombiesMax = 1024
)

// weigh notes what the set keeps and says whether the budget is exceeded.
// Under the set's lock.
func (x *Set) weigh() bool {
	now := x.bytes()
	used := x.budget.used.Add(now - x.weighed)
	x.weighed = now
	return used > x.budget.most
}

func (x *Set) bytes() (n int64) {
	for _, t := range x.trees {
		n += t.bytes()
	}
	return n
}

// trim keeps the byte budget: the oldest, deepest leaves go first.
func (x *Set) trim() {
	if x.budget == nil {
		return
	}
	x.mu.Lock()
	over := x.stores >= trimEvery && x.weigh()
	if x.stores >= trimEvery {
		x.stores = 0
	}
	x.mu.Unlock()
	if !over || !x.trimming.CompareAndSwap(false, true) {
		return
	}
	defer x.trimming.Store(false)
	for over && x.trimPass() {
		x.mu.Lock()
		over = x.weigh()
		x.mu.Unlock()
	}
}

// A leaf is a run at which no other hangs.
type leaf struct {
	t     *tree
	run   uint32
	stamp uint32
	age   uint32 // stores to its tree since the last one to it
	above uint16
}

// trimPass takes the oldest leaves; false if there was none. What a pass lays
// bare goes in the next.
func (x *Set) trimPass() bool {
	leaves := x.leaves()
	target := int64(float64(x.budget.most) * trimTo)
	for len(leaves) > 0 {
		n := min(trimRuns, len(leaves))
		x.mu.Lock()
		for _, l := range leaves[:n] {
			l.t.trimRun(l)
		}
		for _, t := range x.trees {
			t.compact()
		}
		x.weigh()
		done := x.budget.Used() <= target
		x.mu.Unlock()
		leaves = leaves[n:]
		x.buryZombies()
		if done || len(leaves) == 0 {
			return true
		}
	}
	return false
}

// leaves lists what may go, oldest first, of equal age the deepest first.
func (x *Set) leaves() []leaf {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []leaf
	for _, t := range x.trees {
		t.children.each(func(_ uint64, id uint32) bool {
			if r := t.run(id); r.forks == 0 {
				out = append(out, leaf{t, id, r.stamp, t.tick - r.stamp, r.above})
			}
			return true
		})
	}
	slices.SortFunc(out, func(a, b leaf) int {
		return cmp.Or(cmp.Compare(b.age, a.age), cmp.Compare(b.above, a.above))
	})
	return out
}

// trimRun takes a leaf from all who hold it, unless it was stored to since it
// was listed.
func (t *tree) trimRun(l leaf) {
	if t.runs.mem[l.run>>slabBits] == nil {
		return
	}
	r := t.run(l.run)
	if r.n == 0 || r.stamp != l.stamp || r.forks != 0 {
		return
	}
	zombie := false
	for r.nentries > 0 {
		e := t.entries.at(r.entries + r.nentries - 1)
		zombie = zombie || e.own
		t.members[e.slot].trimEntry(l.run, r, e)
	}
	for _, e := range t.exports {
		e.cut(l.run, 0)
	}
	unbound := t.boundFrom(r, 0)
	t.nblocks -= int64(r.n)
	if zombie {
		t.enshroud(l.run, r)
	} else {
		t.freeRun(l.run, r)
	}
	t.unbind(unbound)
}

// trimEntry takes a run from one member.
func (m *member) trimEntry(id uint32, r *run, e *entry) {
	resident := m.resident(e)
	for tier := normalize.Host; tier < normalize.NoTier; tier++ {
		m.residents[tier] -= ones(m.tierBits(e, tier))
	}
	m.t.setHeld(m, r, e, 0)
	for off := range int(r.n) {
		b := makeRef(id, off)
		delete(m.rivals, b)
		delete(m.doomed, b)
		for p := range m.planes {
			delete(m.extra, copyKey{b, uint8(p)})
		}
	}
	m.trims.Add(ones(resident))
	m.owner.trimmed += ones(resident)
	m.t.memberships -= ones(e.known)
	m.t.leave(m, id)
}

func ones(mask uint64) int64 { return int64(bits.OnesCount64(mask)) }

// enshroud frees a run but for its number: own handles may still lead there.
// Nobody finds an entry in it, so they mean nothing.
func (t *tree) enshroud(id uint32, r *run) {
	t.unhang(id, r)
	t.zombies = append(t.zombies, id)
}

// buryZombies lets run numbers be used again, once no own handle leads there.
func (x *Set) buryZombies() {
	x.mu.RLock()
	trees := slices.Clone(x.trees)
	x.mu.RUnlock()
	for _, t := range trees {
		x.bury(t)
	}
}

func (x *Set) bury(t *tree) {
	x.mu.Lock()
	if len(t.zombies) < zombiesMax {
		x.mu.Unlock()
		return
	}
	dead := t.zombies
	t.zombies = nil
	members := slices.Clone(t.members)
	x.mu.Unlock()
	for _, m := range members {
		for page := 0; m != nil && page >= 0; {
			x.mu.Lock()
			page = m.dropStale(page)
			x.mu.Unlock()
		}
	}
	x.mu.Lock()
	for _, id := range dead {
		t.runs.free(id)
	}
	x.mu.Unlock()
}

// dropStale drops the own handles that lead to zombies from a few pages of the
// table and returns the next page, -1 after the last. A key never moves to a
// page before its own.
func (m *member) dropStale(page int) int {
	const pages = 32 // some 100 µs
	var stale []uint64
	end := min(page+pages, len(m.own.pages))
	for _, p := range m.own.pages[min(page, end):end] {
		for i := range p.slots {
			if s := &p.slots[i]; s[2] != 0 && m.t.run(ref(s[2]).run()).n == 0 {
				stale = append(stale, s.key())
			}
		}
	}
	for _, e := range stale {
		m.own.del(e)
	}
	if end >= len(m.own.pages) {
		return -1
	}
	return end
}
