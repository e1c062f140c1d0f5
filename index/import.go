package index

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// Import puts a stream of the archive into s, which must be empty and under no
// batch; other streams of the set and queries go on. With an error s is empty
// again: ErrChunk, or ErrSettings where s means something else by its blocks.
//
// Nothing of the archive is believed: every block is put where its parents and
// content say, every handle where no other leads, every count within its bound.
func (a *Archive) Import(stream int, s *Stream) error {
	if stream < 0 || stream >= len(a.streams) || a.streams[stream] == nil {
		return errUnknownStream
	}
	i := &importer{a: a, s: s, at: make(map[uint32]placed)}
	s.set.holdTrims()
	err := i.run(a.streams[stream])
	s.set.trimming.Store(false)
	s.set.trim()
	if err != nil {
		s.Clear()
		s.shape.Store(nil)
		if s.config.BlockSize != 0 {
			s.shape.Store(&normalize.Shape{BlockSize: s.config.BlockSize})
		}
	}
	return err
}

// holdTrims keeps the byte budget from taking what is being placed. A trim that
// is under way ends first.
func (x *Set) holdTrims() {
	for !x.trimming.CompareAndSwap(false, true) {
		time.Sleep(time.Millisecond)
	}
}

// importer is one Import under way. What it has placed stays: each run that it
// knows the place of has a block that s knows, or stands above one.
type importer struct {
	a *Archive
	s *Stream
	u *turn
	c *chunkReader

	begun, ended bool
	m            *member
	tree         uint32 // of m, in the archive
	at           map[uint32]placed
	last         int64 // the run of the last entry
	chain        []uint32

	entries, memberships uint64
	handles              []uint64
	planes               []planeMask
	unplaced             int
	touched              uint32 // keeps touch's loads alive
}

// placed tells where the first n blocks of an archived run stand.
type placed struct {
	n     int
	first ref   // they stand in a row from there, or
	each  []ref // each stands where this says
}

func (p *placed) ref(i int) ref {
	if p.each != nil {
		return p.each[i]
	}
	return p.first + ref(i)
}

// add notes where the next k blocks stand.
func (p *placed) add(b ref, k int) {
	switch {
	case p.n == 0:
		p.first = b
	case p.each == nil && b == p.first+ref(p.n):
	default:
		if p.each == nil {
			for i := range p.n {
				p.each = append(p.each, p.first+ref(i))
			}
		}
		for j := range k {
			p.each = append(p.each, b+ref(j))
		}
	}
	p.n += k
}

func (i *importer) run(chunks [][]byte) error {
	i.u = takeTurn(&i.s.set.mu)
	defer i.u.end()
	if i.s.closed || len(i.s.members) > 0 || len(i.s.groups) > 0 {
		return errors.New("index: BUG: import into a stream that is closed or not empty")
	}
	for _, b := range chunks {
		i.c = &chunkReader{b: b}
		for i.c.more() && i.c.err == nil {
			if err := i.record(); err != nil {
				return err
			}
		}
		if i.c.err != nil {
			return i.c.err
		}
	}
	if !i.ended {
		return fmt.Errorf("%w: a stream without its end", ErrChunk)
	}
	i.cool()
	i.s.set.stores += int(i.memberships)
	i.s.publish(&Applied{})
	return nil
}

func (i *importer) record() error {
	if i.u.spend(200) {
		i.cool()
	}
	kind := i.c.byte()
	if (kind == recBegin) == i.begun || i.ended || i.m == nil && kind > recMember && kind < recUnplaced {
		i.c.fail("record %d out of its place", kind)
		return i.c.err
	}
	switch kind {
	case recBegin:
		i.begun = true
		return i.begin()
	case recMember:
		i.member()
	case recEntry:
		return i.entry()
	case recAlias, recCopies, recRival, recDormant, recDoomed:
		i.rare(kind)
	case recUnplaced:
		i.takeUnplaced()
	case recEnd:
		i.end()
	default:
		i.c.fail("record %d", kind)
	}
	return i.c.err
}

// cool: others have had their turn, entries may have moved.
func (i *importer) cool() {
	if i.m != nil {
		i.m.cool()
	}
}

