package index

import (
	"math/rand/v2"
	"testing"

	"github.com/kvindexd/kvindexd/normalize"
)

// What a stream's holdings list is what it holds, each block hanging at the one
// before it.
func TestHoldings(t *testing.T) {
	blocks := 0
	for seed := range uint64(20) {
		w := newWorld(seeded{rand.New(rand.NewPCG(seed, 11))})
		for range 150 {
			w.step()
		}
		for i, s := range w.streams {
			var got [normalize.NoTier]int64
			depth := map[normalize.Shape]Holding{}
			for _, h := range w.set.Holdings(s.stream) {
				got[h.Tier] += int64(len(h.Seqs))
				blocks += len(h.Seqs)
				if last, ok := depth[h.Shape]; ok && last.Tier == h.Tier && last.Depth > h.Depth {
					t.Errorf("seed %d, stream %d: depth %d after %d", seed, i, h.Depth, last.Depth)
				}
				depth[h.Shape] = h
				chained(t, &h)
			}
			if want := s.stream.Stats().Resident; got != want {
				t.Errorf("seed %d, stream %d: %v blocks by tier, want %v", seed, i, got, want)
			}
			s.stream.Close()
			if hs := w.set.Holdings(s.stream); hs != nil {
				t.Errorf("seed %d, stream %d: a closed stream holds %v", seed, i, hs)
			}
		}
	}
	if blocks == 0 {
		t.Error("nothing was held")
	}
}

func chained(t *testing.T, h *Holding) {
	t.Helper()
	seq, root := h.Parent, h.Depth == 0
	for i, l := range h.Locals {
		if root {
			seq, root = normalize.SequenceHash(l), false
		} else {
			seq = normalize.NextSequence(seq, l)
		}
		if seq != h.Seqs[i] {
			t.Fatalf("block %d of %+v does not hang at the one before it", i, *h)
		}
	}
}
