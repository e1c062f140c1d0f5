package index

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// A member is one stream's part in one tree, from its first block there to the
// next clear. A clear gives the stream a new member at once and sweeps the old
// one's entries out afterwards, a few runs at a time: nobody asks for its slot
// any more. Guarded by the Set's lock.
type member struct {
	owner *Set
	t     *tree
	slot  uint32
	runs  []uint32 // the runs with an entry of this member; entry.pos points back

	// own has the handles of the entries that are own: where the stream's
	// engine hashes differ from what tree.handles has. ownByHabit: they did
	// once, so new entries begin that way. shared counts the entries that are not.
	own        table
	ownByHabit bool
	shared     int

	// hot is the entry last used, in run hotRun: consecutive blocks mostly
	// share it. Valid within one batch, until an entry of the member comes or
	// goes.
	hot    *entry
	hotRun uint32

	// recent are the last blocks of stores, by their handles: most stores go on
	// after one. What it tells is checked, so it need not be true.
	recent [recentBlocks]ref

	// lookedUp is the block last found by its handle alone. An engine evicts a
	// chain from its end, so the next is mostly the one before it: inOrder.
	lookedUp ref
	inOrder  bool

	planes  []plane
	tiers   [normalize.NoTier]tierPlanes
	primary uint8 // the plane that entry.held is, while it is the only full one on the device

	extra   map[copyKey]uint32 // copies beyond the first
	rivals  map[ref]*rivalry
	doomed  map[ref]struct{} // blocks to forget once own is swept of their handles
	orphans *orphanage

	// dormant are blocks that were held and are no longer, oldest first: their
	// handles are kept a while, for children that name them.
	dormant []dormantBlock

	residents [normalize.NoTier]int64 // blocks held, by tier
	seq       uint64                  // the batch under way
	trims     *atomic.Int64           // the stream's count of trimmed blocks
}

// A plane is one cache group on one tier: each block is resident or not in
// each plane of its stream.
type plane struct {
	tier  normalize.Tier
	group int32
	full  bool
}

// tierPlanes are the full-attention planes of a tier, one bit each: a block is
// held on the tier where all of them have it.
type tierPlanes uint64

const maxPlanes = 64

type copyKey struct {
	block ref
	plane uint8
}

type dormantBlock struct {
	block  ref
	engine zmqwire.EngineHash
	seq    uint64 // the batch that removed it
}

// dormantMax bounds how many handles of blocks that are gone a stream keeps in
// one tree. vLLM names a parent that is gone only within a few batches.
const (
	dormantMax  = 1024
	dormantStep = 256 // forgotten at once, when there are so many
)

func (m *member) bytes() int64 {
	n := int64(cap(m.runs))*4 + m.own.bytes() + int64(cap(m.dormant))*int64(unsafe.Sizeof(dormantBlock{})) +
		int64(len(m.extra))*24 + int64(len(m.rivals))*128 + int64(unsafe.Sizeof(*m))
	if m.orphans != nil {
		n += m.orphans.bytes
	}
	return n
}

// resolve returns the block that the stream means by e, noRef if it never
// announced it or it was forgotten; and what tree.handles says of e.
func (m *member) resolve(e zmqwire.EngineHash) (block, shared ref) {
	if b := ref(m.own.lookup(uint64(e))); b != noRef && m.entry(b.run()) != nil { // else the run was trimmed
		return b, noRef
	}
	if m.allOwn() {
		return noRef, noRef
	}
	shared = m.t.lookup(uint64(e))
	if shared == noRef {
		return noRef, noRef
	}
	if en := m.entry(shared.run()); en != nil && !en.own && en.known&shared.bit() != 0 {
		return shared, shared
	}
	return noRef, shared
}

// recentBlocks is how many chains of a stream grow in turns without a search
// for their parents.
const recentBlocks = 256

func recentOf(e zmqwire.EngineHash) uint8 { return uint8(e ^ e>>32) }

// parent is resolve for the block that a store goes on after.
func (m *member) parent(e zmqwire.EngineHash) ref {
	if b := m.recent[recentOf(e)]; b != noRef && m.own.n == 0 && m.knows(b, e) {
		return b
	}
	b, _ := m.resolve(e)
	return b
}

// lookUp is resolve for a handle that comes without its place, as in removals:
// it tries the block before the last one first, which costs no cache miss.
func (m *member) lookUp(e zmqwire.EngineHash) ref {
	if b := m.lookedUp; b != noRef && m.own.n == 0 && m.t.stands(b) {
		if before := m.t.parentOf(b); before != noRef && m.knows(before, e) {
			m.lookedUp, m.inOrder = before, true
			return before
		}
	}
	m.inOrder = false
	b, _ := m.resolve(e)
	m.lookedUp = b
	return b
}

