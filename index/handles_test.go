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
