package index

import (
	"math/bits"
	"math/rand/v2"
	"unsafe"
)

// A handleTable finds the block that a shared engine hash stands for. An entry
// takes 8 bytes, 32 bits of a hash of the handle and the block: whether the
// handle is really that block's, the engine hash in the block's run tells. So
// it costs half of what a table of whole keys costs to search and to copy.
//
// It is an extendible hash of open-addressed pages, as table is. The upper bits
// of an entry's tag choose the page, the next ones its home there. The zero
// handleTable is empty and ready.
type handleTable struct {
	seed, mul uint64
	dir       []uint32 // by the tag's upper bits: the page
	pages     []handlePage
	bits      uint8 // len(dir) == 1<<bits
	n         int
	slots     int // over all pages

	missed  handleMiss
	version uint32       // of what missed tells
	scratch []handleSlot // of split
}

type handlePage struct {
	slots []handleSlot
	n     uint32
	depth uint8 // how many of the tag's upper bits all entries share
}

// A handleSlot without a block is empty.
type handleSlot struct {
	tag   uint32
	block ref
}

// handleMiss is where lookup did not find a handle: put need not look again.
type handleMiss struct {
	tag, page, slot uint32
	version         uint32
	set             bool
}

const (
	handlePageMin = 8
	handlePageMax = 1024 // 8 KiB; a full one is split in two
	handleMaxBits = 20   // 12 bits of the tag are left for the place in a page
)

func (h *handleTable) tag(e uint64) uint32 {
	hi, lo := bits.Mul64(e^h.seed, h.mul)
	return uint32((hi ^ lo) * 0x9e3779b97f4a7c15 >> 32) // consecutive handles must not stand side by side
}

func (h *handleTable) pageOf(tag uint32) uint32 { return h.dir[uint64(tag)>>(32-h.bits)] }

// home is where an entry with this tag would stand.
func (p *handlePage) home(tag uint32) int {
	return int(uint64(tag<<p.depth) * uint64(len(p.slots)) >> 32)
}

func (p *handlePage) full() bool { return int(p.n)*20 >= len(p.slots)*17 } // 85 %

// lookup returns the block whose shared handle is e, noRef if there is none. A
// put of e that follows at once does not search again.
func (t *tree) lookup(e uint64) ref {
	h := &t.handles
	if h.n == 0 {
		return noRef
	}
	tag := h.tag(e)
	no := h.pageOf(tag)
	p := &h.pages[no]
	for i := p.home(tag); ; i++ {
		if i == len(p.slots) {
			i = 0
		}
		s := &p.slots[i]
		if s.block == noRef {
			h.missed = handleMiss{tag: tag, page: no, slot: uint32(i), version: h.version, set: true}
			return noRef
		}
		if s.tag == tag && *t.engine(t.run(s.block.run()), s.block.off()) == e {
			return s.block
		}
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
	if s.block == noRef || s.tag != tag {
		return s.tag
	}
	return uint32(*t.engine(t.run(s.block.run()), s.block.off()))
}

// put makes e lead to the block, which must have e as its engine hash. No
// other block may have e as its shared handle.
func (h *handleTable) put(e uint64, block ref) {
	if h.dir == nil {
		h.init()
	}
	tag := h.tag(e)
	h.n++
	if m := h.missed; m.set && m.tag == tag && m.version == h.version && !h.pages[m.page].full() {
		h.version++
		h.pages[m.page].slots[m.slot] = handleSlot{tag, block}
		h.pages[m.page].n++
		return
	}
	h.version++
	for h.pages[h.pageOf(tag)].full() {
		h.grow(h.pageOf(tag))
	}
	h.pages[h.pageOf(tag)].put(handleSlot{tag, block})
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

// del takes away that e leads to the block, if it does.
func (h *handleTable) del(e uint64, block ref) {
	if h.n == 0 {
		return
	}
	tag := h.tag(e)
	p := &h.pages[h.pageOf(tag)]
	i := p.home(tag)
	for p.slots[i] != (handleSlot{tag, block}) {
		if p.slots[i].block == noRef {
			return
		}
		if i++; i == len(p.slots) {
			i = 0
		}
	}
	h.version++
	p.closeGap(i)
	p.n--
	h.n--
	if len(p.slots) > handlePageMin && int(p.n)*4 < len(p.slots) {
		h.resize(p, len(p.slots)/2)
	}
	if h.n == 0 {
		*h = handleTable{seed: h.seed, mul: h.mul, version: h.version}
	}
}

// closeGap empties slot i and moves back what its entry had displaced.
func (p *handlePage) closeGap(i int) {
	for j := i; ; {
		if j++; j == len(p.slots) {
			j = 0
		}
		s := p.slots[j]
		if s.block == noRef {
			break
		}
		if between(i, p.home(s.tag), j) {
			continue // it would stand before its home
		}
		p.slots[i] = s
		i = j
	}
	p.slots[i] = handleSlot{}
}

func (h *handleTable) init() {
	if h.mul == 0 {
		h.seed, h.mul = rand.Uint64(), rand.Uint64()|1
	}
	h.dir = []uint32{0}
	h.pages = []handlePage{{slots: make([]handleSlot, handlePageMin)}}
	h.slots = handlePageMin
}

// grow makes room in page no: a larger page, or two of it.
func (h *handleTable) grow(no uint32) {
	p := &h.pages[no]
	if len(p.slots) < handlePageMax || p.depth == handleMaxBits {
		h.resize(p, 2*len(p.slots))
		return
	}
	if p.depth == h.bits {
		dir := make([]uint32, 2*len(h.dir))
		for i, no := range h.dir {
			dir[2*i], dir[2*i+1] = no, no
		}
		h.dir = dir
		h.bits++
	}
	h.split(no)
}

func (h *handleTable) resize(p *handlePage, size int) {
	old := p.slots
	h.slots += size - len(old)
	p.slots, p.n = make([]handleSlot, size), 0
	for _, s := range old {
		if s.block != noRef {
			p.put(s)
		}
	}
}

// split moves the entries whose next bit is set to a new page.
func (h *handleTable) split(no uint32) {
	p := &h.pages[no]
	h.scratch = append(h.scratch[:0], p.slots...)
	clear(p.slots)
	depth := p.depth + 1
	other := handlePage{slots: make([]handleSlot, len(p.slots)), depth: depth}
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
	h.slots += len(other.slots)
	h.pages = append(h.pages, other)
	// The old page's part of the directory: all entries with its upper bits.
	span := uint64(1) << (h.bits - (depth - 1))
	from := uint64(some) >> (32 - h.bits) &^ (span - 1)
	for i := from + span/2; i < from+span; i++ {
		h.dir[i] = uint32(len(h.pages) - 1)
	}
}

// each calls f for every block until f returns false.
func (h *handleTable) each(f func(block ref) bool) {
	for i := range h.pages {
		for _, s := range h.pages[i].slots {
			if s.block != noRef && !f(s.block) {
				return
			}
		}
	}
}

func (h *handleTable) bytes() int64 {
	return int64(h.slots+cap(h.scratch))*int64(unsafe.Sizeof(handleSlot{})) +
		int64(cap(h.pages))*int64(unsafe.Sizeof(handlePage{})) + int64(cap(h.dir))*4
}
