package index

import (
	"fmt"

	"github.com/kvindexd/kvindexd/normalize"
)

// place makes the first n blocks of an archived run stand in the tree, and what
// is above them. Until the stream knows one of them, nobody else may have a
// turn.
func (i *importer) place(number uint32, n int) (placed, error) {
	need := n
	i.chain = i.chain[:0]
	for k := number; ; { // up to what has a place already
		if p := i.at[k]; p.n >= need {
			break
		}
		i.chain = append(i.chain, k)
		r := &i.a.runs[k]
		if r.parent == 0 {
			break
		}
		k, need = r.parent-1, int(r.off)+1
	}
	for j := len(i.chain) - 1; j >= 0; j-- {
		need = n
		if j > 0 {
			need = int(i.a.runs[i.chain[j-1]].off) + 1
		}
		if err := i.placeRun(i.chain[j], need); err != nil {
			i.undo(j)
			return placed{}, err
		}
	}
	return i.at[number], nil
}

// undo gives back what place has made above run j of the chain.
func (i *importer) undo(j int) {
	for ; j < len(i.chain); j++ {
		if p := i.at[i.chain[j]]; p.n > 0 {
			i.m.t.reap(p.ref(p.n - 1).run())
			return
		}
	}
}

// placeRun makes the first n blocks of a run stand below its parent, which does.
func (i *importer) placeRun(number uint32, n int) error {
	t, r, p := i.m.t, &i.a.runs[number], i.at[number]
	cur, seq := noRef, r.first
	if r.parent != 0 {
		above := i.at[r.parent-1]
		cur = above.ref(int(r.off))
	}
	if p.n > 0 {
		cur, seq = p.ref(p.n-1), r.sequenceAt(p.n)
	}
	for p.n < n {
		locals := r.locals[p.n:n]
		b := t.following(cur, normalize.LocalHash(locals[0]))
		if b == noRef {
			if id := t.runAfter(cur, seq); id != 0 {
				b = makeRef(id, 0)
			}
		}
		k := len(locals)
		if b != noRef {
			k = t.common(b, locals)
		} else if b = i.make(r, cur, seq, locals, p.n > 0); b == noRef {
			i.at[number] = p
			return fmt.Errorf("%w: run %d: another chain has sequence hash %016x", ErrChunk, number, uint64(seq))
		}
		p.add(b, k)
		cur = b + ref(k-1)
		if p.n < n {
			seq = r.sequenceAt(p.n)
		}
	}
	i.at[number] = p
	return nil
}

// common is how many of the blocks from b on have these local hashes.
func (t *tree) common(b ref, locals []uint64) int {
	mine := t.locals(t.run(b.run()))[b.off():]
	k := 1 // that is how b was found
	for k < min(len(mine), len(locals)) && mine[k] == locals[k] {
		k++
	}
	return k
}

// make adds new blocks after cur, in its run where they go on in it.
func (i *importer) make(r *archivedRun, cur ref, seq normalize.SequenceHash, locals []uint64, goesOn bool) ref {
	t := i.m.t
	if goesOn {
		id := cur.run()
		if at := t.run(id); cur.off() == int(at.n)-1 && int(at.n)+len(locals) <= runMax {
			t.extend(id, locals, seq)
			return cur + 1
		}
	}
	if t.children.get(uint64(seq)) != 0 {
		return noRef
	}
	b := t.begin(cur, normalize.LocalHash(locals[0]), seq, r.salt, len(locals))
	if len(locals) > 1 {
		t.extend(b.run(), locals[1:], normalize.NextSequence(seq, normalize.LocalHash(locals[1])))
	}
	t.run(b.run()).stamp = r.stamp
	return b
}

// extend adds blocks to the end of a run, whoever holds it. seq is that of the
// first of them.
func (t *tree) extend(id uint32, locals []uint64, seq normalize.SequenceHash) {
	r := t.run(id)
	n := int(r.n)
	if n+len(locals) > 1<<r.class {
		t.resizeRun(r, classFor(n+len(locals)))
	}
	copy(t.words.array(r.words+uint32(n), len(locals)), locals)
	clear(t.words.array(r.words+1<<r.class+uint32(n), len(locals)))
	for _, l := range locals[1:] {
		seq = normalize.NextSequence(seq, normalize.LocalHash(l))
	}
	r.n += uint8(len(locals))
	r.last = seq
	t.nblocks += int64(len(locals))
	if r.wide != 0 {
		t.rebuildWide(r)
	}
}
