package index

import (
	"slices"
	"testing"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestOrphansThatAreGone: more orphans than a stream remembers, all of them gone
// but one, are placed at once. What hangs below one that is forgotten meanwhile
// is not hung below another.
func TestOrphansThatAreGone(t *testing.T) {
	const (
		n      = dormantMax + 2
		parent = 1_000_001
		child  = 1_000_002
	)
	x, l := New(Options{}), newLoader()
	s := x.NewStream(StreamConfig{})
	tokens := func(id uint64) []uint32 { return newChain(id, 1, 0).tokens }
	store := func(above, e zmqwire.EngineHash, content uint64) {
		s.Apply(l.prepare(zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: []zmqwire.EngineHash{e}, Tokens: tokens(content),
			BlockSize: benchBlock, Group: zmqwire.NoGroup, HasParent: above != 0, Parent: above}))
	}
	store(0, 2_000_000, 3_000_000)
	for i := range n {
		e := zmqwire.EngineHash(i + 1)
		store(parent, e, uint64(i+10))
		if i < n-1 {
			s.Apply(l.prepare(zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: []zmqwire.EngineHash{e}, Group: zmqwire.NoGroup}))
		}
	}
	store(1, child, 5)
	store(0, parent, 6)
	rows := make([]Row, 1)
	never := slices.Concat(tokens(6), tokens(n-1+10), tokens(5)) // the child was the first's, not the last's
	x.Match(queryOf(x, never), []*Stream{s}, rows)
	if rows[0].Device != 2*benchBlock {
		t.Errorf("%d tokens are held, want %d", rows[0].Device, 2*benchBlock)
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
}

// TestSequenceHashZero: a run that was cut does not know its last sequence hash.
// A query by sequence hashes that has a 0 there does not match it.
func TestSequenceHashZero(t *testing.T) {
	x, l := New(Options{}), newLoader()
	s := x.NewStream(StreamConfig{})
	c := newChain(1, 6, 0)
	s.Apply(l.prepare(c.store(0, 6)))
	m := s.members[0]
	s.Apply(l.prepare(c.remove(5), c.remove(4)))
	for id := uint64(100); m.t.run(m.runs[0]).n == 6; id++ { // others go, until those two are forgotten
		d := newChain(id, 16, 0)
		s.Apply(l.prepare(d.store(0, 16)))
		for k := 15; k >= 0; k-- {
			s.Apply(l.prepare(d.remove(k)))
		}
	}
	q := queryOf(x, c.tokens)
	chain := &q.Views[0].Chains[0]
	normalize.ChainFromSequences(chain, chain.Shape, []normalize.SequenceHash{chain.Seqs[0], 7, 8, 0})
	rows := make([]Row, 1)
	x.Match(q, []*Stream{s}, rows)
	if rows[0].Device != benchBlock {
		t.Errorf("%d tokens for a chain that has one block in common", rows[0].Device)
	}
}