// knows says whether e is the shared handle of block b and the stream announced
// it. The block need not stand any more.
func (m *member) knows(b ref, e zmqwire.EngineHash) bool {
	if !m.t.stands(b) || !m.t.shares(m.t.run(b.run()), b, e) {
		return false
	}
	en := m.entry(b.run())
	return en != nil && !en.own && en.known&b.bit() != 0
}

// entry returns the member's entry in run id, nil if it has none.
func (m *member) entry(id uint32) *entry {
	if id == m.hotRun {
		return m.hot
	}
	en := m.t.entry(m, m.t.run(id))
	if en != nil {
		m.hot, m.hotRun = en, id
	}
	return en
}

// cool forgets the hot entry.
func (m *member) cool() { m.hot, m.hotRun = nil, 0 }

// calls says whether e is the stream's handle of a block that it knows.
func (m *member) calls(en *entry, b ref, e zmqwire.EngineHash) bool {
	if en.own {
		return m.own.get(uint64(e)) == uint32(b)
	}
	return *m.t.handle(b) == uint64(e)
}

// touch loads what e leads to, see table.touch.
func (m *member) touch(e zmqwire.EngineHash) uint32 {
	own := m.own.touch(uint64(e))
	if m.allOwn() {
		return own
	}
	return own + m.t.touch(uint64(e))
}

// bind makes e the stream's handle of block b, which the stream did not know.
// shared is what tree.handles says of e.
func (m *member) bind(en *entry, b ref, e zmqwire.EngineHash, shared ref) {
	if !en.own {
		if shared == b {
			return
		}
		if shared == noRef && e != 0 && !m.t.bound(b) {
			m.t.share(b, e)
			return
		}
		m.disown(en, b.run())
		m.ownByHabit = m.ownByHabit || e != 0
	}
	m.own.put(uint64(e), uint32(b))
}

// disown moves the entry's handles from the tree's table to the member's own.
func (m *member) disown(en *entry, id uint32) {
	r := m.t.run(id)
	for left := en.known; left != 0; left &= left - 1 {
		off := bits.TrailingZeros64(left)
		m.own.put(*m.t.engine(r, off), uint32(makeRef(id, off)))
	}
	m.owns(en)
}

// owns makes the entry's handles the member's own.
func (m *member) owns(en *entry) {
	if !en.own {
		en.own = true
		m.shared--
	}
}

// allOwn says whether nothing that tree.handles has is a handle of the member,
// nor will be.
func (m *member) allOwn() bool { return m.ownByHabit && m.shared == 0 }

// learn notes that the stream announced block b as e. created: nobody knew the
// block before.
func (m *member) learn(en *entry, b ref, e zmqwire.EngineHash, shared ref, created bool) {
	if created && !en.own && shared == noRef && e != 0 {
		m.t.share(b, e)
	} else {
		m.bind(en, b, e, shared)
	}
	en.known |= b.bit()
	m.t.memberships++
}

// forget undoes learn for a block that is in no plane.
func (m *member) forget(b ref, e zmqwire.EngineHash) {
	if m.rivals != nil && !m.forgetRivals(b) {
		m.doom(b)
		return
	}
	m.dropOwn(b, e)
	m.unlearn(b.run(), b.bit())
}

// unlearn takes away the last trace in the member of some blocks of a run, which
// it knows: their own handles are gone already.
func (m *member) unlearn(id uint32, blocks uint64) {
	if blocks == 0 {
		return
	}
	en := m.entry(id)
	en.known &^= blocks
	m.t.memberships -= ones(blocks)
	tail := blocks>>(m.t.run(id).n-1) != 0
	if en.known == 0 {
		m.t.leave(m, id)
	}
	if tail {
		m.t.reap(id)
	}
}

// doomedMax is how many doomed blocks are worth a walk over the own handles.
const doomedMax = 256

// doom keeps a block that is in no plane until the handles that nobody named
// are found: own can only be searched by handle.
func (m *member) doom(b ref) {
	if m.doomed == nil {
		m.doomed = make(map[ref]struct{})
	}
	m.doomed[b] = struct{}{}
	if len(m.doomed) >= doomedMax {
		m.sweepDoomed()
	}
}

