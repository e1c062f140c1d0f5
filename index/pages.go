package index

import (
	"math/bits"
	"unsafe"
)

// A pageStore hands out the pages of slabs and tables. While there are few, each
// is an object of its own. From then on they come from chunks of 2 MiB that the
// kernel is asked to map as one page each: an index of gigabytes otherwise spends
// a third of its time on finding out where its memory is. Pages move together
// where much of the chunks is free, and a chunk without pages goes back to the
// heap, so memory follows what is held all the same.
//
// The zero pageStore is ready.
type pageStore[P any] struct {
	apart  bool // there are no chunks: what is held is to be small
	alone  int  // pages that are objects of their own; their number is 0
	chunks []chunk[P]
	used   int // pages in use, of the chunks'
	live   int // chunks with memory
	idle   int // of those, the ones none of whose pages is in use: one at most
	hint   int // before it, each chunk has memory and no free page
}

type chunk[P any] struct {
	pages  []P
	owners []uint32
	taken  []uint64 // one bit per page
	n      int      // pages in use
}

const chunkBytes = 2 << 20

func (s *pageStore[P]) perChunk() int {
	var p P
	return max(1, chunkBytes/int(unsafe.Sizeof(p)))
}

// get returns a page, whatever is in it, and the number to give it back by. The
// owner is told by that name if the page moves.
func (s *pageStore[P]) get(owner uint32) (*P, uint32) {
	if s.apart || s.live == 0 && s.alone < s.perChunk() {
		s.alone++
		return new(P), 0
	}
	return s.take(s.withRoom(), owner)
}

// take takes a free page of a chunk.
func (s *pageStore[P]) take(no int, owner uint32) (*P, uint32) {
	c := &s.chunks[no]
	w := 0
	for c.taken[w] == ^uint64(0) {
		w++
	}
	i := w*64 + bits.TrailingZeros64(^c.taken[w])
	c.taken[w] |= 1 << (i % 64)
	if c.n == 0 {
		s.idle--
	}
	c.n++
	s.used++
	c.owners[i] = owner
	return &c.pages[i], uint32(no*s.perChunk()+i) + 1
}

// withRoom returns the first chunk with a free page, made where there is none.
func (s *pageStore[P]) withRoom() int {
	gap := -1
	for no := s.hint; no < len(s.chunks); no++ {
		if c := &s.chunks[no]; c.pages == nil {
			if gap < 0 {
				gap = no
			}
		} else if c.n < len(c.pages) {
			if s.hint = no; gap >= 0 {
				s.hint = gap
			}
			return no
		}
	}
	n := s.perChunk()
	made := chunk[P]{pages: make([]P, n), owners: make([]uint32, n), taken: make([]uint64, (n+63)/64)}
	if n%64 != 0 { // bits past the last page are never free
		made.taken[len(made.taken)-1] = ^uint64(0) << (n % 64)
	}
	askForHugePage(unsafe.Pointer(&made.pages[0]))
	s.live++
	s.idle++
	if gap < 0 {
		gap = len(s.chunks)
		s.chunks = append(s.chunks, chunk[P]{})
	}
	s.chunks[gap] = made
	s.hint = gap
	return gap
}

// put takes a page back.
func (s *pageStore[P]) put(no uint32) {
	if no == 0 {
		s.alone--
		return
	}
	at, i := int(no-1)/s.perChunk(), int(no-1)%s.perChunk()
	c := &s.chunks[at]
	c.taken[i/64] &^= 1 << (i % 64)
	c.n--
	s.used--
	s.hint = min(s.hint, at)
	switch {
	case s.used == 0:
		s.chunks, s.live, s.idle, s.hint = nil, 0, 0, 0
	case c.n > 0:
	case s.idle == 0 && s.used > 4*s.perChunk():
		s.idle = 1 // it is kept, for what comes next
	default:
		*c = chunk[P]{}
		s.live--
	}
}

// roomy says whether so much of the chunks in use is free that pages are to move.
func (s *pageStore[P]) roomy() bool {
	return s.live > 0 && ((s.live-s.idle)*s.perChunk()-s.used > s.perChunk()+s.used/32 || s.fewLeft())
}

// fewLeft says whether the pages are so few that they are to stand alone.
func (s *pageStore[P]) fewLeft() bool { return s.alone+s.used <= s.perChunk()/4 }

// compact moves a few pages to where others are, if the store is roomy, and tells
// whose and where. Nobody may hold on to what is in a page meanwhile.
func (s *pageStore[P]) compact(moved func(owner uint32, page *P, no uint32)) {
	var p P
	for left := max(1, 1<<16/int(unsafe.Sizeof(p))); left > 0 && s.roomy(); left-- {
		last := len(s.chunks) - 1
		for s.chunks[last].n == 0 {
			last--
		}
		first := s.hint
		for s.chunks[first].n == 0 || s.chunks[first].n == s.perChunk() {
			first++
		}
		c := &s.chunks[last]
		w := 0
		for s.takenIn(c, w) == 0 {
			w++
		}
		i := w*64 + bits.TrailingZeros64(s.takenIn(c, w))
		to, no := new(P), uint32(0)
		if s.fewLeft() {
			s.alone++
		} else {
			to, no = s.take(first, c.owners[i])
		}
		*to = c.pages[i]
		moved(c.owners[i], to, no)
		s.put(uint32(last*s.perChunk()+i) + 1)
	}
}

// takenIn returns word w of a chunk's bits, without those past the last page.
func (s *pageStore[P]) takenIn(c *chunk[P], w int) uint64 {
	if n := len(c.pages) - w*64; n < 64 {
		return c.taken[w] & lowBits(n)
	}
	return c.taken[w]
}

// bytes is what the store keeps, free pages included.
func (s *pageStore[P]) bytes() int64 {
	var p P
	return int64(s.alone+s.live*s.perChunk())*int64(unsafe.Sizeof(p)) +
		int64(cap(s.chunks))*int64(unsafe.Sizeof(chunk[P]{}))
}
