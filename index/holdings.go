package index

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/kvindexd/kvindexd/normalize"
)

// A Holding is a row of blocks that a stream holds on one tier, each the parent
// of the next.
type Holding struct {
	Shape normalize.Shape
	Tier  normalize.Tier
	// Depth is how many blocks stand before the first, Parent the last of them.
	Depth  int
	Parent normalize.SequenceHash
	Seqs   []normalize.SequenceHash
	Locals []normalize.LocalHash // parallel to Seqs
}

// Holdings copies what s holds: for each shape, tier by tier, no block before its
// parent. A block on two tiers is there twice. Nothing may write to s meanwhile;
// other streams and queries go on. It costs 16 bytes a block.
func (x *Set) Holdings(s *Stream) (out []Holding) {
	u := takeTurn(x.mu.RLocker())
	defer u.end()
	if s.closed || s.set != x {
		return nil
	}
	for _, m := range s.members {
		from := len(out)
		for k := 0; k < len(m.runs); k++ {
			out = m.holdings(out, m.runs[k])
			u.spend(1_000)
		}
		slices.SortStableFunc(out[from:], func(a, b Holding) int {
			return cmp.Or(cmp.Compare(a.Tier, b.Tier), a.Depth-b.Depth)
		})
	}
	return out
}

// holdings appends what the member holds of one run.
func (m *member) holdings(out []Holding, id uint32) []Holding {
	t := m.t
	r := t.run(id)
	en := t.entry(m, r)
	if en == nil {
		return out
	}
	var seqs []normalize.SequenceHash
	var locals []normalize.LocalHash
	for tier := range normalize.NoTier {
		for left := m.tierBits(en, tier); left != 0; {
			from := bits.TrailingZeros64(left)
			to := from + bits.TrailingZeros64(^(left >> from))
			if seqs == nil {
				seqs, locals = t.hashes(r)
			}
			h := Holding{Shape: t.shape, Tier: tier, Depth: t.depth(r) + from, Seqs: seqs[from:to], Locals: locals[from:to]}
			switch {
			case from > 0:
				h.Parent = seqs[from-1]
			case r.parent != noRef:
				h.Parent = t.sequenceAt(r.parent)
			}
			out = append(out, h)
			left &^= lowBits(to-from) << from
		}
	}
	return out
}

// hashes returns the hashes of a run's blocks.
func (t *tree) hashes(r *run) (seqs []normalize.SequenceHash, locals []normalize.LocalHash) {
	seq := r.first
	for i, l := range t.locals(r) {
		local := normalize.LocalHash(l)
		if i > 0 {
			seq = normalize.NextSequence(seq, local)
		}
		seqs, locals = append(seqs, seq), append(locals, local)
	}
	return seqs, locals
}
