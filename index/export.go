package index

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"sync"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// An Export writes what a set holds as chunks, one stream at a time: Take, then
// Chunks, for each. It belongs to one goroutine; several exports of a set may
// run at once. What two streams share is written once.
//
// It keeps some 24 bytes for each run of the set, and the encoded form of the
// largest stream: up to 32 bytes for each of its blocks.
type Export struct {
	set   *Set
	trees []*exportedTree
	nruns uint32 // numbered so far

	streams int
	taken   takenStream
	heads   []byte // records of trees and runs that are not handed out yet
	cuts    []int  // where heads may end a chunk
	stack   []want
	chunk   []byte
	spare   takenMember // memory of the last stream, used again
}

// exportedTree remembers which runs of a tree stand in the export already. The
// tree tells it of runs that are cut, under the Set's lock; the export writes
// to it with that lock held for reading.
type exportedTree struct {
	t      *tree
	number uint32
	tick   uint32        // of t when the export began with it
	runs   []exportedRun // by run
}

type exportedRun struct {
	number  uint32 // + 1; 0: not exported
	n       uint8  // blocks of the run that are those in the export
	total   uint8  // blocks that the export has of it
	handles uint64 // blocks whose shared handle it has
}

// cut notes that the run keeps only n blocks.
func (e *exportedTree) cut(id uint32, n int) {
	if int(id) < len(e.runs) {
		r := &e.runs[id]
		if n == 0 {
			*r = exportedRun{}
		} else if int(r.n) > n {
			r.n = uint8(n)
			r.handles &= lowBits(n)
		}
	}
}

func (e *exportedTree) at(id uint32) *exportedRun {
	if int(id) >= len(e.runs) {
		e.runs = append(e.runs, make([]exportedRun, int(id)+1-len(e.runs)+len(e.runs)/4)...)
	}
	return &e.runs[id]
}

// Taken says what Take found.
type Taken struct {
	// Memberships are the blocks that the stream knows.
	Memberships int
	// Orphans are blocks that wait for their parents. They are left out.
	Orphans int
}

// Export begins to export the set. The caller must Close it.
func (x *Set) Export() *Export { return &Export{set: x} }

// Close ends the export.
func (e *Export) Close() {
	e.set.mu.Lock()
	defer e.set.mu.Unlock()
	for _, et := range e.trees {
		et.t.exports = slices.DeleteFunc(et.t.exports, func(o *exportedTree) bool { return o == et })
	}
	e.trees = nil
}

// takenStream is a copy of what a stream holds, before it is encoded.
type takenStream struct {
	begin   []byte
	members []takenMember
	tail    []tailRecord
	Taken
}

type takenMember struct {
	head    []byte
	entries []takenEntry
	planes  []planeMask
	own     []ownHandle
	rivals  map[ref]zmqwire.EngineHash // the newest handle
}

type takenEntry struct {
	run    uint32 // in the tree
	number uint32 // in the export
	known  uint64
	own    bool
	simple bool
	planes [2]uint32 // from, to in takenMember.planes
}

type ownHandle struct {
	engine uint64
	block  ref
}

// tailRecord is about a single block.
type tailRecord struct {
	kind   uint8
	member int
	block  ref // unused by unplaced
	body   []byte
}

// turnCost bounds how long an export or import keeps the Set's lock. A unit is
// 2 to 3 ns on two shared cores, so that a turn takes 75 µs there; the longest
// seen in an export, with page faults in it, took 0.45 ms. Tests make it shorter.
var turnCost = 30_000

// turn is a share of the set's lock that is given back now and then.
type turn struct {
	lock sync.Locker
	left int
}

func takeTurn(l sync.Locker) *turn {
	l.Lock()
	return &turn{l, turnCost}
}

// spend lets others in where the turn is over.
func (u *turn) spend(cost int) (yielded bool) {
	if u.left -= cost; u.left > 0 {
		return false
	}
	u.lock.Unlock()
	u.lock.Lock()
	u.left = turnCost
	return true
}

func (u *turn) end() { u.lock.Unlock() }