// sweepDoomed forgets the doomed blocks that were not stored again.
func (m *member) sweepDoomed() {
	doomed := m.doomed
	m.doomed = nil
	for b := range doomed {
		if m.residentIn(m.entry(b.run()), b) {
			delete(doomed, b)
		}
	}
	var handles []uint64
	m.own.each(func(e uint64, b uint32) bool {
		if _, ok := doomed[ref(b)]; ok {
			handles = append(handles, e)
		}
		return true
	})
	for _, e := range handles {
		m.own.del(e)
	}
	for b := range doomed {
		delete(m.rivals, b)
		m.unlearn(b.run(), b.bit())
	}
}

// dropRun takes place pos out of m.runs; the last run takes its place.
func (m *member) dropRun(t *tree, pos uint32) {
	last := len(m.runs) - 1
	if moved := m.runs[last]; int(pos) != last {
		m.runs[pos] = moved
		t.entry(m, t.run(moved)).pos = pos
	}
	m.runs = m.runs[:last]
}

// planeOf returns the number of a plane, made where it is new; false if the
// stream has more planes than anybody's engine. A full-attention group counts for
// the device from its first block on, on whatever tier that is.
func (m *member) planeOf(tier normalize.Tier, group int32, full bool) (uint8, bool) {
	if p, ok := m.findPlane(tier, group, full); ok {
		return p, true
	}
	if len(m.planes) == maxPlanes {
		return 0, false
	}
	m.owner.layout++
	p := uint8(len(m.planes))
	m.planes = append(m.planes, plane{tier: tier, group: group, full: full})
	if full {
		m.addFull(tier, p)
		m.planeOf(normalize.Device, group, true)
	}
	return p, true
}

// findPlane is planeOf without making one.
func (m *member) findPlane(tier normalize.Tier, group int32, full bool) (uint8, bool) {
	for i := range m.planes {
		if p := &m.planes[i]; p.tier == tier && p.group == group && p.full == full {
			return uint8(i), true
		}
	}
	return 0, false
}

// addFull takes plane p into its tier. From then on the tier holds only what p
// has too, which is nothing yet.
func (m *member) addFull(tier normalize.Tier, p uint8) {
	had := m.tiers[tier]
	m.tiers[tier] |= 1 << p
	if tier != normalize.Device {
		if had != 0 {
			m.residents[tier] = 0
		}
		return
	}
	if had == 0 {
		m.primary = p
		return
	}
	single := bits.OnesCount64(uint64(had)) == 1
	for _, id := range m.runs {
		r := m.t.run(id)
		en := m.t.entry(m, r)
		if single && en.held != 0 { // entry.held was the plane itself
			m.t.addPlane(en, m.primary).mask = en.held
		}
		m.t.setHeld(m, r, en, 0)
	}
}

// inLine says whether plane p is entry.held itself.
func (m *member) inLine(p uint8) bool { return m.tiers[normalize.Device] == 1<<p }

// planeBits returns the blocks of an entry that stand in plane p.
func (m *member) planeBits(en *entry, p uint8) uint64 {
	if m.inLine(p) {
		return en.held
	}
	if pm := m.t.planeMask(en, p); pm != nil {
		return pm.mask
	}
	return 0
}

// tierBits returns the blocks of an entry that are held on a tier.
func (m *member) tierBits(en *entry, tier normalize.Tier) uint64 {
	if tier == normalize.Device {
		return en.held
	}
	return m.allPlanes(en, uint64(m.tiers[tier]))
}

// allPlanes returns the blocks that stand in every one of the planes.
func (m *member) allPlanes(en *entry, planes uint64) uint64 {
	if planes == 0 {
		return 0
	}
	mask := ^uint64(0)
	for ; planes != 0; planes &= planes - 1 {
		mask &= m.planeBits(en, uint8(bits.TrailingZeros64(planes)))
	}
	return mask
}

// resident returns the blocks of an entry that stand in any plane.
func (m *member) resident(en *entry) uint64 {
	blocks := en.held
	for at := en.planes; at != 0; {
		pm := m.t.planes.at(at)
		blocks |= pm.mask
		at = pm.next
	}
	return blocks
}

func (m *member) residentIn(en *entry, b ref) bool { return m.resident(en)&b.bit() != 0 }

// set puts the block into plane p or takes it out.
func (m *member) set(r *run, en *entry, b ref, p uint8, in bool) {
	if m.inLine(p) {
		held := en.held | b.bit()
		if !in {
			held = en.held &^ b.bit()
		}
		m.t.setHeld(m, r, en, held)
		return
	}
	tier, full := m.planes[p].tier, m.planes[p].full
	before := m.tierBits(en, tier)
	pm := m.t.planeMask(en, p)
	if pm == nil {
		pm = m.t.addPlane(en, p)
	}
	if in {
		pm.mask |= b.bit()
	} else {
		pm.mask &^= b.bit()
	}
	switch {
	case !full:
	case tier == normalize.Device:
		m.t.setHeld(m, r, en, m.allPlanes(en, uint64(m.tiers[tier])))
	default:
		after := m.tierBits(en, tier)
		m.residents[tier] += ones(after) - ones(before)
	}
}