func (i *importer) begin() error {
	c, s := i.c, i.s
	flags := c.byte()
	if c.err == nil && (flags&beginDrop != 0) != s.config.EagleDrop {
		return fmt.Errorf("%w: eagle_drop", ErrSettings)
	}
	s.other = flags&beginOther != 0
	if flags&beginShape != 0 {
		if shape := c.shape(); c.err == nil {
			s.shape.Store(&shape)
		}
	}
	s.inARow = int(c.uint(restartConflicts))
	for n := c.uint(maxGroups); n > 0 && c.err == nil; n-- {
		g := group{index: c.int32(), spec: normalize.SpecKind(c.byte()), window: uint32(c.uint(1<<32 - 1))}
		for k := c.uint(maxArchivedTrees); k > 0 && c.err == nil; k-- {
			s.sees(&g, c.shape())
		}
		if c.err == nil && (g.spec < normalize.SpecFull || g.spec > normalize.SpecOther || g.index < 0 || s.findGroup(g.index) != nil) {
			c.fail("group %d of kind %d", g.index, g.spec)
		}
		if c.err == nil {
			s.groups = append(s.groups, g)
		}
	}
	return c.err
}

func (i *importer) member() {
	c := i.c
	tree := c.uint(maxArchivedTrees)
	if c.err == nil && int(tree) >= len(i.a.trees) {
		c.fail("tree %d of %d", tree, len(i.a.trees))
	}
	byHabit, planes := c.byte() != 0, int(c.byte())
	if c.err != nil {
		return
	}
	t := &i.a.trees[tree]
	if i.s.memberOf(t.shape) != nil || planes > maxPlanes {
		c.fail("a second part in tree %d, or %d planes", tree, planes)
		return
	}
	i.m, i.tree, i.last = i.s.enter(t.shape), uint32(tree), 0
	i.m.ownByHabit = byHabit
	i.m.t.tick = max(i.m.t.tick, t.tick)
	for n := range planes {
		tier, full, group := normalize.Tier(c.byte()), c.byte() != 0, c.int32()
		if c.err == nil && (tier >= normalize.NoTier || group < 0) {
			c.fail("plane of tier %d, group %d", tier, group)
		}
		if c.err != nil {
			return
		}
		if p, ok := i.m.planeOf(tier, group, full); !ok || int(p) != n {
			c.fail("a plane twice")
			return
		}
	}
}

// entry puts the stream's part of one run in.
func (i *importer) entry() error {
	c := i.c
	delta := c.int64()
	number := i.last + delta
	if c.err == nil && (number < 0 || number >= int64(len(i.a.runs)) || i.a.runs[number].tree != i.tree) {
		c.fail("run %d of %d", number, len(i.a.runs))
	}
	if c.err != nil {
		return c.err
	}
	i.last = number
	r := &i.a.runs[number]
	flags := c.byte()
	known := i.known(flags, len(r.locals))
	i.readPlanes(flags, known)
	own := flags&entryOwn != 0
	if i.handles = i.handles[:0]; own {
		i.handles = c.words(i.handles, bits.OnesCount64(known))
	} else if known&^r.have != 0 {
		c.fail("blocks %x of run %d have no handle", known&^r.have, number)
	}
	if c.err != nil {
		return c.err
	}
	i.entries++
	i.memberships += uint64(bits.OnesCount64(known))
	if i.u.spend(400 + 150*bits.OnesCount64(known)) {
		i.cool()
	}
	at, err := i.place(uint32(number), bits.Len64(known))
	if err != nil {
		return err
	}
	if err := i.join(r, at, known, own); err != nil {
		i.m.t.reap(at.ref(at.n - 1).run())
		return err
	}
	return nil
}

func (i *importer) known(flags byte, n int) uint64 {
	if flags&entryPrefix == 0 {
		known := i.c.mask(lowBits(n))
		if i.c.err == nil && known == 0 {
			i.c.fail("an entry without a block")
		}
		return known
	}
	k := int(i.c.byte())
	if i.c.err == nil && (k == 0 || k > n) {
		i.c.fail("%d blocks of %d", k, n)
	}
	if i.c.err != nil {
		return 0
	}
	return lowBits(k)
}

func (i *importer) readPlanes(flags byte, known uint64) {
	c := i.c
	i.planes = i.planes[:0]
	if flags&entrySimple != 0 {
		if len(i.m.planes) == 0 {
			c.fail("an entry without a plane")
		}
		i.planes = append(i.planes, planeMask{mask: known})
		return
	}
	var seen uint64
	for n := c.uint(maxPlanes); n > 0 && c.err == nil; n-- {
		p := c.byte()
		mask := c.mask(known)
		if c.err == nil && (int(p) >= len(i.m.planes) || seen>>p&1 != 0) {
			c.fail("plane %d of %d", p, len(i.m.planes))
			return
		}
		seen |= 1 << p
		i.planes = append(i.planes, planeMask{plane: p, mask: mask})
	}
}

