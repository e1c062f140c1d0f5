package index

import (
	"math/bits"
	"unsafe"
)

// A slab hands out arrays of T, each of 1<<class items, from pages of one class
// each. Its references are 32-bit numbers, so what is kept in slabs has no
// pointers and costs the collector nothing. A page whose last array is freed
// is given back, which is how memory follows what is held.
//
// Reference 0 is never handed out and stands for none.
type slab[T any] struct {
	mem   []*[slabItems]T
	pages []slabPage
	room  [slabClasses]uint32 // first page with room, by class; 0: none
	spare []uint32            // page numbers without memory
	store pageStore[[slabItems]T]
}

const (
	slabBits    = 10
	slabItems   = 1 << slabBits
	slabClasses = slabBits + 1
)

type slabPage struct {
	used       [slabItems / 64]uint64 // one bit per array
	n          uint16                 // arrays in use
	hint       uint8                  // no word of used before this one has room
	class      uint8
	next, prev uint32 // the list of pages with room
	stored     uint32 // its number in the store
}

func (p *slabPage) arrays() int { return slabItems >> p.class }

// at returns the first item of the array at ref.
func (s *slab[T]) at(ref uint32) *T {
	return &s.mem[ref>>slabBits][ref&(slabItems-1)]
}

// array returns the n first items of the array at ref.
func (s *slab[T]) array(ref uint32, n int) []T {
	if n == 0 {
		return nil
	}
	o := int(ref & (slabItems - 1))
	return s.mem[ref>>slabBits][o : o+n]
}

// alloc returns a zeroed array of 1<<class items.
func (s *slab[T]) alloc(class uint8) uint32 {
	no := s.room[class]
	if no == 0 {
		no = s.addPage(class)
	}
	p := &s.pages[no]
	w := int(p.hint)
	for p.used[w] == ^uint64(0) {
		w++
	}
	bit := bits.TrailingZeros64(^p.used[w])
	p.used[w] |= 1 << bit
	p.hint = uint8(w)
	p.n++
	if int(p.n) == p.arrays() {
		s.unlist(no)
	}
	ref := no<<slabBits | uint32(w*64+bit)<<class
	clear(s.array(ref, 1<<class))
	return ref
}

// free takes the array at ref back. The page knows its class.
func (s *slab[T]) free(ref uint32) {
	no := ref >> slabBits
	p := &s.pages[no]
	i := ref & (slabItems - 1) >> p.class
	p.used[i/64] &^= 1 << (i % 64)
	p.hint = min(p.hint, uint8(i/64))
	full := int(p.n) == p.arrays()
	p.n--
	if full {
		s.list(no)
	}
	if p.n == 0 && (p.next != 0 || p.prev != 0) { // not the only page with room
		s.unlist(no)
		s.store.put(p.stored)
		s.mem[no] = nil
		s.spare = append(s.spare, no)
	}
}

func (s *slab[T]) addPage(class uint8) uint32 {
	var no uint32
	if k := len(s.spare); k > 0 {
		no, s.spare = s.spare[k-1], s.spare[:k-1]
	} else {
		if len(s.mem) == 0 { // page 0 stays empty: reference 0 is none
			s.mem, s.pages = append(s.mem, nil), append(s.pages, slabPage{})
		}
		no = uint32(len(s.mem))
		s.mem, s.pages = append(s.mem, nil), append(s.pages, slabPage{})
	}
	p := &s.pages[no]
	*p = slabPage{class: class}
	s.mem[no], p.stored = s.store.get(no)
	if n := p.arrays(); n < 64 { // bits past the last array are never free
		p.used[0] = ^uint64(0) << n
	}
	s.list(no)
	return no
}

func (s *slab[T]) list(no uint32) {
	p := &s.pages[no]
	p.prev, p.next = 0, s.room[p.class]
	if p.next != 0 {
		s.pages[p.next].prev = no
	}
	s.room[p.class] = no
}

func (s *slab[T]) unlist(no uint32) {
	p := &s.pages[no]
	if p.prev != 0 {
		s.pages[p.prev].next = p.next
	} else {
		s.room[p.class] = p.next
	}
	if p.next != 0 {
		s.pages[p.next].prev = p.prev
	}
	p.prev, p.next = 0, 0
}

// compact moves a few pages where many are free. What at and array returned
// before is not to be used any more.
func (s *slab[T]) compact() {
	if !s.store.roomy() {
		return
	}
	s.store.compact(func(no uint32, page *[slabItems]T, stored uint32) {
		s.mem[no], s.pages[no].stored = page, stored
	})
}

// class returns that of the array at ref.
func (s *slab[T]) class(ref uint32) uint8 { return s.pages[ref>>slabBits].class }

// bytes is what the slab keeps, free arrays included.
func (s *slab[T]) bytes() int64 {
	return s.store.bytes() + int64(cap(s.pages))*int64(unsafe.Sizeof(slabPage{})) + int64(cap(s.mem))*8
}

// classFor returns the smallest class whose arrays have n items.
func classFor(n int) uint8 {
	if n <= 1 {
		return 0
	}
	return uint8(bits.Len(uint(n - 1)))
}