// Prepare makes room for what s holds, so that Take, for which the stream's
// writer waits, does not have to. It may be left out.
func (e *Export) Prepare(s *Stream) {
	e.set.mu.RLock()
	blocks, runs, own := 0, 0, 0
	for _, m := range s.members {
		blocks, runs, own = blocks+int(slices.Max(m.residents[:])), runs+len(m.runs), own+m.own.n
	}
	e.set.mu.RUnlock()
	const words, record = 2 * 8, 32 // a block's, and what else a run takes
	e.heads = slices.Grow(e.heads, blocks*words+runs*record)
	e.spare.entries = slices.Grow(e.spare.entries[:0], runs)
	e.spare.own = slices.Grow(e.spare.own[:0], own)
}

// Take copies what s holds. Nothing may write to s meanwhile; other streams and
// queries go on, and wait for at most some 100 µs. False: s is closed.
func (e *Export) Take(s *Stream) (Taken, bool) {
	e.taken = takenStream{}
	if !e.register(s) {
		return Taken{}, false
	}
	u := takeTurn(e.set.mu.RLocker())
	defer u.end()
	e.taken.begin = s.appendBegin(nil)
	for i := range s.groups {
		e.takeUnplaced(u, i, &s.groups[i])
	}
	for i, m := range s.members {
		e.takeMember(u, i, m)
	}
	return e.taken.Taken, true
}

// register makes the stream's trees tell of what they cut.
func (e *Export) register(s *Stream) bool {
	e.set.mu.RLock()
	closed := s.closed || s.set != e.set
	sizes := make([]int, len(s.members)) // of tables, made before the lock is taken
	for i, m := range s.members {
		sizes[i] = len(m.t.runs.mem) << slabBits
	}
	e.set.mu.RUnlock()
	if closed {
		return false
	}
	for i, m := range s.members {
		if e.find(m.t) != nil {
			continue
		}
		et := &exportedTree{t: m.t, number: uint32(len(e.trees)), runs: make([]exportedRun, sizes[i])}
		e.trees = append(e.trees, et)
		e.set.mu.Lock()
		m.t.exports = append(m.t.exports, et)
		et.tick = m.t.tick
		e.set.mu.Unlock()
		e.heads = append(e.heads, recTree)
		e.heads = appendShape(e.heads, m.t.shape)
		e.heads = binary.AppendUvarint(e.heads, uint64(et.tick))
	}
	return true
}

func (e *Export) find(t *tree) *exportedTree {
	for _, et := range e.trees {
		if et.t == t {
			return et
		}
	}
	return nil
}

func (s *Stream) appendBegin(dst []byte) []byte {
	var flags byte
	shape := s.shape.Load()
	if s.other {
		flags |= beginOther
	}
	if shape != nil {
		flags |= beginShape
	}
	if s.config.EagleDrop {
		flags |= beginDrop
	}
	dst = append(dst, recBegin, flags)
	if shape != nil {
		dst = appendShape(dst, *shape)
	}
	dst = binary.AppendUvarint(dst, uint64(min(s.inARow, restartConflicts)))
	dst = binary.AppendUvarint(dst, uint64(len(s.groups)))
	for i := range s.groups {
		g := &s.groups[i]
		dst = binary.AppendVarint(dst, int64(g.index))
		dst = append(dst, byte(g.spec))
		dst = binary.AppendUvarint(dst, uint64(g.window))
		dst = binary.AppendUvarint(dst, uint64(len(g.shapes)))
		for _, shape := range g.shapes {
			dst = appendShape(dst, shape)
		}
	}
	return dst
}

func (e *Export) takeUnplaced(u *turn, group int, g *group) {
	for key, n := range g.unplaced {
		body := binary.AppendUvarint(nil, uint64(group))
		body = append(body, byte(key.tier))
		body = binary.LittleEndian.AppendUint64(body, uint64(key.engine))
		e.taken.tail = append(e.taken.tail, tailRecord{kind: recUnplaced, body: binary.AppendUvarint(body, uint64(n))})
		u.spend(200)
	}
}