// join makes the stream know the blocks of an entry, wherever they stand.
func (i *importer) join(r *archivedRun, at placed, known uint64, own bool) error {
	handles := i.handles
	for off := 0; off < bits.Len64(known); {
		b := at.ref(off)
		k := 1
		for off+k < at.n && at.ref(off+k) == b+ref(k) && (b+ref(k)).run() == b.run() {
			k++
		}
		part := known >> off & lowBits(k) << b.off()
		if part != 0 {
			n, err := i.joinRun(r, b, off, part, own, handles)
			if err != nil {
				return err
			}
			handles = handles[n:]
		}
		off += k
	}
	return nil
}

// joinRun is join for the blocks of one run of the tree, of which b is block
// off of the archived run. It returns how many own handles it used.
func (i *importer) joinRun(r *archivedRun, b ref, off int, part uint64, own bool, handles []uint64) (used int, err error) {
	m, id := i.m, b.run()
	en := m.t.join(m, id)
	defer func() {
		if err != nil && en.known == 0 {
			m.t.leave(m, id)
		}
	}()
	if en.known&part != 0 {
		return 0, fmt.Errorf("%w: blocks known twice", ErrChunk)
	}
	switch {
	case en.known == 0:
		if own {
			m.owns(en)
		}
	case own && !en.own:
		m.disown(en, id)
	}
	i.touch(r, off-b.off(), part, own, handles)
	for left := part; left != 0; left &= left - 1 {
		at := makeRef(id, bits.TrailingZeros64(left))
		var e uint64
		if own {
			e = handles[used]
			used++
		} else {
			e = r.handles[off+at.off()-b.off()]
		}
		there, shared := m.resolve(zmqwire.EngineHash(e))
		if there != noRef {
			return used, fmt.Errorf("%w: a handle leads to two blocks", ErrChunk)
		}
		m.learn(en, at, zmqwire.EngineHash(e), shared, !m.t.bound(at))
	}
	i.reside(en, id, b.off()-off, part)
	return used, nil
}

// touch loads what the handles of a run's blocks lead to, so that the cache
// misses overlap.
func (i *importer) touch(r *archivedRun, shift int, part uint64, own bool, handles []uint64) {
	if own {
		for _, e := range handles[:bits.OnesCount64(part)] {
			i.touched += i.m.touch(zmqwire.EngineHash(e))
		}
		return
	}
	for ; part != 0; part &= part - 1 {
		i.touched += i.m.touch(zmqwire.EngineHash(r.handles[bits.TrailingZeros64(part)+shift]))
	}
}

// reside puts the blocks of part into their planes: block k of the archived run
// is block k+shift of the entry's.
func (i *importer) reside(en *entry, id uint32, shift int, part uint64) {
	m, r := i.m, i.m.t.run(id)
	before := i.tiers(en)
	held := en.held
	for _, p := range i.planes {
		mask := p.mask
		if shift >= 0 {
			mask <<= shift
		} else {
			mask >>= -shift
		}
		if mask &= part; mask == 0 {
			continue
		}
		if m.inLine(p.plane) {
			held |= mask
			continue
		}
		pm := m.t.planeMask(en, p.plane)
		if pm == nil {
			pm = m.t.addPlane(en, p.plane)
		}
		pm.mask |= mask
	}
	if full := uint64(m.tiers[normalize.Device]); bits.OnesCount64(full) != 1 {
		held = m.allPlanes(en, full)
	}
	m.t.setHeld(m, r, en, held)
	for tier, n := range i.tiers(en) {
		m.residents[tier] += int64(n - before[tier])
	}
}

// tiers counts the entry's blocks on the tiers past the device.
func (i *importer) tiers(en *entry) (n [normalize.NoTier]int) {
	for tier := normalize.Host; tier < normalize.NoTier; tier++ {
		if i.m.tiers[tier] != 0 {
			n[tier] = bits.OnesCount64(i.m.tierBits(en, tier))
		}
	}
	return n
}

// block reads which block is meant: one that the stream knows.
func (i *importer) block() (ref, *entry) {
	c := i.c
	number, off := c.uint(1<<32-1), int(c.byte())
	if c.err != nil {
		return noRef, nil
	}
	p := i.at[uint32(number)]
	if off < p.n && i.a.runs[number].tree == i.tree {
		b := p.ref(off)
		if en := i.m.t.entry(i.m, i.m.t.run(b.run())); en != nil && en.known&b.bit() != 0 {
			return b, en
		}
	}
	c.fail("block %d of run %d, which the stream does not know", off, number)
	return noRef, nil
}

