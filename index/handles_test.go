package index

import (
	"math/rand/v2"
	"testing"

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
				c := put(id)
				var events []zmqwire.Event
				for i := blocks - 1; i >= 0; i-- {
					events = append(events, c.remove(i))
				}
				s.Apply(l.prepare(events...))
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
	h := &handleTable{}
	h.init()
	tree.handles = *h
	block := func(i int) ref { return makeRef(tree.members[0].runs[0], i) }
	for i := range 2 { // two handles of one home
		e := uint64(c.hashes[i])
		for tree.handles.pages[0].home(tree.handles.tag(e)) != 5 {
			e++
		}
		*tree.engine(tree.run(block(i).run()), i) = e
		c.hashes[i] = zmqwire.EngineHash(e)
	}
	tree.handles.put(uint64(c.hashes[2]), block(2)) // an empty table is not searched
	tree.lookup(uint64(c.hashes[0]))
	tree.handles.put(uint64(c.hashes[1]), block(1))
	tree.handles.put(uint64(c.hashes[0]), block(0))
	for i := range 3 {
		if got := tree.lookup(uint64(c.hashes[i])); got != block(i) {
			t.Errorf("handle %d leads to block %x, want %x", i, got, block(i))
		}
	}
}
