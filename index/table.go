package index

import (
	"math/bits"
	"math/rand/v2"
	"unsafe"
)

// A table maps 64-bit keys to 32-bit values, never 0. It is an extendible hash
// of small open-addressed pages: growing costs one page, a few microseconds,
// at a time, so no batch ever waits for a table to be copied. 12 bytes a slot
// at 62 to 82 percent load. The hash is keyed, since handles come from peers.
//
// The zero table is empty and ready.
type table struct {
	seed, mul uint64
	dir       directory
	pages     []tablePage
	n         int
	slots     int // over all pages

	missed  tableMiss
	spare   [3][]tableSlot // an array of each of the three largest sizes, to be used again
	version uint32         // of what missed tells
}

// A directory of an extendible hash finds the page of a hash by its upper bits.
type directory struct {
	pages []uint32
	bits  uint8 // len(pages) == 1<<bits
}

func (d *directory) index(h uint64) uint64 { return h >> 1 >> (63 - d.bits) }

func (d *directory) page(h uint64) uint32 { return d.pages[d.index(h)] }

func (d *directory) double() {
	pages := make([]uint32, 2*len(d.pages))
	for i, no := range d.pages {
		pages[2*i], pages[2*i+1] = no, no
	}
	d.pages = pages
	d.bits++
}

// split gives page upper what page(h) was for so far, where bit depth of a hash,
// counted from 1, is set. The page shared the bits before.
func (d *directory) split(h uint64, depth uint8, upper uint32) {
	span := uint64(1) << (d.bits - (depth - 1))
	from := d.index(h) &^ (span - 1)
	for i := from + span/2; i < from+span; i++ {
		d.pages[i] = upper
	}
}

