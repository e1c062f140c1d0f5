package index

import (
	"math/bits"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// What put does block by block goes for most stores in one step for all of a
// run: nothing is special of their blocks. The functions here say how many of
// the next blocks that is true of, and store those. They change nothing that put
// would not, and leave to it whatever needs a second look.

// stretch stores as many of the next blocks as it can at once and returns how
// many that were.
func (pl *placing) stretch(hashes []zmqwire.EngineHash, locals []normalize.LocalHash) int {
	if pl.cur == noRef || !pl.plain() {
		return 0
	}
	r := pl.m.t.run(pl.cur.run())
	if pl.cur.off()+1 < int(r.n) {
		return pl.again(r, hashes, locals)
	}
	return pl.grow(r, hashes, locals)
}

// plain says whether the stream has no part in what is rare: handles of its own,
// and so no rivals, blocks that wait for others, a plane whose blocks are not held
// by themselves.
func (pl *placing) plain() bool {
	m := pl.m
	if m.own.n > 0 || m.ownByHabit || m.orphans.len() > 0 || !m.inLine(pl.plane) {
		return false
	}
	for i := range pl.s.groups {
		if len(pl.s.groups[i].unplaced) > 0 {
			return false
		}
	}
	return true
}

// again stores blocks that stand right after cur under these very handles, and
// of which the stream has no copy. So what others hold costs no search.
func (pl *placing) again(r *run, hashes []zmqwire.EngineHash, locals []normalize.LocalHash) int {
	m, t := pl.m, pl.m.t
	from := pl.cur.off() + 1
	most := min(len(hashes), int(r.n)-from)
	stand := t.words.array(r.words+uint32(from), most)
	called := t.words.array(r.words+1<<r.class+uint32(from), most)
	n := 0
	for n < most && stand[n] == uint64(locals[n]) && called[n] == uint64(hashes[n]) && hashes[n] != 0 {
		n++
	}
	if n == 0 {
		return 0
	}
	en := t.join(m, pl.cur.run())
	if en.own {
		return 0
	}
	n = min(n, bits.TrailingZeros64(en.held>>from))
	pl.took(r, en, from, n)
	return n
}

// grow puts new blocks after cur, the last of a run that the stream alone has a
// part in.
func (pl *placing) grow(r *run, hashes []zmqwire.EngineHash, locals []normalize.LocalHash) int {
	m, t := pl.m, pl.m.t
	from := int(r.n)
	if from == runMax || r.nentries != 1 || r.forks&pl.cur.bit() != 0 {
		return 0
	}
	en := &t.all(r)[0]
	if en.slot != m.slot || en.own {
		return 0
	}
	most := min(len(hashes), runMax-from)
	if most > 1 {
		pl.touch(hashes)
	}
	if r.last == 0 {
		r.last = t.sequenceAt(pl.cur)
	}
	n := 0
	for n < most && hashes[n] != 0 && t.lookup(uint64(hashes[n])) == noRef {
		if from+n == 1<<r.class {
			t.resizeRun(r, classFor(min(runMax, max(from+most, 2*from))))
		}
		*t.words.at(r.words + uint32(from+n)) = uint64(locals[n])
		r.n++
		r.last = normalize.NextSequence(r.last, locals[n])
		n++
		t.share(pl.cur+ref(n), hashes[n-1])
	}
	t.nblocks += int64(n)
	pl.created = n > 0
	pl.took(r, en, from, n)
	return n
}

// took notes that the stream stored n blocks of r, from block from on.
func (pl *placing) took(r *run, en *entry, from, n int) {
	if n == 0 {
		return
	}
	m, t := pl.m, pl.m.t
	mask := lowBits(n) << from
	t.memberships += ones(mask &^ en.known)
	en.known |= mask
	t.setHeld(m, r, en, en.held|mask)
	r.stamp = t.tick
	pl.cur += ref(n)
	pl.a.Stored += n
	pl.s.inARow = 0
}
