package index

import (
	"math/bits"
	"math/rand/v2"
	"unsafe"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// A handleTable finds the block that a shared engine hash stands for. An entry
// takes 8 bytes, 32 bits of a hash of the handle and the block: whether the
// handle is really that block's, the engine hash in the block's run tells. So
// it costs half of what a table of whole keys costs to search and to copy.
//
// And so nothing need be taken out when a block goes: its entry is stale, and
// leads nowhere. To find it would be a cache miss a block; instead whole pages
// are swept of what is stale: a full one where that is an eighth of the table, any
// where it is half.
//
// It is an extendible hash of open-addressed pages, as table is. The upper bits
// of an entry's tag choose the page, the next ones its home there. The zero
// handleTable is empty and ready.
type handleTable struct {
	seed, mul uint64
	dir       directory // by the tag
	pages     []handlePage
	n         int // entries
	bound     int // blocks that have a shared handle; each has an entry, or two
	slots     int // of the pages that are not in the store

	missed  handleMiss
	version uint32       // of what missed tells
	scratch []handleSlot // of split and sweep
	store   pageStore[[handlePageMax]handleSlot]

	credit int    // entries that may be looked at
	cursor uint32 // the page swept last
}

type handlePage struct {
	slots  []handleSlot
	stored uint32 // the number of slots in the store, if they are handlePageMax
	n      uint32
	depth  uint8 // how many of the tag's upper bits all entries share
}

// A handleSlot without a block is empty.
type handleSlot struct {
	tag   uint32
	block ref
}

// handleMiss is where lookup did not find a handle: share need not look again.
type handleMiss struct {
	tag, page, slot uint32
	version         uint32
	set             bool
}

const (
	handlePageMin = 8
	handlePageMax = 1024 // 8 KiB; a full one is split in two
	handleMaxBits = 20   // 12 bits of the tag are left for the place in a page

	// sweepPace is how many entries are looked at for each block that goes while
	// more than half of the table is stale. Two keep that from growing.
	sweepPace = 4
)

func (h *handleTable) tag(e uint64) uint32 {
	hi, lo := bits.Mul64(e^h.seed, h.mul)
	return uint32((hi ^ lo) * 0x9e3779b97f4a7c15 >> 32) // consecutive handles must not stand side by side
}

func (h *handleTable) pageOf(tag uint32) uint32 { return h.dir.page(uint64(tag) << 32) }

// home is where an entry with this tag would stand.
func (p *handlePage) home(tag uint32) int {
	return int(uint64(tag<<p.depth) * uint64(len(p.slots)) >> 32)
}

func (p *handlePage) full() bool { return int(p.n)*20 >= len(p.slots)*17 } // 85 %

// lookup returns the block whose shared handle is e, noRef if there is none. A
// share of e that follows at once does not search again.
func (t *tree) lookup(e uint64) ref {
	h := &t.handles
	if h.n == 0 || e == 0 {
		return noRef
	}
	tag := h.tag(e)
	no := h.pageOf(tag)
	p := &h.pages[no]
	reuse := -1
	for i := p.home(tag); ; i++ {
		if i == len(p.slots) {
			i = 0
		}
		s := &p.slots[i]
		if s.block == noRef {
			if reuse < 0 {
				reuse = i
			}
			h.missed = handleMiss{tag: tag, page: no, slot: uint32(reuse), version: h.version, set: true}
			return noRef
		}
		if s.tag != tag {
			continue
		}
		if t.stands(s.block) {
			if *t.handle(s.block) == e {
				return s.block
			}
			if t.leads(*s) { // to the block of another handle with this tag
				continue
			}
		}
		reuse = i
	}
}

// touch loads the slot where e would stand, and what it leads to.
func (t *tree) touch(e uint64) uint32 {
	h := &t.handles
	if h.n == 0 {
		return 0
	}
	tag := h.tag(e)
	p := &h.pages[h.pageOf(tag)]
	s := &p.slots[p.home(tag)]
	if s.block == noRef || s.tag != tag || !t.stands(s.block) {
		return s.tag
	}
	return uint32(*t.handle(s.block))
}

// share makes e, which is not 0 and no other block's, the shared handle of block
// b, which has none.
func (t *tree) share(b ref, e zmqwire.EngineHash) {
	*t.handle(b) = uint64(e)
	h := &t.handles
	if h.dir.pages == nil {
		h.init()
	}
	tag := h.tag(uint64(e))
	s := handleSlot{tag, b}
	h.bound++
	if h.fill(s) {
		return
	}
	for h.pages[h.pageOf(tag)].full() {
		t.roomIn(h.pageOf(tag))
	}
	h.version++
	h.n++
	h.pages[h.pageOf(tag)].put(s)
}

// fill puts s where the search for its handle ended, if that was the last one.
func (h *handleTable) fill(s handleSlot) bool {
	m := &h.missed
	if !m.set || m.tag != s.tag || m.version != h.version {
		return false
	}
	p := &h.pages[m.page]
	if at := &p.slots[m.slot]; at.block != noRef { // it is stale
		*at = s
	} else if p.full() {
		return false
	} else {
		*at = s
		p.n++
		h.n++
	}
	h.version++
	return true
}

func (p *handlePage) put(s handleSlot) {
	i := p.home(s.tag)
	for p.slots[i].block != noRef {
		if i++; i == len(p.slots) {
			i = 0
		}
	}
	p.slots[i] = s
	p.n++
}

// unbind notes that so many shared handles lead nowhere any more.
func (t *tree) unbind(n int) {
	h := &t.handles
	if h.bound -= n; h.bound == 0 {
		*h = handleTable{seed: h.seed, mul: h.mul, version: h.version + 1, store: pageStore[[handlePageMax]handleSlot]{apart: h.store.apart}}
		return
	}
	h.credit += sweepPace * n
	for h.n > 2*h.bound && h.credit > 0 {
		h.cursor = (h.cursor + 1) % uint32(len(h.pages))
		h.credit -= int(h.pages[h.cursor].n) + 1
		t.sweep(h.cursor)
	}
	h.credit = min(h.credit, 0)
}

// sweep takes out of page no what is stale. It goes through the page twice, and
// copies what stands before it knows whether that is to stay: so no loop has a
// branch that cannot be foretold, and the cache misses of each overlap.
func (t *tree) sweep(no uint32) {
	h := &t.handles
	p := &h.pages[no]
	h.version++
	h.n -= int(p.n)
	if cap(h.scratch) < len(p.slots) {
		h.scratch = make([]handleSlot, len(p.slots))
	}
	kept := h.scratch[:len(p.slots)]
	n := 0
	for _, s := range p.slots {
		kept[n] = s
		n += one(t.stands(s.block))
	}
	kept, n = kept[:n], 0
	for _, s := range kept {
		kept[n] = s
		n += one(t.leads(s))
	}
	clear(p.slots)
	p.n = 0
	for _, s := range kept[:n] {
		p.put(s)
	}
	h.n += n
	if len(p.slots) > handlePageMin && n*4 < len(p.slots) {
		h.resize(no, max(handlePageMin, 1<<classFor(2*n)))
	}
}

// leads says whether the entry of a block that stands is not stale: it is, or
// could be, that of its shared handle.
func (t *tree) leads(s handleSlot) bool {
	e := *t.handle(s.block)
	return e != 0 && t.handles.tag(e) == s.tag
}

func one(yes bool) (n int) {
	if yes {
		n = 1
	}
	return n
}

// roomIn makes a full page one that is not, where much of the table is stale
// by a sweep.
func (t *tree) roomIn(no uint32) {
	h := &t.handles
	if (h.n-h.bound)*8 > h.n {
		t.sweep(no)
		if p := &h.pages[no]; int(p.n)*5 <= len(p.slots)*3 {
			return
		}
	}
	h.grow(no)
}

func (h *handleTable) init() {
	if h.mul == 0 {
		h.seed, h.mul = rand.Uint64(), rand.Uint64()|1
	}
	h.dir.pages = []uint32{0}
	h.pages = []handlePage{{}}
	h.fit(0, handlePageMin)
}

// grow makes room in page no: a larger page, or two of it.
func (h *handleTable) grow(no uint32) {
	p := &h.pages[no]
	if len(p.slots) < handlePageMax || p.depth == handleMaxBits {
		h.resize(no, 2*len(p.slots))
		return
	}
	if p.depth == h.dir.bits {
		h.dir.double()
	}
	h.split(no)
}

func (h *handleTable) resize(no uint32, size int) {
	p := &h.pages[no]
	old := *p
	p.n = 0
	h.fit(no, size)
	for _, s := range old.slots {
		if s.block != noRef {
			p.put(s)
		}
	}
	if len(old.slots) == handlePageMax {
		h.store.put(old.stored)
	} else {
		h.slots -= len(old.slots)
	}
}

// fit gives page no empty slots.
func (h *handleTable) fit(no uint32, size int) {
	p := &h.pages[no]
	if size != handlePageMax {
		p.slots = make([]handleSlot, size)
		h.slots += size
		return
	}
	slots, stored := h.store.get(no)
	clear(slots[:])
	p.slots, p.stored = slots[:], stored
}

// compact is slab.compact for the table.
func (h *handleTable) compact() {
	if !h.store.roomy() {
		return
	}
	h.store.compact(func(no uint32, slots *[handlePageMax]handleSlot, stored uint32) {
		h.pages[no].slots, h.pages[no].stored = slots[:], stored
	})
}

// split moves the entries whose next bit is set to a new page.
func (h *handleTable) split(no uint32) {
	depth := h.pages[no].depth + 1
	added := uint32(len(h.pages))
	h.pages = append(h.pages, handlePage{depth: depth})
	h.fit(added, handlePageMax)
	p, other := &h.pages[no], &h.pages[added]
	h.scratch = append(h.scratch[:0], p.slots...)
	clear(p.slots)
	p.n, p.depth = 0, depth
	var some uint32
	for _, s := range h.scratch {
		if s.block == noRef {
			continue
		}
		some = s.tag
		if s.tag>>(32-depth)&1 == 0 {
			p.put(s)
		} else {
			other.put(s)
		}
	}
	h.dir.split(uint64(some)<<32, depth, added)
}

func (h *handleTable) bytes() int64 {
	return int64(h.slots+cap(h.scratch))*int64(unsafe.Sizeof(handleSlot{})) + h.store.bytes() +
		int64(cap(h.pages))*int64(unsafe.Sizeof(handlePage{})) + int64(cap(h.dir.pages))*4
}
