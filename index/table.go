package index

import (
	"math/bits"
	"math/rand/v2"
	"unsafe"
)

// A table maps 64-bit keys to 32-bit values, never 0. It is an extendible hash
// of small open-addressed pages: growing costs one page, a few microseconds,
// at a time, so no batch ever waits for a table to be copied. 12 bytes a slot
// at 66 to 82 percent load. The hash is keyed, since handles come from peers.
//
// The zero table is empty and ready.
type table struct {
	seed, mul uint64
	dir       []uint32 // by the hash's upper bits: the page
	pages     []tablePage
	bits      uint8 // len(dir) == 1<<bits
	n         int
	slots     int // over all pages
}

type tablePage struct {
	slots []tableSlot
	n     uint32
	depth uint8 // how many of the hash's upper bits all its keys share
}

// tableSlot is the key's two halves and the value; a value of 0 is empty.
type tableSlot [3]uint32

const (
	tablePageMin = 8
	tableMaxBits = 24
)

// The sizes of a page past its first doublings fill Go's allocation classes;
// a full page of the largest size is split in two.
var tablePageSizes = [...]int{tablePageMin, 16, 32, 64, 128, 256, 512, 682, 853, 1024}

func (s *tableSlot) is(key uint64) bool {
	return s[0] == uint32(key) && s[1] == uint32(key>>32)
}

func (s *tableSlot) key() uint64 { return uint64(s[1])<<32 | uint64(s[0]) }

func (t *table) hash(key uint64) uint64 {
	hi, lo := bits.Mul64(key^t.seed, t.mul)
	return hi ^ lo
}

func (t *table) page(h uint64) *tablePage {
	return &t.pages[t.dir[h>>1>>(63-t.bits)]]
}

// home is where a key of hash h would stand in a page of n slots.
func home(h uint64, n int) int {
	return int(uint64(uint32(h)) * uint64(n) >> 32)
}

// get returns the value of key, 0 if it has none.
func (t *table) get(key uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	h := t.hash(key)
	slots := t.page(h).slots
	for i := home(h, len(slots)); ; i++ {
		if i == len(slots) {
			i = 0
		}
		if s := &slots[i]; s[2] == 0 || s.is(key) {
			return s[2]
		}
	}
}

// put sets the value of key.
func (t *table) put(key uint64, value uint32) {
	if t.dir == nil {
		t.init()
	}
	h := t.hash(key)
	p := t.page(h)
	for int(p.n)*100 >= len(p.slots)*82 {
		t.grow(t.dir[h>>1>>(63-t.bits)])
		p = t.page(h)
	}
	if p.put(h, key, value) {
		t.n++
	}
}

// put says whether the key is new in the page.
func (p *tablePage) put(h, key uint64, value uint32) bool {
	for i := home(h, len(p.slots)); ; i++ {
		if i == len(p.slots) {
			i = 0
		}
		s := &p.slots[i]
		if s[2] == 0 {
			*s = tableSlot{uint32(key), uint32(key >> 32), value}
			p.n++
			return true
		}
		if s.is(key) {
			s[2] = value
			return false
		}
	}
}

// del removes key, if it is there.
func (t *table) del(key uint64) {
	if t.n == 0 {
		return
	}
	h := t.hash(key)
	no := t.dir[h>>1>>(63-t.bits)]
	p := &t.pages[no]
	i := home(h, len(p.slots))
	for !p.slots[i].is(key) || p.slots[i][2] == 0 {
		if p.slots[i][2] == 0 {
			return
		}
		if i++; i == len(p.slots) {
			i = 0
		}
	}
	t.closeGap(p, i)
	p.n--
	t.n--
	if len(p.slots) > tablePageMin && int(p.n)*4 < len(p.slots) {
		t.resize(p, sizeBelow(len(p.slots)))
	}
	if t.n == 0 {
		*t = table{seed: t.seed, mul: t.mul}
	}
}

