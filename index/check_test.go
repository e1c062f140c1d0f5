package index

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvindexd/kvindexd/normalize"
)

// check walks the whole structure and says what does not agree.
func (x *Set) check() error {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, t := range x.trees {
		if err := t.check(); err != nil {
			return fmt.Errorf("tree %v: %w", t.shape, err)
		}
	}
	return nil
}

// empty says what is left of a set whose streams are all closed.
func (x *Set) empty() error {
	if st := x.Stats(); st.Blocks != 0 || st.Runs != 0 || st.Memberships != 0 || st.Bytes != 0 || st.Streams != 0 {
		return fmt.Errorf("left behind: %+v", st)
	}
	return nil
}

func (t *tree) check() error {
	var runs, blocks, memberships int64
	forks := map[ref]uint32{}
	ids := map[uint32]bool{}
	t.children.each(func(_ uint64, id uint32) bool { ids[id] = true; return true })
	for id := range ids {
		r := t.run(id)
		runs++
		blocks += int64(r.n)
		if r.parent != noRef {
			forks[r.parent]++
		}
		for _, e := range t.all(r) {
			memberships += int64(bits.OnesCount64(e.known))
		}
		if err := t.checkRun(id, r); err != nil {
			return fmt.Errorf("run %d: %w", id, err)
		}
	}
	if runs != t.nruns || blocks != t.nblocks || memberships != t.memberships {
		return fmt.Errorf("counts: %d runs of %d, %d blocks of %d, %d memberships of %d",
			t.nruns, runs, t.nblocks, blocks, t.memberships, memberships)
	}
	for at, n := range forks {
		r := t.run(at.run())
		if !ids[at.run()] || at.off() >= int(r.n) || r.forks&at.bit() == 0 {
			return fmt.Errorf("%d runs hang at block %x that does not know it", n, at)
		}
		if got := max(1, t.forks.get(uint64(at))); got != n {
			return fmt.Errorf("block %x counts %d forks of %d", at, got, n)
		}
	}
	for id := range ids {
		for left := t.run(id).forks; left != 0; left &= left - 1 {
			if forks[makeRef(id, bits.TrailingZeros64(left))] == 0 {
				return fmt.Errorf("run %d: nothing hangs at a fork", id)
			}
		}
	}
	return t.checkMembers(ids)
}

func (t *tree) checkRun(id uint32, r *run) error {
	if r.n == 0 || int(r.n) > 1<<r.class {
		return fmt.Errorf("%d blocks in class %d", r.n, r.class)
	}
	seq := r.first
	if r.parent == noRef {
		if seq != normalize.SequenceHash(t.local(r, 0)) {
			return fmt.Errorf("root's first sequence hash")
		}
	} else if seq != normalize.NextSequence(t.sequenceAt(r.parent), t.local(r, 0)) {
		return fmt.Errorf("first sequence hash")
	}
	if r.last != 0 && r.last != t.sequenceAt(makeRef(id, 0)) && r.n == 1 {
		return fmt.Errorf("last sequence hash of one block")
	}
	for off := 1; off < int(r.n); off++ {
		seq = normalize.NextSequence(seq, t.local(r, off))
	}
	if r.last != 0 && r.last != seq {
		return fmt.Errorf("last sequence hash")
	}
	if t.wanted(r) != int(r.n) {
		return fmt.Errorf("nobody wants the tail: %d of %d", t.wanted(r), r.n)
	}
	all := lowBits(int(r.n))
	for i, e := range t.all(r) {
		if i > 0 && t.all(r)[i-1].slot >= e.slot {
			return fmt.Errorf("entries out of order")
		}
		if e.known&^all != 0 || e.held&^e.known != 0 || e.known == 0 {
			return fmt.Errorf("entry of slot %d: known %x held %x of %x", e.slot, e.known, e.held, all)
		}
		if r.wide != 0 {
			in := e.slot/64 < t.wideWords(r) && *t.words.at(r.wide + e.slot/64)>>(e.slot%64)&1 == 1
			if in != (e.held == all) && (in || e.slot/64 < t.wideWords(r)) {
				return fmt.Errorf("bitset of slot %d says %v", e.slot, in)
			}
		}
		if err := t.checkHandles(id, r, &e); err != nil {
			return err
		}
	}
	if r.nentries > wideFrom && r.wide == 0 {
		return fmt.Errorf("%d entries and no bitset", r.nentries)
	}
	return nil
}

