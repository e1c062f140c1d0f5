package index

import (
	"math/rand/v2"
	"testing"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestHandleTable: a hundred thousand shared handles come, go and come again,
// through splits, gaps that close and pages that shrink; hashed, consecutive and
// equal but for their upper halves. Each always leads to its block.
func TestHandleTable(t *testing.T) {
	const chains, blocks = 3000, 32
	kinds := map[string]func(id, i int) zmqwire.EngineHash{
		"hashed":      func(id, i int) zmqwire.EngineHash { return zmqwire.EngineHash(mix(uint64(id*blocks + i + 1))) },
		"consecutive": func(id, i int) zmqwire.EngineHash { return zmqwire.EngineHash(id*blocks + i) },
		"upper":       func(id, i int) zmqwire.EngineHash { return zmqwire.EngineHash(id*blocks+i+1) << 40 },
	}
	for name, handle := range kinds {
		t.Run(name, func(t *testing.T) {
			x := New(Options{})
			l := newLoader()
			s := x.NewStream(StreamConfig{})
			put := func(id int) chain {
				c := newChain(uint64(id), blocks, 0)
				for i := range c.hashes {
					c.hashes[i] = handle(id, i)
				}
				return c
			}
			resolved := func(when string, held func(id int) bool) {
				t.Helper()
				m := s.members[0]
				for id := range chains {
					for i := range blocks {
						b, _ := m.resolve(handle(id, i))
						if held(id) && (b == noRef || m.entry(b.run()).held&b.bit() == 0) {
							t.Fatalf("%s: block %d of chain %d is not found", when, i, id)
						}
					}
				}
				if err := x.check(); err != nil {
					t.Fatalf("%s: %v", when, err)
				}
			}
			for id := range chains {
				s.Apply(l.prepare(put(id).store(0, blocks)))
			}
			resolved("stored", func(int) bool { return true })
			order := rand.New(rand.NewPCG(1, 2)).Perm(chains)
			gone := map[int]bool{}
			for _, id := range order[:chains*9/10] {
				s.Apply(l.prepare(put(id).removals()...))
				gone[id] = true
			}
			resolved("removed", func(id int) bool { return !gone[id] })
			for _, id := range order[:chains/2] {
				s.Apply(l.prepare(put(id).store(0, blocks)))
				delete(gone, id)
			}
			resolved("stored again", func(id int) bool { return !gone[id] })
			s.Close()
			if err := x.empty(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestHandleTagsCollide: of two handles with one tag, each leads to its own
// block, and one that nobody stored to none.
func TestHandleTagsCollide(t *testing.T) {
	x := New(Options{})
	l := newLoader()
	s := x.NewStream(StreamConfig{})
	first := newChain(1, 1, 0)
	s.Apply(l.prepare(first.store(0, 1))) // the table draws its seed
	tree := x.trees[0]
	seen := map[uint32]uint64{}
	var a, b uint64
	for i := uint64(1); a == 0; i++ { // some ten pairs among 300 000
		e := mix(i << 8)
		if other, ok := seen[tree.handles.tag(e)]; ok {
			a, b = other, e
		}
		seen[tree.handles.tag(e)] = e
	}
	ca, cb := newChain(2, 1, 0), newChain(3, 1, 0)
	ca.hashes[0], cb.hashes[0] = zmqwire.EngineHash(a), zmqwire.EngineHash(b)
	s.Apply(l.prepare(ca.store(0, 1)))
	if got := tree.lookup(b); got != noRef {
		t.Errorf("a handle that nobody stored leads to block %x", got)
	}
	s.Apply(l.prepare(cb.store(0, 1)))
	if tree.lookup(a) == tree.lookup(b) || tree.lookup(a) == noRef || tree.lookup(b) == noRef {
		t.Errorf("blocks %x and %x", tree.lookup(a), tree.lookup(b))
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
}

// TestHandleMiss: what a search did not find is put where it ended only while
// nothing else was put there.
func TestHandleMiss(t *testing.T) {
	x := New(Options{})
	l := newLoader()
	s := x.NewStream(StreamConfig{})
	c := newChain(1, 3, 0)
	s.Apply(l.prepare(c.store(0, 3)))
	tree := x.trees[0]
	tree.handles = handleTable{}
	tree.handles.init()
	block := func(i int) ref { return makeRef(tree.members[0].runs[0], i) }
	for i := range 2 { // two handles of one home
		e := uint64(c.hashes[i])
		for tree.handles.pages[0].home(tree.handles.tag(e)) != 5 {
			e++
		}
		c.hashes[i] = zmqwire.EngineHash(e)
	}
	tree.share(block(2), c.hashes[2]) // an empty table is not searched
	tree.lookup(uint64(c.hashes[0]))
	tree.share(block(1), c.hashes[1])
	tree.share(block(0), c.hashes[0])
	for i := range 3 {
		if got := tree.lookup(uint64(c.hashes[i])); got != block(i) {
			t.Errorf("handle %d leads to block %x, want %x", i, got, block(i))
		}
	}
}

// TestStaleHandles: handles of blocks that are gone lead nowhere and do not pile
// up, whether others follow them or not.
func TestStaleHandles(t *testing.T) {
	const chains, blocks, turnovers = 400, 128, 20
	x, l := New(Options{}), newLoader()
	s := x.NewStream(StreamConfig{})
	remove := func(id int) {
		c := newChain(uint64(id), blocks, 0)
		for i := blocks - 1; i >= 0; i-- {
			s.Apply(l.prepare(c.remove(i)))
		}
	}
	most := 0
	for id := range chains * turnovers {
		s.Apply(l.prepare(newChain(uint64(id), blocks, 0).store(0, blocks)))
		if id >= chains {
			remove(id - chains)
		}
		if most = max(most, x.trees[0].handles.n); id%chains == 0 {
			if err := x.check(); err != nil {
				t.Fatal(err)
			}
		}
	}
	tree := x.trees[0]
	if most > 5*chains*blocks/2 {
		t.Errorf("%d entries for %d blocks", most, chains*blocks)
	}
	gone := newChain(chains*(turnovers-1)/2, blocks, 0)
	for i, e := range gone.hashes {
		if b := tree.lookup(uint64(e)); b != noRef {
			t.Errorf("the handle of block %d, which is gone, leads to %x", i, b)
		}
	}
	for id := chains * (turnovers - 1); id < chains*turnovers-10; id++ {
		remove(id)
	}
	if h := &tree.handles; h.n > 2*h.bound+handlePageMax || h.bound > 10*blocks+dormantMax {
		t.Errorf("%d entries, %d of them bound, for %d blocks", h.n, h.bound, 10*blocks)
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
}

// TestHandleZero: a handle that is 0 is no block's shared one, and yet leads to
// its block.
func TestHandleZero(t *testing.T) {
	x, l := New(Options{}), newLoader()
	a, b := x.NewStream(StreamConfig{}), x.NewStream(StreamConfig{})
	c := newChain(1, 6, 0)
	c.hashes[3] = 0
	for _, s := range []*Stream{a, b} {
		s.Apply(l.prepare(c.store(0, 4)))
		s.Apply(l.prepare(c.store(4, 6)))
	}
	if err := x.check(); err != nil {
		t.Fatal(err)
	}
	a.Apply(l.prepare(c.remove(3)))
	for s, want := range map[*Stream]int64{a: 5, b: 6} {
		if got := s.Stats().Resident[normalize.Device]; got != want {
			t.Errorf("%d blocks, want %d", got, want)
		}
	}
	a.Close()
	b.Close()
	if err := x.empty(); err != nil {
		t.Error(err)
	}
}

// TestSameHandleAgain: a block that comes and goes, and whose place others take
// meanwhile, leaves no entry behind each time: they would all stand in one page.
func TestSameHandleAgain(t *testing.T) {
	x, l := New(Options{}), newLoader()
	others, s := x.NewStream(StreamConfig{}), x.NewStream(StreamConfig{})
	for id := range uint64(58) {
		others.Apply(l.prepare(newChain(id, 512, 0).store(0, 512)))
	}
	hot := l.prepare(newChain(1<<30, 1, 0).store(0, 1))
	for i := range uint64(2000) {
		s.Apply(hot)
		s.Clear()
		others.Apply(l.prepare(newChain(1<<31+i, 1, 0).store(0, 1))) // takes the run's number
	}
	if h := &x.trees[0].handles; h.n > h.bound+handlePageMin || h.dir.bits > 8 {
		t.Errorf("%d entries for %d handles, in a directory of 1<<%d", h.n, h.bound, h.dir.bits)
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
}
