package index

import (
	"math/rand/v2"
	"os"
	"testing"

	"github.com/kvindexd/kvindexd/normalize"
)

// TestPageStore: no page is handed out twice, what is in one goes with it where
// it moves, and what is given back goes: to the next who asks, or to the heap.
func TestPageStore(t *testing.T) {
	type page = [1024]uint64
	var s pageStore[page]
	per := s.perChunk()
	type handedOut struct {
		p  *page
		no uint32
	}
	out := map[uint32]*handedOut{}
	var owners []uint32
	rng := rand.New(rand.NewPCG(1, 2))
	next := uint32(0)
	take := func() {
		next++
		p, no := s.get(next)
		p[0], p[len(p)-1] = uint64(next), uint64(next)
		out[next] = &handedOut{p, no}
		owners = append(owners, next)
	}
	give := func(i int) {
		owner := owners[i]
		h := out[owner]
		if h.p[0] != uint64(owner) || h.p[len(h.p)-1] != uint64(owner) {
			t.Fatalf("page %d is %d's and %d's, want %d's", h.no, h.p[0], h.p[len(h.p)-1], owner)
		}
		owners[i] = owners[len(owners)-1]
		owners = owners[:len(owners)-1]
		delete(out, owner)
		s.put(h.no)
	}
	compact := func() {
		s.compact(func(owner uint32, p *page, no uint32) { *out[owner] = handedOut{p, no} })
	}
	for range 5 * per {
		take()
	}
	if s.alone != per || s.live != 4 || s.used != 4*per {
		t.Fatalf("%d pages alone, %d in %d chunks, want %d, %d and 4", s.alone, s.used, s.live, per, 4*per)
	}
	for range 20_000 {
		if n := rng.IntN(2*5*per + 1); n >= len(owners) {
			take()
		} else {
			give(n)
			compact()
		}
	}
	for range 20 { // what breathes does not grow
		places := len(s.chunks)
		for len(owners) < 8*per {
			take()
		}
		for len(owners) > per {
			give(rng.IntN(len(owners)))
			compact()
		}
		if free := (s.live-s.idle)*per - s.used; free > per+s.used/32 || len(s.chunks) > max(places, 12) {
			t.Fatalf("%d of %d pages are free, in %d places", free, s.live*per, len(s.chunks))
		}
	}
	for len(owners) > per/8 {
		give(rng.IntN(len(owners)))
		compact()
	}
	if s.live != 0 || s.alone != per/8 {
		t.Errorf("%d pages alone and %d chunks, want %d and none", s.alone, s.live, per/8)
	}
	for len(owners) > 0 {
		give(0)
	}
	if s.alone != 0 || s.live != 0 || s.idle != 0 || s.used != 0 {
		t.Errorf("left behind: %+v", s)
	}
}

// TestBudgetIsUsed: what a budget allows is used, also where chains of all lengths
// come and go: free pages do not make the index trim what it may keep.
func TestBudgetIsUsed(t *testing.T) {
	budgets := []int64{8 << 20}
	if os.Getenv("KVINDEXD_LONG") != "" {
		budgets = append(budgets, chunksFrom)
	}
	for _, budget := range budgets {
		x, l := New(Options{MaxBytes: budget}), newLoader()
		s := x.NewStream(StreamConfig{})
		rng, least, most := rand.New(rand.NewPCG(1, 2)), int64(1<<60), int64(0)
		chains := int(budget / 30 / 64 * 3)
		for id := range chains {
			n := 1 + rng.IntN(128)
			s.Apply(l.prepare(newChain(uint64(id), n, 0).store(0, n)))
			if id > chains/2 {
				m := x.Stats().Memberships
				least, most = min(least, m), max(most, m)
			}
		}
		t.Logf("%d MiB: %d to %d memberships", budget>>20, least, most)
		if least < most/3 {
			t.Errorf("%d MiB: %d to %d memberships", budget>>20, least, most)
		}
		if err := x.check(); err != nil {
			t.Error(err)
		}
	}
}

// TestDepth: a chain of more blocks than a run counts above itself.
func TestDepth(t *testing.T) {
	const blocks = maxAbove + 4465
	x, l := New(Options{}), newLoader()
	s := x.NewStream(StreamConfig{})
	c := newChain(1, blocks, 0)
	for from := 0; from < blocks; from += 500 {
		s.Apply(l.prepare(c.store(from, from+500)))
	}
	next := 0
	for _, h := range x.Holdings(s) {
		if h.Depth != next || h.Tier != normalize.Device {
			t.Fatalf("%d blocks stand before a row that comes after %d", h.Depth, next)
		}
		next += len(h.Seqs)
	}
	if next != blocks {
		t.Errorf("%d blocks of %d", next, blocks)
	}
}

// TestMemoryFollows: of many chains all but one in a hundred go, anywhere; what is
// left of their memory is in proportion.
func TestMemoryFollows(t *testing.T) {
	const chains, blocks = 4000, 128
	x, l := New(Options{}), newLoader()
	s := x.NewStream(StreamConfig{})
	for id := range uint64(chains) {
		s.Apply(l.prepare(newChain(id, blocks, 0).store(0, blocks)))
	}
	full := x.Stats().Bytes
	for _, id := range rand.New(rand.NewPCG(1, 2)).Perm(chains)[chains/100:] {
		s.Apply(l.prepare(newChain(uint64(id), blocks, 0).removals()...))
	}
	if left := x.Stats().Bytes; left > full/8 {
		t.Errorf("%d bytes of %d are left with one chain in a hundred", left, full)
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
}
