package normalize

import (
	"math/bits"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// hashSet finds engine hashes that repeat within one event. It keeps its table
// from one event to the next and tells entries of this event by their round, so
// that nothing need be cleared. mix is random and odd, so that nobody can choose
// hashes that collide.
type hashSet struct {
	mix   uint64
	round uint32
	slots []hashSlot
}

type hashSlot struct {
	hash  zmqwire.EngineHash
	round uint32
}

// fewHashes is where comparing each with each stops being the cheaper way.
const fewHashes = 8

// maxHashSlots bounds the table that is kept: 1 MiB.
const maxHashSlots = 1 << 16

// repeats says whether one of hashes stands there twice.
func (s *hashSet) repeats(hashes []zmqwire.EngineHash) bool {
	if len(hashes) <= fewHashes {
		for i, h := range hashes {
			for _, o := range hashes[:i] {
				if h == o {
					return true
				}
			}
		}
		return false
	}
	slots := s.table(len(hashes))
	shift := 64 - bits.Len(uint(len(slots)-1))
	for _, h := range hashes {
		i := int(uint64(h) * s.mix >> shift)
		for slots[i].round == s.round {
			if slots[i].hash == h {
				return true
			}
			i = (i + 1) & (len(slots) - 1)
		}
		slots[i] = hashSlot{h, s.round}
	}
	return false
}

// table returns a table for n hashes, at most half full, in which no slot has
// the new round.
func (s *hashSet) table(n int) []hashSlot {
	if s.round++; s.round == 0 { // wrapped: old entries could pass for new
		s.slots, s.round = nil, 1
	}
	size := 1 << bits.Len(uint(2*n-1))
	if size > maxHashSlots {
		return make([]hashSlot, size)
	}
	if size > len(s.slots) {
		s.slots = make([]hashSlot, size)
	}
	return s.slots
}