// rare takes a record about one block.
func (i *importer) rare(kind byte) {
	c, m := i.c, i.m
	b, en := i.block()
	if b == noRef {
		return
	}
	switch kind {
	case recAlias:
		e := c.word()
		there, _ := m.resolve(zmqwire.EngineHash(e))
		if c.err == nil && (there != noRef || !en.own) {
			c.fail("a further handle that leads elsewhere")
		}
		if c.err == nil {
			m.own.put(e, uint32(b))
		}
	case recCopies:
		p := c.byte()
		n := c.uint(1<<32 - 1)
		if c.err == nil && (int(p) >= len(m.planes) || !m.in(en, b, p) || n == 0) {
			c.fail("copies in plane %d, where the block is not", p)
		}
		if c.err == nil {
			m.setExtra(copyKey{b, p}, int64(n))
		}
	case recRival:
		i.rival(b)
	default:
		i.gone(kind, b, en)
	}
}

// gone takes a record about a block that is known and held nowhere.
func (i *importer) gone(kind byte, b ref, en *entry) {
	c, m := i.c, i.m
	switch kind {
	case recDormant:
		e, seq := c.word(), c.uint(1<<64-1)
		if c.err == nil && (m.residentIn(en, b) || len(m.dormant) >= dormantMax) {
			c.fail("a dormant block that is held, or more than %d", dormantMax)
		}
		if c.err == nil {
			m.dormant = append(m.dormant, dormantBlock{block: b, engine: zmqwire.EngineHash(e), seq: seq})
		}
	case recDoomed:
		if m.residentIn(en, b) || len(m.doomed) >= doomedMax || m.rivals[b] == nil {
			c.fail("a doomed block that is held or has one handle, or more than %d", doomedMax)
			return
		}
		if m.doomed == nil {
			m.doomed = make(map[ref]struct{})
		}
		m.doomed[b] = struct{}{}
	}
}

func (i *importer) rival(b ref) {
	c, m := i.c, i.m
	rv := &rivalry{newest: zmqwire.EngineHash(c.word())}
	for n := c.uint(1 << 20); n > 0 && c.err == nil; n-- {
		f := formerHandle{unnamed: c.byte() != 0, engine: zmqwire.EngineHash(c.word())}
		for k := c.uint(maxPlanes); k > 0 && c.err == nil; k-- {
			p, n := c.byte(), uint32(c.uint(1<<32-1))
			if c.err == nil && (int(p) >= len(m.planes) || n == 0) {
				c.fail("copies of a former handle in plane %d", p)
				return
			}
			if f.copies == nil {
				f.copies = make(map[uint8]uint32)
			}
			f.copies[p] = n
		}
		rv.former = append(rv.former, f)
	}
	if c.err == nil && (m.own.get(uint64(rv.newest)) != uint32(b) || len(rv.former) == 0 || m.rivals[b] != nil) {
		c.fail("a rivalry whose newest handle is not the block's")
	}
	if c.err != nil {
		return
	}
	if m.rivals == nil {
		m.rivals = make(map[ref]*rivalry)
	}
	m.rivals[b] = rv
}

func (i *importer) takeUnplaced() {
	c, s := i.c, i.s
	g, tier := int(c.uint(maxGroups)), normalize.Tier(c.byte())
	e, n := c.word(), c.uint(1<<32-1)
	i.unplaced++
	if c.err == nil && (g >= len(s.groups) || tier >= normalize.NoTier || n == 0 ||
		i.unplaced > maxGroups*s.set.options.MaxOrphans) {
		c.fail("unplaced blocks of group %d, tier %d", g, tier)
	}
	if c.err != nil {
		return
	}
	if s.groups[g].unplaced == nil {
		s.groups[g].unplaced = make(map[unplacedKey]uint32)
	}
	s.groups[g].unplaced[unplacedKey{zmqwire.EngineHash(e), tier}] = uint32(n)
}

func (i *importer) end() {
	entries, memberships := i.c.uint(1<<63), i.c.uint(1<<63)
	if i.c.err == nil && (entries != i.entries || memberships != i.memberships) {
		i.c.fail("%d blocks in %d entries, should be %d in %d", i.memberships, i.entries, memberships, entries)
	}
	i.ended = true
}
