package index

import (
	"math/bits"
	"unsafe"
)

// A pageStore hands out the pages of slabs and tables. While there are few, each
// is an object of its own. From then on they come from chunks of 2 MiB that the
// kernel is asked to map as one page each: an index of gigabytes otherwise spends
// a third of its time on finding out where its memory is. A chunk whose last page
// is given back goes back to the heap.
//
// The zero pageStore is ready.
type pageStore[P any] struct {
	alone  int // pages that are objects of their own
	chunks []chunk[P]
	hint   int // no chunk before this one has a free page
	live   int // chunks with memory
	idle   int // of those, the ones none of whose pages is in use
}

type chunk[P any] struct {
	pages []P
	used  []uint64 // one bit per page
	n     int      // pages in use
}

const chunkBytes = 2 << 20

func (s *pageStore[P]) perChunk() int {
	var p P
	return max(1, chunkBytes/int(unsafe.Sizeof(p)))
}

// get returns a page, whatever is in it, and the number to give it back by.
func (s *pageStore[P]) get() (*P, uint32) {
	if s.live == 0 && s.alone < s.perChunk() {
		s.alone++
		return new(P), 0
	}
	no := s.withRoom()
	s.hint = no
	c := &s.chunks[no]
	w := 0
	for c.used[w] == ^uint64(0) {
		w++
	}
	bit := bits.TrailingZeros64(^c.used[w])
	c.used[w] |= 1 << bit
	if c.n == 0 {
		s.idle--
	}
	c.n++
	i := w*64 + bit
	return &c.pages[i], uint32(no*s.perChunk()+i) + 1
}

// withRoom returns the first chunk with a free page, made where there is none.
func (s *pageStore[P]) withRoom() int {
	gap := -1
	for no := s.hint; no < len(s.chunks); no++ {
		if c := &s.chunks[no]; c.pages == nil {
			gap = no
		} else if c.n < len(c.pages) {
			return no
		}
	}
	n := s.perChunk()
	made := chunk[P]{pages: make([]P, n), used: make([]uint64, (n+63)/64)}
	if n%64 != 0 { // bits past the last page are never free
		made.used[len(made.used)-1] = ^uint64(0) << (n % 64)
	}
	askForHugePage(unsafe.Pointer(&made.pages[0]))
	s.live++
	s.idle++
	if gap < 0 {
		gap = len(s.chunks)
		s.chunks = append(s.chunks, chunk[P]{})
	}
	s.chunks[gap] = made
	return gap
}

// put takes a page back.
func (s *pageStore[P]) put(no uint32) {
	if no == 0 {
		s.alone--
		return
	}
	no--
	at, i := int(no)/s.perChunk(), int(no)%s.perChunk()
	c := &s.chunks[at]
	c.used[i/64] &^= 1 << (i % 64)
	c.n--
	s.hint = min(s.hint, at)
	if c.n > 0 {
		return
	}
	if s.idle++; s.idle > 1 { // one is kept, for what comes next
		*c = chunk[P]{}
		s.idle--
		s.live--
	}
}

// bytes is what the store keeps, free pages included.
func (s *pageStore[P]) bytes() int64 {
	var p P
	size := int64(unsafe.Sizeof(p))
	return int64(s.alone)*size + int64(s.live*s.perChunk())*size +
		int64(cap(s.chunks))*int64(unsafe.Sizeof(chunk[P]{}))
}