func (e *Export) takeMember(u *turn, i int, m *member) {
	et := e.find(m.t)
	e.taken.members = append(e.taken.members, takenMember{head: m.appendHead(nil, et.number)})
	tm := &e.taken.members[i]
	tm.entries = slices.Grow(e.spare.entries[:0], len(m.runs))
	tm.own = slices.Grow(e.spare.own[:0], m.own.n)
	e.spare = takenMember{}
	for k := 0; k < len(m.runs); { // it may shrink where the turn is over
		if e.takeEntry(u, et, m, m.runs[k], tm) {
			k++
		}
	}
	for k := 0; k < len(m.own.pages); k++ {
		for j := range m.own.pages[k].slots {
			if slot := &m.own.pages[k].slots[j]; slot[2] != 0 {
				tm.own = append(tm.own, ownHandle{slot.key(), ref(slot[2])})
			}
		}
		u.spend(2 * len(m.own.pages[k].slots))
	}
	e.taken.Orphans += m.orphans.len()
	e.takeTail(u, i, m, tm)
}

func (m *member) appendHead(dst []byte, tree uint32) []byte {
	dst = append(dst, recMember)
	dst = binary.AppendUvarint(dst, uint64(tree))
	dst = append(dst, boolByte(m.ownByHabit), byte(len(m.planes)))
	for _, p := range m.planes {
		dst = append(dst, byte(p.tier), boolByte(p.full))
		dst = binary.AppendVarint(dst, int64(p.group))
	}
	return dst
}

func boolByte(v bool) byte {
	if v {
		return 1
	}
	return 0
}

// takeEntry copies the member's entry in a run; false where the turn was over
// before the run and those above it were in the export.
func (e *Export) takeEntry(u *turn, et *exportedTree, m *member, id uint32, tm *takenMember) bool {
	r := et.t.run(id)
	en := et.t.entry(m, r)
	if en == nil { // it went while others had their turn
		return true
	}
	need := want{id: id, n: bits.Len64(en.known)}
	if !en.own {
		need.handles = en.known
	}
	if need.n == 0 || !e.provide(u, et, need) {
		return need.n == 0
	}
	t := takenEntry{run: id, number: et.at(id).number - 1, known: en.known, own: en.own}
	t.planes[0] = uint32(len(tm.planes))
	for p := range m.planes {
		if mask := m.planeBits(en, uint8(p)); mask != 0 {
			tm.planes = append(tm.planes, planeMask{plane: uint8(p), mask: mask})
		}
	}
	t.planes[1] = uint32(len(tm.planes))
	if t.planes[1] == t.planes[0]+1 && tm.planes[t.planes[0]] == (planeMask{mask: en.known}) {
		t.simple, tm.planes, t.planes[1] = true, tm.planes[:t.planes[0]], t.planes[0]
	}
	tm.entries = append(tm.entries, t)
	e.taken.Memberships += bits.OnesCount64(en.known)
	u.spend(100)
	return true
}

// want is what the export must have of a run: its first n blocks, and some
// shared handles.
type want struct {
	id      uint32
	n       int
	handles uint64
}

// provide writes the run, and those above it before. False: the turn was over
// in between; ask again.
func (e *Export) provide(u *turn, et *exportedTree, w want) bool {
	e.stack = append(e.stack[:0], w)
	for len(e.stack) > 0 {
		w := e.stack[len(e.stack)-1]
		r := et.t.run(w.id)
		have := et.at(w.id)
		if have.number != 0 && int(have.n) >= w.n && w.handles&^have.handles == 0 {
			e.stack = e.stack[:len(e.stack)-1]
			continue
		}
		if p := r.parent; have.number == 0 && p != noRef {
			if at := et.at(p.run()); at.number == 0 || int(at.n) <= p.off() {
				e.stack = append(e.stack, want{id: p.run(), n: p.off() + 1})
				continue
			}
		}
		e.write(et, r, et.at(w.id), w)
		if len(e.heads)-e.lastCut() >= chunkTarget {
			e.cuts = append(e.cuts, len(e.heads))
		}
		if u.spend(200 + 3*int(r.n)) {
			return false
		}
	}
	return true
}

func (e *Export) lastCut() int {
	if len(e.cuts) == 0 {
		return 0
	}
	return e.cuts[len(e.cuts)-1]
}