// checkHandles: a block that is known by a shared handle has one.
func (t *tree) checkHandles(id uint32, r *run, e *entry) error {
	if e.own {
		return nil
	}
	for left := e.known; left != 0; left &= left - 1 {
		if b := makeRef(id, bits.TrailingZeros64(left)); !t.bound(b) {
			return fmt.Errorf("slot %d knows block %x by a shared handle that is none", e.slot, b)
		}
	}
	return nil
}

func (t *tree) checkMembers(ids map[uint32]bool) error {
	n := 0
	for slot, m := range t.members {
		if m == nil {
			continue
		}
		n++
		if m.slot != uint32(slot) || m.t != t {
			return fmt.Errorf("member in slot %d", slot)
		}
		var resident [normalize.NoTier]int64
		shared := 0
		for pos, id := range m.runs {
			if !ids[id] {
				return fmt.Errorf("slot %d has run %d, which is none", slot, id)
			}
			e := t.entry(m, t.run(id))
			if e == nil || e.pos != uint32(pos) {
				return fmt.Errorf("slot %d, run %d: entry %+v", slot, id, e)
			}
			if !e.own {
				shared++
			}
			for tier := range resident {
				resident[tier] += int64(bits.OnesCount64(m.tierBits(e, normalize.Tier(tier))))
			}
		}
		if shared != m.shared {
			return fmt.Errorf("slot %d counts %d of %d entries with shared handles", slot, m.shared, shared)
		}
		if resident != m.residents {
			return fmt.Errorf("slot %d counts %v of %v resident blocks", slot, m.residents, resident)
		}
		if err := m.checkOwn(ids); err != nil {
			return fmt.Errorf("slot %d: %w", slot, err)
		}
	}
	if n != t.nmembers {
		return fmt.Errorf("%d members of %d", t.nmembers, n)
	}
	return t.checkShared(ids)
}

// checkShared: every shared handle leads to its block, and nothing is counted
// that is not there.
func (t *tree) checkShared(ids map[uint32]bool) error {
	bound := 0
	for id := range ids {
		r := t.run(id)
		for off := range int(r.n) {
			b := makeRef(id, off)
			if e := *t.engine(r, off); e != 0 {
				bound++
				if got := t.lookup(e); got != b {
					return fmt.Errorf("the shared handle of block %x leads to %x", b, got)
				}
			}
		}
	}
	entries, slots := 0, 0
	for no, p := range t.handles.pages {
		n := 0
		for _, s := range p.slots {
			if s.block == noRef {
				continue
			}
			if n++; t.stands(s.block) && t.leads(s) && !ids[s.block.run()] {
				return fmt.Errorf("an entry leads to block %x of no run", s.block)
			}
		}
		if n != int(p.n) || n == len(p.slots) {
			return fmt.Errorf("page %d of %d slots has %d entries and counts %d", no, len(p.slots), n, p.n)
		}
		entries += n
		if len(p.slots) != handlePageMax {
			slots += len(p.slots)
		}
	}
	if h := &t.handles; h.bound != bound || h.n != entries || h.slots != slots || entries < bound {
		return fmt.Errorf("%d shared handles of %d, %d entries of %d, %d slots of %d", h.bound, bound, h.n, entries, h.slots, slots)
	}
	return nil
}

// checkOwn: every own handle leads to a block that the member knows.
func (m *member) checkOwn(ids map[uint32]bool) (err error) {
	m.own.each(func(e uint64, b uint32) bool {
		at := ref(b)
		if m.t.runs.mem[at.run()>>slabBits] != nil && m.t.run(at.run()).n == 0 && slices.Contains(m.t.zombies, at.run()) {
			return true // trimmed; means nothing
		}
		if !ids[at.run()] {
			err = fmt.Errorf("own handle %x leads to no run", e)
			return false
		}
		if en := m.t.entry(m, m.t.run(at.run())); en == nil || en.known&at.bit() == 0 || !en.own {
			err = fmt.Errorf("own handle %x leads to block %x: %+v", e, b, en)
		}
		return err == nil
	})
	return err
}
