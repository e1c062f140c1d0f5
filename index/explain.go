package index

import (
	"github.com/kvindexd/kvindexd/normalize"
)

// Ending says why a stream's run of held blocks is not longer.
type Ending string

// The endings, as far as the index knows them. What lies in the question
// itself (another salt, an image without identity) is the asker's to tell.
const (
	// EndComplete: every block asked for is held.
	EndComplete Ending = "complete"
	// EndNeverStored: the stream has not stored this block, or it was removed
	// so long ago that its handle is forgotten.
	EndNeverStored Ending = "never_stored"
	// EndRemoved: the stream stored it and removed it again.
	EndRemoved Ending = "removed"
	// EndOtherTier: the stream holds it, but not on the device.
	EndOtherTier Ending = "other_tier"
	// EndPartOfGroups: some, not all, of its full-attention groups hold it.
	EndPartOfGroups Ending = "part_of_groups"
	// EndWindowOnly: only a sliding-window group holds it.
	EndWindowOnly Ending = "window_only"
	// EndOrphan: the stream stored it under a parent that nobody announced.
	EndOrphan Ending = "parent_unknown"
	// EndOtherShape: the stream holds no blocks of this shape.
	EndOtherShape Ending = "other_shape"
	// EndTrimmed: as never_stored, and the byte budget has taken blocks of this
	// stream.
	EndTrimmed Ending = "trimmed"
)

// Explanation is why one stream's match in the tree of one shape ended.
type Explanation struct {
	Shape normalize.Shape
	// Asked is how many blocks of this shape the prompt has that can be
	// identified.
	Asked int
	// Device, Host and Disk are the runs, in blocks.
	Device, Host, Disk int
	// Ending is of the device run, at block Device.
	Ending Ending
	// RemovedSeq is the batch that removed the block, where HasSeq.
	RemovedSeq uint64
	HasSeq     bool
	// Others is how many other streams of the set hold the block on their
	// device.
	Others int
}

// Explain says, for each chain of the view, why the stream's match ended where
// it did. It is for people: it may look through all that the stream keeps.
func (x *Set) Explain(s *Stream, v *QueryView) []Explanation {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []Explanation
	for i := range v.Chains {
		chain := &v.Chains[i]
		e := Explanation{Shape: chain.Shape, Asked: len(chain.Seqs), Ending: EndOtherShape}
		if t := x.findTree(chain.Shape); t != nil {
			if m := s.member(t); m != nil && s.lacks(t.shape) {
				e.Ending = EndPartOfGroups
			} else if m != nil {
				m.explain(&e, chain)
			}
		}
		if e.Ending == EndNeverStored && s.stats.trimmed.Load() > 0 {
			e.Ending = EndTrimmed
		}
		out = append(out, e)
	}
	return out
}

func (m *member) explain(e *Explanation, chain *normalize.Chain) {
	w := walk{}
	w.follow(m.t, chain.Seqs, chain.Locals)
	m.measure(e, w.steps)
	if e.Device == e.Asked {
		e.Ending = EndComplete
		return
	}
	block, before := blockAt(w.steps, e.Device), noRef
	if e.Device > 0 {
		before = blockAt(w.steps, e.Device-1)
	}
	e.Ending = EndNeverStored
	if block != noRef {
		e.Others = m.t.holders(block)
		m.explainBlock(e, block)
	}
	if e.Ending == EndNeverStored && m.waits(before, chain, e.Device) {
		e.Ending = EndOrphan
	}
}

// measure fills in the three runs.
func (m *member) measure(e *Explanation, steps []step) {
	e.Device = m.extend(steps, 0, func(en *entry) uint64 { return en.held })
	e.Host = m.extend(steps, e.Device, func(en *entry) uint64 { return en.held | m.tierBits(en, normalize.Host) })
	e.Disk = m.extend(steps, e.Host, func(en *entry) uint64 {
		return m.tierBits(en, normalize.Disk) | m.tierBits(en, normalize.External)
	})
}

// blockAt returns block i of a path, noRef past its end.
func blockAt(steps []step, i int) ref {
	for _, st := range steps {
		if i < int(st.base+st.m) {
			return makeRef(st.run, i-int(st.base))
		}
	}
	return noRef
}

// holders counts the streams that hold the block on their device.
func (t *tree) holders(b ref) (n int) {
	for _, e := range t.all(t.run(b.run())) {
		if e.held&b.bit() != 0 {
			n++
		}
	}
	return n
}

func (m *member) explainBlock(e *Explanation, b ref) {
	en := m.t.entry(m, m.t.run(b.run()))
	if en == nil || en.known&b.bit() == 0 {
		e.Ending = EndNeverStored
		return
	}
	if !m.residentIn(en, b) {
		e.Ending = EndRemoved
		e.RemovedSeq, e.HasSeq = m.removedAt(b)
		return
	}
	e.Ending = EndWindowOnly
	for i, p := range m.planes {
		if p.full && m.in(en, b, uint8(i)) {
			if p.tier == normalize.Device {
				e.Ending = EndPartOfGroups
				return
			}
			e.Ending = EndOtherTier
		}
	}
}

// removedAt returns the batch that removed the block last.
func (m *member) removedAt(b ref) (seq uint64, ok bool) {
	for _, d := range m.dormant {
		if d.block == b && (!ok || d.seq > seq) {
			seq, ok = d.seq, true
		}
	}
	return seq, ok
}

// waits says whether an orphan of the stream is block i of the chain.
func (m *member) waits(before ref, chain *normalize.Chain, i int) bool {
	if m.orphans.len() == 0 || i >= len(chain.Locals) {
		return false
	}
	var salt normalize.SaltSeed
	if before != noRef {
		salt = m.t.run(before.run()).salt
	}
	for _, o := range m.orphans.byHandle {
		if o.content.Local(salt) == chain.Locals[i] {
			return true
		}
	}
	return false
}
