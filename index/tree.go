package index

import (
	"math/bits"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// A ref names one block of a tree: its run and its place in it. noRef is the
// root, or nothing.
type ref uint32

const (
	noRef   ref = 0
	runBits     = 6
	runMax      = 1 << runBits // blocks of a run at most, so that a uint64 has a bit for each
)

func makeRef(run uint32, off int) ref { return ref(run<<runBits | uint32(off)) }
func (b ref) run() uint32             { return uint32(b) >> runBits }
func (b ref) off() int                { return int(b) & (runMax - 1) }
func (b ref) bit() uint64             { return 1 << (b & (runMax - 1)) }

// lowBits has the n lowest bits.
func lowBits(n int) uint64 { return ^uint64(0) >> (64 - n) } // n in 1..64

// A run is up to 64 blocks that follow each other, stored once however many
// streams hold them. Other runs hang at any of its blocks, so a run is never
// split. It has no pointers, and fills one line of the cache.
type run struct {
	first normalize.SequenceHash // of block 0
	last  normalize.SequenceHash // of block n-1; 0: not known, ask sequenceAt
	salt  normalize.SaltSeed     // of the chain
	forks uint64                 // the blocks at which other runs hang

	parent  ref    // the block before block 0
	next    uint32 // a run that hangs here: the one tried first, 0: none
	words   uint32 // array of 2<<class words: local hashes, then engine hashes
	entries uint32 // array of nentries entries, sorted by slot
	wide    uint32 // bitset by slot of the streams that hold all n blocks, 0: none kept
	stamp   uint32 // the tree's tick when a block of it was last stored

	nentries uint32
	above    uint16 // blocks before block 0; maxAbove: so many or more, ask depth
	n        uint8
	class    uint8
}

const maxAbove = 1<<16 - 1

// An entry is one stream's part in one run.
type entry struct {
	known  uint64 // blocks the stream announced and nobody forgot since
	held   uint64 // blocks on the device tier, in every full-attention group
	planes uint32 // list of planeMask: all other residency
	pos    uint32 // this run's place in member.runs
	slot   uint32 // whose entry it is
	own    bool   // its handles stand in member.own, not in tree.handles
}

// A planeMask says which blocks of a run stand in one plane of a stream.
type planeMask struct {
	mask  uint64
	next  uint32
	plane uint8
}

// A tree holds the blocks of one shape of a worker set. All of it is guarded by
// the Set's lock.
type tree struct {
	shape    normalize.Shape
	runs     slab[run]
	words    slab[uint64]
	entries  slab[entry]
	planes   slab[planeMask]
	children table       // sequence hash of a run's block 0 -> run
	forks    table       // ref -> how many runs hang there, where it is more than one
	handles  handleTable // engine hash -> block, for the streams whose entry is not own

	members   []*member // by slot
	freeSlots []uint32
	nmembers  int

	exports []*exportedTree // under way

	zombies []uint32 // trimmed runs whose numbers are not free yet

	tick           uint32 // stores so far
	nblocks, nruns int64
	memberships    int64
	hashCollisions int64
}

// chunksFrom is the budget from which on pages come from chunks: some of what it
// allows may be free pages, a chunk in each slab.
const chunksFrom = 128 << 20

// newTree returns an empty tree. small: it must not keep chunks of free pages.
func newTree(shape normalize.Shape, small bool) *tree {
	t := &tree{shape: shape}
	t.runs.store.apart = small
	t.words.store.apart = small
	t.entries.store.apart = small
	t.planes.store.apart = small
	t.handles.store.apart = small
	return t
}

// compactEvery is how many removals pass between two looks at what is free.
const compactEvery = 64

// compact moves a little of what is held together, where much of the memory is
// free. Pointers into the slabs are void then.
func (t *tree) compact() {
	t.runs.compact()
	t.words.compact()
	t.entries.compact()
	t.planes.compact()
	t.handles.compact()
}

func (t *tree) run(id uint32) *run { return t.runs.at(id) }

// stands says whether there is a block b. Whoever kept a ref past the batch it
// comes from asks first: the run may be cut, gone, or another one by now.
func (t *tree) stands(b ref) bool {
	return t.runs.mem[b.run()>>slabBits] != nil && b.off() < int(t.run(b.run()).n)
}

func (t *tree) locals(r *run) []uint64 { return t.words.array(r.words, int(r.n)) }

func (t *tree) local(r *run, off int) normalize.LocalHash {
	return normalize.LocalHash(*t.words.at(r.words + uint32(off)))
}

func (t *tree) engine(r *run, off int) *uint64 {
	return t.words.at(r.words + 1<<r.class + uint32(off))
}

// handle is the shared handle of block b, 0 where it has none.
func (t *tree) handle(b ref) *uint64 { return t.engine(t.run(b.run()), b.off()) }

func (t *tree) all(r *run) []entry { return t.entries.array(r.entries, int(r.nentries)) }

// sequenceAt returns the sequence hash of block b.
func (t *tree) sequenceAt(b ref) normalize.SequenceHash {
	r := t.run(b.run())
	if b.off() == int(r.n)-1 && r.last != 0 {
		return r.last
	}
	seq := r.first
	for _, l := range t.words.array(r.words, b.off()+1)[1:] {
		seq = normalize.NextSequence(seq, normalize.LocalHash(l))
	}
	return seq
}

// depth is how many blocks stand before block 0 of r.
func (t *tree) depth(r *run) (n int) {
	for ; r.above == maxAbove; r = t.run(r.parent.run()) {
		n += r.parent.off() + 1
	}
	return n + int(r.above)
}

// parentOf returns the block before b.
func (t *tree) parentOf(b ref) ref {
	if b.off() > 0 {
		return b - 1
	}
	return t.run(b.run()).parent
}

// sequenceAfter returns the sequence hash of the block with local hash l after
// cur. It notes that of a run's last block.
func (t *tree) sequenceAfter(cur ref, l normalize.LocalHash) normalize.SequenceHash {
	if cur == noRef {
		return normalize.SequenceHash(l)
	}
	seq := t.sequenceAt(cur)
	if r := t.run(cur.run()); cur.off() == int(r.n)-1 {
		r.last = seq
	}
	return normalize.NextSequence(seq, l)
}

// following returns the block after cur in cur's run, if it has local hash l,
// else noRef: it may still begin a run that hangs at cur.
func (t *tree) following(cur ref, l normalize.LocalHash) ref {
	if cur != noRef {
		if r := t.run(cur.run()); cur.off()+1 < int(r.n) && t.local(r, cur.off()+1) == l {
			return cur + 1
		}
	}
	return noRef
}

// runAfter returns the run that hangs at cur and begins with seq, 0 for none.
func (t *tree) runAfter(cur ref, seq normalize.SequenceHash) uint32 {
	if cur != noRef {
		r := t.run(cur.run())
		if r.forks&cur.bit() == 0 {
			return 0
		}
		if r.next != 0 {
			if n := t.run(r.next); n.first == seq && n.parent == cur {
				return r.next
			}
		}
	}
	id := t.children.get(uint64(seq))
	if id == 0 || t.run(id).parent != cur {
		return 0
	}
	return id
}

// add puts a new block after cur, with room for want more, and returns it. It
// lengthens cur's run where only m holds it, else begins a run. noRef: another
// chain has the same sequence hash, and this block cannot be told from it.
func (t *tree) add(m *member, cur ref, l normalize.LocalHash, seq normalize.SequenceHash,
	salt normalize.SaltSeed, want int) ref {
	if cur != noRef {
		id := cur.run()
		r := t.run(id)
		if cur.off() == int(r.n)-1 && r.n < runMax && r.nentries == 1 && t.all(r)[0].slot == m.slot {
			return t.lengthen(id, r, l, seq, want)
		}
	}
	if t.children.get(uint64(seq)) != 0 {
		t.hashCollisions++
		return noRef
	}
	return t.begin(cur, l, seq, salt, want)
}

func (t *tree) lengthen(id uint32, r *run, l normalize.LocalHash, seq normalize.SequenceHash, want int) ref {
	off := int(r.n)
	if off == 1<<r.class {
		t.resizeRun(r, classFor(min(runMax, max(off+want, off*2))))
	}
	*t.words.at(r.words + uint32(off)) = uint64(l)
	*t.engine(r, off) = 0
	r.n++
	r.last = seq
	r.stamp = t.tick
	t.nblocks++
	return makeRef(id, off)
}

func (t *tree) resizeRun(r *run, class uint8) {
	words := t.words.alloc(class + 1)
	n := int(r.n)
	copy(t.words.array(words, n), t.words.array(r.words, n))
	copy(t.words.array(words+1<<class, n), t.words.array(r.words+1<<r.class, n))
	t.words.free(r.words)
	r.words, r.class = words, class
}

func (t *tree) begin(cur ref, l normalize.LocalHash, seq normalize.SequenceHash,
	salt normalize.SaltSeed, want int) ref {
	id := t.runs.alloc(0)
	r := t.run(id)
	class := classFor(min(runMax, want))
	*r = run{first: seq, last: seq, salt: salt, parent: cur, n: 1, class: class, stamp: t.tick,
		words: t.words.alloc(class + 1)}
	*t.words.at(r.words) = uint64(l)
	t.children.put(uint64(seq), id)
	t.nruns++
	t.nblocks++
	if cur != noRef {
		t.attach(cur, id)
	}
	return makeRef(id, 0)
}

// attach notes that run id hangs at block cur.
func (t *tree) attach(cur ref, id uint32) {
	p := t.run(cur.run())
	t.run(id).above = uint16(min(maxAbove, int(p.above)+cur.off()+1))
	if p.forks&cur.bit() != 0 {
		t.forks.put(uint64(cur), max(t.forks.get(uint64(cur)), 1)+1)
	}
	p.forks |= cur.bit()
	p.next = id // of several that hang here, the newest is asked for most
}

func (t *tree) detach(cur ref, id uint32) {
	p := t.run(cur.run())
	if p.next == id {
		p.next = 0
	}
	switch n := t.forks.get(uint64(cur)); n {
	case 0:
		p.forks &^= cur.bit()
	case 2:
		t.forks.del(uint64(cur))
	default:
		t.forks.put(uint64(cur), n-1)
	}
}

// reap cuts off the blocks at the end of run id that no stream knows and where
// nothing hangs; a run without blocks goes, and its parent is looked at.
func (t *tree) reap(id uint32) {
	for id != 0 {
		r := t.run(id)
		n := t.wanted(r)
		if n == int(r.n) {
			return
		}
		for _, e := range t.exports {
			e.cut(id, n)
		}
		unbound := t.boundFrom(r, n)
		t.nblocks -= int64(int(r.n) - n)
		if n > 0 {
			t.cutTo(r, n)
			t.unbind(unbound)
			return
		}
		id = t.freeRun(id, r)
		t.unbind(unbound)
	}
}

// wanted is how many of the run's blocks must stay.
func (t *tree) wanted(r *run) int {
	tail := uint64(1) << (r.n - 1)
	live := r.forks
	for i, es := 0, t.all(r); i < len(es) && live&tail == 0; i++ {
		live |= es[i].known
	}
	return bits.Len64(live)
}

func (t *tree) cutTo(r *run, n int) {
	r.n, r.last = uint8(n), 0
	if r.class > 1 && n <= 1<<r.class/4 {
		t.resizeRun(r, classFor(n))
	}
	if r.wide != 0 {
		t.rebuildWide(r)
	}
}

// freeRun returns the run it hung at, 0 for a root.
func (t *tree) freeRun(id uint32, r *run) uint32 {
	parent := r.parent
	t.unhang(id, r)
	t.runs.free(id)
	return parent.run()
}

// unhang takes a run out of the tree and frees all of it but its number, under
// which an empty run stands then.
func (t *tree) unhang(id uint32, r *run) {
	t.children.del(uint64(r.first))
	t.words.free(r.words)
	t.dropWide(r)
	if r.entries != 0 {
		t.entries.free(r.entries)
	}
	t.nruns--
	if r.parent != noRef {
		t.detach(r.parent, id)
	}
	*r = run{} // whoever still has the number finds no block here
}

// boundFrom is how many of the run's blocks from off on have a shared handle.
func (t *tree) boundFrom(r *run, off int) (n int) {
	for _, e := range t.words.array(r.words+1<<r.class, int(r.n))[off:] {
		if e != 0 {
			n++
		}
	}
	return n
}

// bound says whether block b has a shared handle. One that is 0 is nobody's: it
// is always the stream's own.
func (t *tree) bound(b ref) bool { return *t.handle(b) != 0 }

// shares says whether e is the shared handle of block b of run r.
func (t *tree) shares(r *run, b ref, e zmqwire.EngineHash) bool {
	return e != 0 && *t.engine(r, b.off()) == uint64(e)
}

func (t *tree) bytes() int64 {
	n := t.runs.bytes() + t.words.bytes() + t.entries.bytes() + t.planes.bytes() +
		t.children.bytes() + t.forks.bytes() + t.handles.bytes() + int64(cap(t.members))*8
	for _, m := range t.members {
		if m != nil {
			n += m.bytes()
		}
	}
	return n
}