// in says whether the block stands in plane p.
func (m *member) in(en *entry, b ref, p uint8) bool {
	return m.planeBits(en, p)&b.bit() != 0
}

// store notes one more copy of block b, called e, in plane p. doubtful: it may
// be a report of a copy that is counted already, so it counts as the second at
// most.
func (m *member) store(b ref, e zmqwire.EngineHash, p uint8, doubtful bool) (rival bool) {
	r, en := m.t.run(b.run()), m.entry(b.run())
	if m.rivals != nil {
		rival = m.prefer(r, en, b, e)
	}
	r.stamp = m.t.tick
	m.addCopy(r, en, b, p, 1, doubtful)
	return rival
}

func (m *member) addCopy(r *run, en *entry, b ref, p uint8, n uint32, doubtful bool) {
	if n == 0 {
		return
	}
	if !m.in(en, b, p) {
		m.set(r, en, b, p, true)
		n--
	}
	if n == 0 {
		return
	}
	key := copyKey{b, p}
	if doubtful && m.extra[key] > 0 {
		return
	}
	if m.extra == nil {
		m.extra = make(map[copyKey]uint32)
	}
	m.extra[key] += n
}

// remove notes that a copy of block b, called e, left plane p. left, where it
// is not negative, is the publisher's word of how many remain.
func (m *member) remove(b ref, e zmqwire.EngineHash, p uint8, left int64) bool {
	if m.rivals != nil && m.removeFormer(b, e, p, left) {
		return true
	}
	r, en := m.t.run(b.run()), m.entry(b.run())
	if !m.in(en, b, p) {
		return false
	}
	key := copyKey{b, p}
	if len(m.extra) > 0 {
		if n := m.extra[key]; n > 0 {
			if left < 0 {
				left = int64(n)
			}
			m.setExtra(key, left-1)
			if left > 0 {
				return true
			}
		}
	}
	if left > 0 { // it tells of copies that nobody told us of: the block stays
		m.setExtra(key, left-1)
		return true
	}
	m.set(r, en, b, p, false)
	if !m.residentIn(en, b) {
		m.sleep(b, e)
	}
	return true
}

func (m *member) setExtra(key copyKey, n int64) {
	if n <= 0 {
		delete(m.extra, key)
		return
	}
	if m.extra == nil {
		m.extra = make(map[copyKey]uint32)
	}
	m.extra[key] = uint32(n)
}

// sleep keeps the handle of a block that is gone until others are, dormantMax at
// most.
func (m *member) sleep(b ref, e zmqwire.EngineHash) {
	if len(m.dormant) == dormantMax {
		for old := m.dormant[:dormantStep]; len(old) > 0; {
			old = old[m.forgetSome(old):]
		}
		m.dormant = append(m.dormant[:0], m.dormant[dormantStep:]...)
	}
	m.dormant = append(m.dormant, dormantBlock{b, e, m.seq})
}

// forgetSome forgets the dormant blocks at the beginning of old that are of one
// run, and returns how many those were. One that is held again is none any more,
// and one whose run has gone is forgotten.
func (m *member) forgetSome(old []dormantBlock) int {
	id := old[0].block.run()
	n := 1
	for n < len(old) && old[n].block.run() == id {
		n++
	}
	if !m.t.stands(makeRef(id, 0)) {
		return n
	}
	en := m.entry(id)
	if en == nil {
		return n
	}
	if en.own || m.rivals != nil || m.doomed != nil {
		for _, d := range old[:n] {
			m.wakeOrForget(d)
		}
		return n
	}
	var gone uint64
	r := m.t.run(id)
	for _, d := range old[:n] {
		if d.block.off() < int(r.n) && m.t.shares(r, d.block, d.engine) {
			gone |= d.block.bit()
		}
	}
	m.unlearn(id, gone&en.known&^m.resident(en))
	return n
}

// wakeOrForget forgets a dormant block unless it is held again, or its run has
// gone meanwhile.
func (m *member) wakeOrForget(d dormantBlock) {
	if !m.t.stands(d.block) {
		return
	}
	en := m.entry(d.block.run())
	if en == nil || en.known&d.block.bit() == 0 || m.residentIn(en, d.block) {
		return
	}
	if !m.calls(en, d.block, d.engine) {
		return
	}
	if _, ok := m.doomed[d.block]; ok {
		return
	}
	m.forget(d.block, d.engine)
}