// tableMiss is where lookup did not find a key: put need not look again.
type tableMiss struct {
	key     uint64
	h       uint64
	page    uint32
	slot    int32
	version uint32
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

// The three largest sizes fill Go's allocation classes of 8, 10 and 12 KiB. A
// full page of the largest is split into two of the smallest of them. Their
// arrays are used again: taken from the heap each time, they made half of what
// a store cost.
var tablePageSizes = [...]int{tablePageMin, 16, 32, 64, 128, 256, 512, tableHalf, 853, tableFull}

const (
	tableHalf = 682
	tableFull = 1024
)

func (s *tableSlot) is(key uint64) bool {
	return s[0] == uint32(key) && s[1] == uint32(key>>32)
}

func (s *tableSlot) key() uint64 { return uint64(s[1])<<32 | uint64(s[0]) }

func (t *table) hash(key uint64) uint64 {
	hi, lo := bits.Mul64(key^t.seed, t.mul)
	h := (hi ^ lo) * 0x9e3779b97f4a7c15 // consecutive handles must not stand side by side
	return h ^ h>>32
}

func (t *table) page(h uint64) *tablePage {
	return &t.pages[t.dir.page(h)]
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

// touch loads the slot where key would stand. A batch touches all its keys
// first, so that their cache misses overlap; each costs about 100 ns alone in a
// table that is larger than the cache.
func (t *table) touch(key uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	h := t.hash(key)
	slots := t.page(h).slots
	return slots[home(h, len(slots))][2]
}

// lookup is get for the one who writes to the table: a put of the same key that
// follows at once does not search again.
func (t *table) lookup(key uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	h := t.hash(key)
	no := t.dir.page(h)
	slots := t.pages[no].slots
	for i := home(h, len(slots)); ; i++ {
		if i == len(slots) {
			i = 0
		}
		s := &slots[i]
		if s[2] == 0 {
			t.missed = tableMiss{key: key, h: h, page: no, slot: int32(i), version: t.version}
			return 0
		}
		if s.is(key) {
			return s[2]
		}
	}
}

// put sets the value of key.
func (t *table) put(key uint64, value uint32) {
	if t.dir.pages == nil {
		t.init()
	}
	if m := &t.missed; m.key == key && m.version == t.version && m.h != 0 {
		if p := &t.pages[m.page]; !p.full() {
			p.slots[m.slot] = tableSlot{uint32(key), uint32(key >> 32), value}
			p.n++
			t.n++
			t.version++
			return
		}
	}
	t.version++
	h := t.hash(key)
	p := t.page(h)
	for p.full() {
		t.grow(t.dir.page(h))
		p = t.page(h)
	}
	if p.put(h, key, value) {
		t.n++
	}
}

func (p *tablePage) full() bool { return int(p.n)*100 >= len(p.slots)*82 }

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
func (t *table) del(key uint64) { t.remove(key, 0) }

// delIf removes key if its value is this one.
func (t *table) delIf(key uint64, value uint32) { t.remove(key, value) }

// remove removes key, whatever its value where only is 0.
func (t *table) remove(key uint64, only uint32) {
	if t.n == 0 {
		return
	}
	h := t.hash(key)
	p := t.page(h)
	i := home(h, len(p.slots))
	for !p.slots[i].is(key) || p.slots[i][2] == 0 {
		if p.slots[i][2] == 0 {
			return
		}
		if i++; i == len(p.slots) {
			i = 0
		}
	}
	if only != 0 && p.slots[i][2] != only {
		return
	}
	t.version++
	t.closeGap(p, i)
	p.n--
	t.n--
	if len(p.slots) > tablePageMin && int(p.n)*4 < len(p.slots) {
		t.resize(p, sizeBelow(len(p.slots)))
	}
	if t.n == 0 {
		*t = table{seed: t.seed, mul: t.mul, version: t.version}
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
	t.dir.pages = []uint32{0}
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
	if len(p.slots) < tableFull || p.depth == tableMaxBits {
		t.resize(p, sizeAbove(len(p.slots)))
		return
	}
	if p.depth == t.dir.bits {
		t.dir.double()
	}
	t.split(no)
}

func (t *table) resize(p *tablePage, size int) {
	old := p.slots
	t.slots += size - len(old)
	p.slots, p.n = t.array(size), 0
	p.putAll(t, old)
	t.keep(old)
}

// putAll puts the slots of another page of the table. From the first gap on they
// come nearly in the order in which they will stand, so most go right to their
// home.
func (p *tablePage) putAll(t *table, old []tableSlot) {
	gap := 0
	for gap < len(old)-1 && old[gap][2] != 0 {
		gap++
	}
	end := -1 // nothing stands after it
	for i := range old {
		i += gap
		if i >= len(old) {
			i -= len(old)
		}
		s := &old[i]
		if s[2] == 0 {
			continue
		}
		h := t.hash(s.key())
		if at := home(h, len(p.slots)); at > end {
			p.slots[at], end = *s, at
			p.n++
			continue
		}
		p.put(h, s.key(), s[2])
		if end+1 < len(p.slots) && p.slots[end+1][2] != 0 {
			end++
		}
	}
}

// array returns empty slots, of a page that was replaced before if one is kept:
// a growing table takes and gives back the largest sizes in turns.
func (t *table) array(size int) []tableSlot {
	for i, s := range t.spare {
		if len(s) == size {
			t.spare[i] = nil
			clear(s)
			return s
		}
	}
	return make([]tableSlot, size)
}

func (t *table) keep(old []tableSlot) {
	for i, size := range tablePageSizes[len(tablePageSizes)-len(t.spare):] {
		if len(old) == size {
			t.spare[i] = old
		}
	}
}

// split moves the keys whose next bit is set to a new page.
func (t *table) split(no uint32) {
	old := t.pages[no]
	depth := old.depth + 1
	pages := [2]tablePage{{depth: depth}, {depth: depth}}
	for i := range pages {
		pages[i].slots = t.array(tableHalf) // 840 keys make about 420 each
	}
	t.slots += 2*tableHalf - len(old.slots)
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
	t.dir.split(first, depth, other)
	t.keep(old.slots)
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
	slots := t.slots
	for _, s := range t.spare {
		slots += len(s)
	}
	return int64(slots)*int64(unsafe.Sizeof(tableSlot{})) +
		int64(cap(t.pages))*int64(unsafe.Sizeof(tablePage{})) + int64(cap(t.dir.pages))*4
}
