package index

import (
	"math/rand/v2"
	"testing"

	"github.com/kvindexd/kvindexd/normalize"
)

// TestPageStore: no page is handed out twice, and what is given back goes: to the
// next who asks, or, by the chunk, to the heap.
func TestPageStore(t *testing.T) {
	type page = [1024]uint64
	var s pageStore[page]
	per := s.perChunk()
	type handedOut struct {
		p    *page
		no   uint32
		mark uint64
	}
	var out []handedOut
	rng := rand.New(rand.NewPCG(1, 2))
	mark := uint64(0)
	take := func() {
		p, no := s.get()
		mark++
		p[0], p[len(p)-1] = mark, mark
		out = append(out, handedOut{p, no, mark})
	}
	give := func(i int) {
		h := out[i]
		if h.p[0] != h.mark || h.p[len(h.p)-1] != h.mark {
			t.Fatalf("page %d has the marks %d and %d, want %d", h.no, h.p[0], h.p[len(h.p)-1], h.mark)
		}
		out[i] = out[len(out)-1]
		out = out[:len(out)-1]
		s.put(h.no)
	}
	for range 5 * per {
		take()
	}
	if alone, live := s.alone, s.live; alone != per || live != 4 {
		t.Fatalf("%d pages alone and %d chunks, want %d and 4", alone, live, per)
	}
	for range 20_000 {
		if n := rng.IntN(2*5*per + 1); n >= len(out) {
			take()
		} else {
			give(n)
		}
	}
	for len(out) > 0 {
		give(rng.IntN(len(out)))
	}
	if s.alone != 0 || s.live != 1 || s.idle != 1 {
		t.Errorf("%d pages alone, %d chunks and %d of them idle are left, want one idle chunk", s.alone, s.live, s.idle)
	}
	for range 3 * per {
		take()
	}
	if s.live != 3 {
		t.Errorf("%d chunks for what fits into 3", s.live)
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
