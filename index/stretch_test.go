package index

import "testing"

// TestGrowBesideOthers: what one of many holders of a run stores after its end is
// not theirs, though the run's bitset says that they hold all of it.
func TestGrowBesideOthers(t *testing.T) {
	x, l := New(Options{}), newLoader()
	c := newChain(1, 12, 0)
	streams := make([]*Stream, 2*wideFrom)
	for i := range streams {
		streams[i] = x.NewStream(StreamConfig{})
		streams[i].Apply(l.prepare(c.store(0, 8)))
	}
	streams[0].Apply(l.prepare(c.store(8, 12)))
	rows := make([]Row, len(streams))
	x.Match(queryOf(x, c.tokens), streams, rows)
	for i, row := range rows {
		want := 8 * benchBlock
		if i == 0 {
			want = 12 * benchBlock
		}
		if row.Device != want {
			t.Errorf("stream %d holds %d tokens, want %d", i, row.Device, want)
		}
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
}

// TestStoredAgainIsYoung: a store of what stands already makes it the last that a
// trim would take, as a store of new content does.
func TestStoredAgainIsYoung(t *testing.T) {
	x, l := New(Options{}), newLoader()
	a, b := x.NewStream(StreamConfig{}), x.NewStream(StreamConfig{})
	old, c := newChain(1, 8, 0), newChain(2, 8, 0)
	a.Apply(l.prepare(old.store(0, 8)))
	a.Apply(l.prepare(c.store(0, 8)))
	b.Apply(l.prepare(old.store(0, 1)))
	b.Apply(l.prepare(old.store(1, 8)))
	tree := x.trees[0]
	if r := tree.run(a.members[0].runs[0]); r.first != queryOf(x, old.tokens).Views[0].Chains[0].Seqs[0] || r.stamp != tree.tick {
		t.Errorf("stored last at tick %d of %d", r.stamp, tree.tick)
	}
	a.Apply(l.prepare(newChain(3, 8, 0).store(0, 4)))
	a.Apply(l.prepare(newChain(3, 8, 0).store(4, 8)))
	if r := tree.run(a.members[0].runs[2]); r.stamp != tree.tick {
		t.Errorf("lengthened last at tick %d of %d", r.stamp, tree.tick)
	}
}