// write appends a record of the run, or one of what the export lacks of it.
func (e *Export) write(et *exportedTree, r *run, have *exportedRun, w want) {
	t := et.t
	if have.number != 0 && (have.n == have.total || int(have.n) >= w.n) {
		e.writeMore(t, r, have, w)
		return
	}
	*have = exportedRun{number: e.nruns + 1, n: r.n, total: r.n, handles: w.handles}
	var flags byte
	if r.parent != noRef {
		flags |= runChild
	} else if r.salt != 0 {
		flags |= runSalted
	}
	if w.handles != 0 {
		flags |= runHandles
	}
	dst := append(e.heads, recRun, flags)
	if r.parent != noRef {
		dst = binary.AppendUvarint(dst, uint64(e.nruns-(et.at(r.parent.run()).number-1)))
		dst = append(dst, byte(r.parent.off()))
	} else {
		dst = binary.AppendUvarint(dst, uint64(et.number))
		if r.salt != 0 {
			dst = binary.LittleEndian.AppendUint64(dst, uint64(r.salt))
		}
	}
	dst = binary.AppendUvarint(dst, uint64(et.tick-min(et.tick, r.stamp)))
	dst = append(dst, r.n)
	dst = appendWords(dst, t.locals(r))
	if w.handles != 0 {
		dst = binary.LittleEndian.AppendUint64(dst, w.handles)
		dst = t.appendHandles(dst, r, w.handles)
	}
	e.heads = dst
	e.nruns++
}

// writeMore appends the blocks and handles that have come to a run since.
func (e *Export) writeMore(t *tree, r *run, have *exportedRun, w want) {
	more := 0
	if w.n > int(have.n) { // then have.n is have.total
		more = int(r.n) - int(have.n)
	}
	handles := w.handles &^ have.handles
	dst := append(e.heads, recMore)
	dst = binary.AppendUvarint(dst, uint64(e.nruns-(have.number-1)))
	dst = append(dst, byte(more))
	dst = appendWords(dst, t.locals(r)[int(r.n)-more:])
	dst = binary.LittleEndian.AppendUint64(dst, handles)
	e.heads = t.appendHandles(dst, r, handles)
	have.n += uint8(more)
	have.total += uint8(more)
	have.handles |= handles
}

func (t *tree) appendHandles(dst []byte, r *run, mask uint64) []byte {
	if mask == lowBits(int(r.n)) {
		return appendWords(dst, t.words.array(r.words+1<<r.class, int(r.n)))
	}
	for ; mask != 0; mask &= mask - 1 {
		dst = binary.LittleEndian.AppendUint64(dst, *t.engine(r, bits.TrailingZeros64(mask)))
	}
	return dst
}

// takeTail copies what is rare.
func (e *Export) takeTail(u *turn, i int, m *member, tm *takenMember) {
	add := func(kind uint8, b ref, body []byte) {
		e.taken.tail = append(e.taken.tail, tailRecord{kind, i, b, body})
		u.spend(200)
	}
	for key, n := range m.extra {
		add(recCopies, key.block, binary.AppendUvarint([]byte{key.plane}, uint64(n)))
	}
	for b, rv := range m.rivals {
		if tm.rivals == nil {
			tm.rivals = make(map[ref]zmqwire.EngineHash)
		}
		tm.rivals[b] = rv.newest
		add(recRival, b, rv.append(nil))
	}
	for k := range m.dormant {
		d := m.dormant[k]
		if m.asleep(d) {
			body := binary.LittleEndian.AppendUint64(nil, uint64(d.engine))
			add(recDormant, d.block, binary.AppendUvarint(body, d.seq))
		}
	}
	for b := range m.doomed {
		add(recDoomed, b, nil)
	}
}

// asleep says whether a dormant block is known and nowhere resident still.
func (m *member) asleep(d dormantBlock) bool {
	if !m.t.stands(d.block) {
		return false
	}
	en := m.t.entry(m, m.t.run(d.block.run()))
	return en != nil && en.known&d.block.bit() != 0 && !m.residentIn(en, d.block)
}

func (rv *rivalry) append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, uint64(rv.newest))
	dst = binary.AppendUvarint(dst, uint64(len(rv.former)))
	for i := range rv.former {
		f := &rv.former[i]
		dst = append(dst, boolByte(f.unnamed))
		dst = binary.LittleEndian.AppendUint64(dst, uint64(f.engine))
		dst = append(dst, byte(len(f.copies)))
		for p, n := range f.copies {
			dst = append(dst, p)
			dst = binary.AppendUvarint(dst, uint64(n))
		}
	}
	return dst
}