// closeGap empties slot i and moves back what its key had displaced.
func (t *table) closeGap(p *tablePage, i int) {
	n := len(p.slots)
	for j := i; ; {
		if j++; j == n {
			j = 0
		}
		s := p.slots[j]
		if s[2] == 0 {
			break
		}
		want := home(t.hash(s.key()), n)
		if between(i, want, j) {
			continue // it would stand before its home
		}
		p.slots[i] = s
		i = j
	}
	p.slots[i] = tableSlot{}
}

// between says whether want lies in (i, j], going round.
func between(i, want, j int) bool {
	if i < j {
		return i < want && want <= j
	}
	return i < want || want <= j
}

func (t *table) init() {
	if t.mul == 0 {
		t.seed, t.mul = rand.Uint64(), rand.Uint64()|1
	}
	t.dir = []uint32{0}
	t.pages = []tablePage{{slots: make([]tableSlot, tablePageMin)}}
	t.slots = tablePageMin
}

func sizeAbove(n int) int {
	for _, s := range tablePageSizes {
		if s > n {
			return s
		}
	}
	return n + n/4 // only past tableMaxBits
}

func sizeBelow(n int) int {
	below := tablePageMin
	for _, s := range tablePageSizes {
		if s < n {
			below = s
		}
	}
	return below
}

// grow makes room in page no: a larger page, or two of it.
func (t *table) grow(no uint32) {
	p := &t.pages[no]
	if len(p.slots) < tablePageSizes[len(tablePageSizes)-1] || p.depth == tableMaxBits {
		t.resize(p, sizeAbove(len(p.slots)))
		return
	}
	if p.depth == t.bits {
		t.doubleDir()
	}
	t.split(no)
}

func (t *table) resize(p *tablePage, size int) {
	old := p.slots
	t.slots += size - len(old)
	p.slots, p.n = make([]tableSlot, size), 0
	for i := range old {
		if s := &old[i]; s[2] != 0 {
			p.put(t.hash(s.key()), s.key(), s[2])
		}
	}
}

func (t *table) doubleDir() {
	dir := make([]uint32, 2*len(t.dir))
	for i, no := range t.dir {
		dir[2*i], dir[2*i+1] = no, no
	}
	t.dir = dir
	t.bits++
}

// split moves the keys whose next bit is set to a new page.
func (t *table) split(no uint32) {
	const half = 682 // of a full page's 840 keys, each takes about 420
	old := t.pages[no]
	depth := old.depth + 1
	pages := [2]tablePage{{depth: depth}, {depth: depth}}
	for i := range pages {
		pages[i].slots = make([]tableSlot, half)
	}
	t.slots += 2*half - len(old.slots)
	var first uint64
	for i := range old.slots {
		if s := &old.slots[i]; s[2] != 0 {
			h := t.hash(s.key())
			first = h
			t.putSplit(&pages[h>>(64-depth)&1], h, s)
		}
	}
	other := uint32(len(t.pages))
	t.pages[no] = pages[0]
	t.pages = append(t.pages, pages[1])
	// The old page's part of the directory: all entries with its upper bits.
	span := uint64(1) << (t.bits - old.depth)
	from := first >> 1 >> (63 - t.bits) &^ (span - 1)
	for i := from + span/2; i < from+span; i++ {
		t.dir[i] = other
	}
}

// putSplit grows the half when a split came out lopsided.
func (t *table) putSplit(p *tablePage, h uint64, s *tableSlot) {
	if int(p.n)+1 >= len(p.slots) {
		t.resize(p, sizeAbove(len(p.slots)))
	}
	p.put(h, s.key(), s[2])
}

// each calls f for every key until f returns false. The table must not change
// meanwhile.
func (t *table) each(f func(key uint64, value uint32) bool) {
	for i := range t.pages {
		for j := range t.pages[i].slots {
			if s := &t.pages[i].slots[j]; s[2] != 0 && !f(s.key(), s[2]) {
				return
			}
		}
	}
}

func (t *table) bytes() int64 {
	return int64(t.slots)*int64(unsafe.Sizeof(tableSlot{})) +
		int64(cap(t.pages))*int64(unsafe.Sizeof(tablePage{})) + int64(cap(t.dir))*4
}
