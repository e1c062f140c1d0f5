package index

import (
	"slices"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// store takes one BlockStored in.
func (s *Stream) store(b *normalize.Batch, i int, a *Applied) {
	op := &b.Ops[i]
	g := s.group(op)
	if g == nil {
		return
	}
	if g.spec == normalize.SpecOther {
		if !s.other {
			s.other = true
			s.set.layout++
		}
		return
	}
	switch op.Form {
	case normalize.Notice:
		s.storeNotice(op, g, a)
	case normalize.Unplaced:
		if g.spec == normalize.SpecWindow {
			s.storeUnplaced(op, g, a)
		}
	case normalize.Placed:
		s.storePlaced(b, i, g, a)
	}
}

// storeNotice counts copies of blocks whose content the stream has told before.
func (s *Stream) storeNotice(op *normalize.Op, g *group, a *Applied) {
	for _, e := range op.Hashes {
		if m, block := s.locate(g, e); block != noRef {
			if p, ok := m.planeOf(op.Tier, g.index, g.spec == normalize.SpecFull); ok {
				m.store(block, e, p, false)
				a.Stored++
			}
		} else if m, o := s.locateOrphan(g, e); o != nil {
			if p, ok := m.planeOf(op.Tier, g.index, g.spec == normalize.SpecFull); ok {
				m.orphans.again(o)
				o.store(p)
			}
		}
	}
}

// storeUnplaced counts window blocks by handle: those whose handle has a place
// stand there, the others wait for a store that tells it.
func (s *Stream) storeUnplaced(op *normalize.Op, g *group, a *Applied) {
	m := s.enter(op.Shape)
	s.sees(g, op.Shape)
	p, ok := m.planeOf(op.Tier, g.index, false)
	if !ok {
		return
	}
	for _, e := range op.Hashes {
		if block, _ := m.resolve(e); block != noRef {
			m.store(block, e, p, false)
			a.Stored++
			continue
		}
		if g.unplaced == nil {
			g.unplaced = make(map[unplacedKey]uint32)
		}
		if len(g.unplaced) < s.set.options.MaxOrphans {
			g.unplaced[unplacedKey{e, op.Tier}]++
		}
	}
}

// A placing is one store of consecutive blocks on its way into a member.
type placing struct {
	s        *Stream
	m        *member
	g        *group
	plane    uint8
	doubtful bool
	a        *Applied

	created bool // a block that nobody knew before
	touched bool // the handles of the blocks to come

	salt normalize.SaltSeed
	cur  ref // the block before the next one
}

func (s *Stream) storePlaced(b *normalize.Batch, i int, g *group, a *Applied) {
	op := &b.Ops[i]
	m := s.enter(op.Shape)
	s.sees(g, op.Shape)
	if g.spec == normalize.SpecFull {
		s.identifiesBy(op.Shape)
	}
	p, ok := m.planeOf(op.Tier, g.index, g.spec == normalize.SpecFull)
	if !ok || len(op.Hashes) == 0 {
		return
	}
	m.t.tick++
	pl := placing{s: s, m: m, g: g, plane: p, a: a, salt: op.Salt}
	if op.HasParent {
		if pl.cur = m.parent(op.Parent); pl.cur == noRef {
			s.storeOrphans(b, op, 0, m, p, a)
			return
		}
		pl.salt = m.t.run(pl.cur.run()).salt
	} else {
		pl.doubtful = s.isReport(op, g, m, p)
	}
	locals := s.hashed(b, i, pl.salt)
	if m.ownByHabit { // every handle is searched for, and put
		pl.touch(op.Hashes)
	}
	for k := 0; k < len(op.Hashes); {
		if n := pl.stretch(op.Hashes[k:], locals[k:]); n > 0 {
			k += n
			continue
		}
		e := op.Hashes[k]
		if m.orphans.get(e) != nil { // its first place is to wait
			s.storeOrphans(b, op, k, m, p, a)
			return
		}
		if !pl.put(e, locals[k], len(op.Hashes)-k) {
			return
		}
		if k++; pl.created {
			pl.touch(op.Hashes[k:]) // what follows is new as well
		}
	}
	m.recent[recentOf(op.Hashes[len(op.Hashes)-1])] = pl.cur
}

// touch loads what the handles lead to, once: their cache misses overlap here.
func (pl *placing) touch(hashes []zmqwire.EngineHash) {
	if pl.touched {
		return
	}
	pl.touched = true
	for _, e := range hashes {
		pl.s.touched += pl.m.touch(e)
	}
}

// identifiesBy makes shape the one that prompts are identified by.
func (s *Stream) identifiesBy(shape normalize.Shape) {
	if have := s.shape.Load(); have == nil || *have != shape {
		now := shape
		s.shape.Store(&now)
	}
}

// isReport says whether a store from the prompt's start may announce again what
// is counted already, without a new copy (vLLM's opt-in reports): all of its
// blocks are held, and were before this batch. A plain engine that had them
// then would have used them and not computed them again. One with sliding
// windows, or one that drops the last block, does compute them again, so there
// every store is a copy.
func (s *Stream) isReport(op *normalize.Op, g *group, m *member, p uint8) bool {
	if op.Tier != normalize.Device || g.spec != normalize.SpecFull || s.config.EagleDrop || s.hybrid() {
		return false
	}
	first := op.Hashes[0]
	if slices.Contains(s.rootsSeen, first) {
		return false
	}
	s.rootsSeen = append(s.rootsSeen, first)
	for _, e := range op.Hashes {
		b, _ := m.resolve(e)
		if b == noRef || !m.in(m.entry(b.run()), b, p) || m.former(b, e) {
			return false
		}
	}
	return true
}

// put stores the next block of the chain, called e; false if the rest of the
// chain has no place.
func (pl *placing) put(e zmqwire.EngineHash, l normalize.LocalHash, want int) bool {
	m := pl.m
	block, shared := m.resolve(e)
	agrees := block == noRef || pl.agrees(block, l)
	if !agrees {
		pl.a.Conflicts++
		if !m.holdsAs(block, e) {
			if !pl.move(block, e) {
				return false
			}
			block, shared = noRef, m.t.lookup(uint64(e))
		}
	}
	rival := false
	if block == noRef {
		if block, rival = pl.place(e, l, shared, want); block == noRef {
			return false
		}
	}
	if m.store(block, e, pl.plane, pl.doubtful) || rival {
		pl.conflict()
	} else {
		pl.s.inARow = 0
	}
	pl.a.Stored++
	pl.cur = block
	pl.settle(e, block)
	return true
}

// agrees says whether the known block stands where the event puts it.
func (pl *placing) agrees(block ref, l normalize.LocalHash) bool {
	t := pl.m.t
	return t.local(t.run(block.run()), block.off()) == l && t.parentOf(block) == pl.cur
}

// move forgets a known block that is nowhere resident, so that the handle's
// newer word about its place holds; false if that cannot be. While a block is
// held, its first place does.
func (pl *placing) move(block ref, e zmqwire.EngineHash) bool {
	m := pl.m
	if m.rivals[block] != nil || pl.above(block) {
		return false
	}
	m.forget(block, e)
	return true
}

// above says whether block stands in the chain that ends in cur: to forget it
// could cut what the store hangs on.
func (pl *placing) above(block ref) bool {
	t := pl.m.t
	for b := pl.cur; b != noRef; b = t.run(b.run()).parent {
		if b.run() == block.run() {
			return block.off() <= b.off()
		}
	}
	return false
}

// place finds or makes the block with local hash l after cur and makes e its
// handle. rival: the stream holds it already, under another handle.
func (pl *placing) place(e zmqwire.EngineHash, l normalize.LocalHash, shared ref, want int) (block ref, rival bool) {
	m, t := pl.m, pl.m.t
	created := false
	if block = t.following(pl.cur, l); block == noRef {
		seq := t.sequenceAfter(pl.cur, l)
		if id := t.runAfter(pl.cur, seq); id != 0 {
			block = makeRef(id, 0)
		} else if block = t.add(m, pl.cur, l, seq, pl.salt, want); block != noRef {
			created = true
		} else {
			return noRef, false
		}
	}
	en := t.join(m, block.run())
	pl.created = created
	if en.known&block.bit() == 0 {
		m.learn(en, block, e, shared, created)
		return block, false
	}
	rival = m.residentIn(en, block)
	m.rival(t.run(block.run()), en, block, e)
	return block, rival
}

func (pl *placing) conflict() {
	pl.a.ContentConflicts++
	pl.s.inARow++
	if pl.s.inARow >= restartConflicts {
		pl.a.SuspectRestart = true
	}
}

// settle gives block, now that e is its handle, what waited for e: window
// copies without a place, and orphans.
func (pl *placing) settle(e zmqwire.EngineHash, block ref) {
	for i := range pl.s.groups {
		if g := &pl.s.groups[i]; len(g.unplaced) > 0 && g.has(pl.m.t.shape) {
			pl.m.takeUnplaced(g, e, block)
		}
	}
	if pl.m.orphans.len() > 0 {
		pl.link(e, block)
	}
}

func (m *member) takeUnplaced(g *group, e zmqwire.EngineHash, block ref) {
	for tier := normalize.Device; tier < normalize.NoTier; tier++ {
		key := unplacedKey{e, tier}
		n := g.unplaced[key]
		if n == 0 {
			continue
		}
		delete(g.unplaced, key)
		if p, ok := m.planeOf(tier, g.index, false); ok {
			r := m.t.run(block.run())
			m.addCopy(r, m.entry(block.run()), block, p, n, false)
		}
	}
}

// storeOrphans keeps the blocks of a store, from block from on, whose parent is
// not known.
func (s *Stream) storeOrphans(b *normalize.Batch, op *normalize.Op, from int, m *member, p uint8, a *Applied) {
	parent := op.Parent
	if from > 0 {
		parent = op.Hashes[from-1]
	}
	if m.orphans == nil {
		m.orphans = newOrphanage()
	}
	now := time.Now()
	for k := from; k < len(op.Hashes); k++ {
		e := op.Hashes[k]
		a.Orphaned++
		if block, _ := m.resolve(e); block != noRef { // its first place holds
			a.Conflicts++
			m.store(block, e, p, false)
			a.Stored++
		} else if o := m.orphans.get(e); o != nil {
			if o.parent != parent {
				a.Conflicts++
			}
			m.orphans.again(o)
			o.store(p)
		} else {
			o := &orphan{handle: e, parent: parent, content: b.Content(op, k), since: now}
			o.store(p)
			m.orphans.add(o)
			if at, _ := m.resolve(parent); at != noRef { // a known block stood between
				(&placing{s: s, m: m, a: a}).link(parent, at)
			}
		}
		parent = e
	}
}

func (o *orphan) store(p uint8) {
	if o.copies == nil {
		o.copies = make(map[uint8]uint32, 1)
	}
	o.copies[p]++
}

// takeCopy takes a removed copy of k out of counts. left, where it is not
// negative, is the publisher's word of how many remain; of copies that nobody
// stored there is no word.
func takeCopy[K comparable](counts map[K]uint32, k K, left int64) {
	n := counts[k]
	if n == 0 {
		return
	}
	if left < 0 {
		left = int64(n) - 1
	}
	if left == 0 {
		delete(counts, k)
	} else {
		counts[k] = uint32(left)
	}
}

// link places the orphans that wait for e, and those that wait for them.
func (pl *placing) link(e zmqwire.EngineHash, block ref) {
	m := pl.m
	type placed struct {
		handle zmqwire.EngineHash
		block  ref
	}
	var asleep []placed // at the end: for them others are forgotten, perhaps some in queue
	queue := []placed{{e, block}}
	for len(queue) > 0 {
		q := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		for o := m.orphans.waitsFor(q.handle); o != nil; o = m.orphans.waitsFor(q.handle) {
			m.orphans.drop(o)
			if b := pl.linkOne(o, q.block); b != noRef {
				queue = append(queue, placed{o.handle, b})
				if !m.residentIn(m.entry(b.run()), b) {
					asleep = append(asleep, placed{o.handle, b})
				}
			}
		}
	}
	for _, a := range asleep {
		m.sleep(a.block, a.handle)
	}
}

func (pl *placing) linkOne(o *orphan, parent ref) ref {
	m, t := pl.m, pl.m.t
	sub := placing{s: pl.s, m: m, a: pl.a, cur: parent, salt: t.run(parent.run()).salt}
	_, shared := m.resolve(o.handle)
	b, rival := sub.place(o.handle, o.content.Local(sub.salt), shared, 1)
	if b == noRef {
		return noRef
	}
	if rival {
		pl.conflict()
	}
	r := t.run(b.run())
	r.stamp = t.tick
	en := m.entry(b.run())
	for p, n := range o.copies {
		m.addCopy(r, en, b, p, n, false)
	}
	return b
}

// remove takes one BlockRemoved in. A removal that names no group is every
// group's: which one it meant, nobody knows.
func (s *Stream) remove(op *normalize.Op, a *Applied) {
	for i := range s.groups {
		g := &s.groups[i]
		if g.index == op.Group || op.Group < 0 {
			s.removeFrom(op, g, a)
		}
	}
}

func (s *Stream) removeFrom(op *normalize.Op, g *group, a *Applied) {
	if g.spec == normalize.SpecOther {
		return
	}
	full := g.spec == normalize.SpecFull
	for k, e := range op.Hashes {
		left := int64(-1)
		if op.Remaining != nil {
			left = int64(op.Remaining[k])
		}
		if m, block := s.locate(g, e); block != noRef {
			if p, ok := m.findPlane(op.Tier, g.index, full); ok && m.remove(block, e, p, left) {
				a.Removed++
			}
			continue
		}
		if m, o := s.locateOrphan(g, e); o != nil {
			if p, ok := m.findPlane(op.Tier, g.index, full); ok {
				takeCopy(o.copies, p, left)
			}
			continue
		}
		takeCopy(g.unplaced, unplacedKey{e, op.Tier}, left)
	}
}
