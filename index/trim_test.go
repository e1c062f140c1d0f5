package index

import (
	"math/rand/v2"
	"testing"
)

// TestTrim: far more content than the budget allows. The budget is kept, what
// goes is the oldest, what stays is right, and the stream says so.
func TestTrim(t *testing.T) {
	for _, own := range []bool{false, true} {
		const budget = 4 << 20
		x := New(Options{MaxBytes: budget})
		l := newLoader()
		first, second := x.NewStream(StreamConfig{}), x.NewStream(StreamConfig{})
		const chains, blocks = 4000, 64
		for id := uint64(0); id < chains; id++ {
			seed := uint64(0)
			if own {
				seed = 1 // the second stream calls the same blocks otherwise
			}
			a, b := newChain(id, blocks, 0), newChain(id, blocks, seed)
			first.Apply(l.prepare(a.store(0, blocks)))
			second.Apply(l.prepare(b.store(0, blocks)))
			if got := x.Stats().Bytes; got > budget+budget/8 {
				t.Fatalf("own %v: %d bytes after %d chains, of %d", own, got, id, budget)
			}
		}
		if err := x.check(); err != nil {
			t.Fatal(err)
		}
		if first.Stats().Trimmed == 0 || second.Stats().Trimmed == 0 {
			t.Errorf("own %v: nothing trimmed: %+v", own, first.Stats())
		}
		held := func(id uint64) int {
			rows := make([]Row, 2)
			x.Match(queryOf(x, newChain(id, blocks, 0).tokens), []*Stream{first, second}, rows)
			return rows[1].Device
		}
		if got := held(chains - 1); got != blocks*benchBlock {
			t.Errorf("own %v: the newest chain has %d tokens", own, got)
		}
		if got := held(0); got != 0 {
			t.Errorf("own %v: the oldest chain has %d tokens", own, got)
		}
		// A trimmed block's removal, and its return, are as if it were new.
		old := newChain(0, blocks, 0)
		first.Apply(l.prepare(old.remove(0)))
		first.Apply(l.prepare(old.store(0, blocks)))
		rows := make([]Row, 1)
		x.Match(queryOf(x, old.tokens), []*Stream{first}, rows)
		if rows[0].Device != blocks*benchBlock {
			t.Errorf("own %v: stored again: %d tokens", own, rows[0].Device)
		}
		first.Close()
		second.Close()
		if err := x.empty(); err != nil {
			t.Error(err)
		}
		if used := x.budget.Used(); used != 0 {
			t.Errorf("the budget still counts %d bytes", used)
		}
	}
}

// TestTrimDifferential: under a budget that is always too small, random
// histories are never credited with more than the model holds.
func TestTrimDifferential(t *testing.T) {
	for seed := uint64(1); seed < 40; seed++ {
		c := seeded{rand.New(rand.NewPCG(seed, 3))}
		w := newWorld(c)
		w.set.budget = NewBudget(1)
		for n := 0; n < 200; n++ {
			w.step()
			if c.below(3) == 0 {
				w.set.stores = trimEvery
			}
			if err := w.askAtMost(); err != nil {
				t.Fatalf("seed %d step %d: %v", seed, n, err)
			}
			if n%16 == 0 {
				if err := w.set.check(); err != nil {
					t.Fatalf("seed %d step %d: %v", seed, n, err)
				}
			}
		}
		for _, s := range w.streams {
			s.stream.Close()
		}
		if err := w.set.empty(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// TestZombies: run numbers of trimmed runs are used again only when no own
// handle leads there.
func TestZombies(t *testing.T) {
	x := New(Options{MaxBytes: 1 << 20})
	l := newLoader()
	a, b := x.NewStream(StreamConfig{}), x.NewStream(StreamConfig{})
	for id := uint64(0); id < 30_000; id++ {
		ca, cb := newChain(id, 4, 0), newChain(id, 4, 1)
		a.Apply(l.prepare(ca.store(0, 4)))
		b.Apply(l.prepare(cb.store(0, 4)))
		if id > 10 && id%7 == 0 { // what was trimmed may be removed, too
			old := newChain(id-uint64(id%1000), 4, 1)
			b.Apply(l.prepare(old.remove(3), old.remove(2)))
		}
	}
	if err := x.check(); err != nil {
		t.Fatal(err)
	}
	tree := x.trees[0]
	if n := len(tree.zombies); n >= 2*zombiesMax {
		t.Errorf("%d zombies", n)
	}
	var rows [2]Row
	x.Match(queryOf(x, newChain(29_999, 4, 0).tokens), []*Stream{a, b}, rows[:])
	if rows[0].Device != 4*benchBlock || rows[1].Device != 4*benchBlock {
		t.Errorf("%+v", rows)
	}
}

// TestLookUpAfterTrim: the block that a removal found last may be gone, with the
// pages that held it, when the next removal looks beside it.
func TestLookUpAfterTrim(t *testing.T) {
	const chains, blocks = 3000, 16
	x := New(Options{})
	l := newLoader()
	s := x.NewStream(StreamConfig{})
	for id := range uint64(chains) {
		s.Apply(l.prepare(newChain(id, blocks, 0).store(0, blocks)))
	}
	full := x.Stats().Bytes
	oldest := uint64(0)
	for left := int64(95); left > 5; left -= 5 {
		for b := noRef; b == noRef && oldest < chains; oldest++ {
			b, _ = s.members[0].resolve(newChain(oldest, blocks, 0).hashes[9])
		}
		c := newChain(oldest-1, blocks, 0)
		x.budget, x.stores = NewBudget(full*left/100), trimEvery
		s.Apply(l.prepare(c.remove(9))) // and the chain is trimmed
		s.Apply(l.prepare(c.remove(8)))
		x.weighed = 0
		if err := x.check(); err != nil {
			t.Fatal(err)
		}
	}
}
