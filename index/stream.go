package index

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// Stream is one publisher's part in a Set: what one data-parallel rank of one
// worker holds. One goroutine at a time may call Apply, Clear and Close.
type Stream struct {
	set    *Set
	config StreamConfig

	// Guarded by set.mu.
	members []*member // one per tree that it has blocks in
	groups  []group
	other   bool // it has a cache group that is not indexed
	closed  bool

	// The writer's own.
	retired   []*member // swept after the batch
	locals    []normalize.LocalHash
	localsEnd []int
	rootsSeen []zmqwire.EngineHash // first hashes of this batch's root stores
	seq       uint64               // the batch under way
	touched   uint32               // keeps touch's loads alive
	inARow    int                  // content conflicts since the last store without one

	stats streamCounters
	shape atomic.Pointer[normalize.Shape]
}

// Shape returns the shape of the stream's full-attention blocks, by which a
// prompt is to be identified for it: the one it stored last; false before its
// first block, and where no block size is configured. Any goroutine may call it.
func (s *Stream) Shape() (normalize.Shape, bool) {
	shape := s.shape.Load()
	if shape == nil {
		return normalize.Shape{}, false
	}
	return *shape, true
}

type streamCounters struct {
	resident                 [normalize.NoTier]atomic.Int64
	orphans                  atomic.Int64
	conflicts, contentConfl  atomic.Int64
	trimmed, stored, removed atomic.Int64
}

// A group is one of the stream's cache groups, learned from its stores.
type group struct {
	index  int32
	spec   normalize.SpecKind
	window uint32
	shapes []normalize.Shape // that it has stored blocks of, since the last clear
	// unplaced are window blocks whose place no event told, by handle, with
	// their copies per tier.
	unplaced map[unplacedKey]uint32
}

type unplacedKey struct {
	engine zmqwire.EngineHash
	tier   normalize.Tier
}

const maxGroups = maxPlanes

// restartConflicts in a row are a restart that nothing else showed.
const restartConflicts = 8

// NewStream begins the life of a stream that holds nothing.
func (x *Set) NewStream(c StreamConfig) *Stream {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.streams++
	s := &Stream{set: x, config: c}
	if c.BlockSize != 0 {
		s.shape.Store(&normalize.Shape{BlockSize: c.BlockSize})
	}
	return s
}

// Name is what the stream was called at its birth.
func (s *Stream) Name() string { return s.config.Name }

// Stats counts what the stream holds and what it saw. Any goroutine may call it.
func (s *Stream) Stats() StreamStats {
	st := StreamStats{
		Orphans:          s.stats.orphans.Load(),
		Conflicts:        s.stats.conflicts.Load(),
		ContentConflicts: s.stats.contentConfl.Load(),
		Trimmed:          s.stats.trimmed.Load(),
		Stored:           s.stats.stored.Load(),
		Removed:          s.stats.removed.Load(),
	}
	for i := range st.Resident {
		st.Resident[i] = s.stats.resident[i].Load()
	}
	return st
}

// Trimmed counts the blocks of the stream that the byte budget took. Any
// goroutine may call it.
func (s *Stream) Trimmed() int64 { return s.stats.trimmed.Load() }

// Apply takes a batch in as one step: no query sees a part of it.
func (s *Stream) Apply(b *normalize.Batch) Applied {
	s.hash(b)
	var a Applied
	x := s.set
	x.mu.Lock()
	if s.closed {
		x.mu.Unlock()
		return a
	}
	s.rootsSeen = s.rootsSeen[:0]
	s.seq = b.Seq
	s.touched += s.touch(b)
	for i := range b.Ops {
		s.apply(b, i, &a)
	}
	s.bound()
	if x.removals += a.Removed; x.removals >= compactEvery {
		x.removals = 0
		for _, t := range x.trees {
			t.compact()
		}
	}
	s.publish(&a)
	x.stores += a.Stored
	x.mu.Unlock()
	s.finish()
	return a
}

// touch loads what the handles of the batch's removals lead to, and of its stores
// of one block: their cache misses overlap here, where each op would wait for its
// own. A store of more blocks does it by itself.
func (s *Stream) touch(b *normalize.Batch) (sum uint32) {
	for _, m := range s.members {
		m.cool()
		m.seq = b.Seq
		for i := range b.Ops {
			op := &b.Ops[i]
			if op.Kind == normalize.OpRemove && !m.inOrder || op.Kind == normalize.OpStore && len(op.Hashes) == 1 {
				for _, e := range op.Hashes {
					sum += m.touch(e)
				}
			}
		}
	}
	return sum
}

// hash computes the batch's local hashes before the lock is taken, as if no
// chain that begins elsewhere had a salt.
func (s *Stream) hash(b *normalize.Batch) {
	s.locals, s.localsEnd = s.locals[:0], s.localsEnd[:0]
	for i := range b.Ops {
		op := &b.Ops[i]
		if op.Kind == normalize.OpStore && op.Form == normalize.Placed && op.Spec != normalize.SpecOther {
			salt := op.Salt
			if op.HasParent {
				salt = 0
			}
			s.locals = b.Locals(s.locals, op, salt)
		}
		s.localsEnd = append(s.localsEnd, len(s.locals))
	}
	const keep = 1 << 16
	if cap(s.locals) > keep && len(s.locals) < keep/4 {
		s.locals = append([]normalize.LocalHash(nil), s.locals...)
	}
}

// hashed returns the local hashes of op i under salt.
func (s *Stream) hashed(b *normalize.Batch, i int, salt normalize.SaltSeed) []normalize.LocalHash {
	from := 0
	if i > 0 {
		from = s.localsEnd[i-1]
	}
	locals := s.locals[from:s.localsEnd[i]]
	if op := &b.Ops[i]; op.HasParent && salt != 0 {
		b.Locals(locals[:0], op, salt)
	}
	return locals
}

func (s *Stream) apply(b *normalize.Batch, i int, a *Applied) {
	op := &b.Ops[i]
	switch op.Kind {
	case normalize.OpStore:
		s.store(b, i, a)
	case normalize.OpRemove:
		s.remove(op, a)
	case normalize.OpClear:
		s.retire()
		a.Cleared = true
	}
}

// Clear drops what the stream holds and what it learned of its groups: its
// publisher is another one now.
func (s *Stream) Clear() { s.end(false) }

// Close ends the stream's life: it holds nothing and later batches change
// nothing.
func (s *Stream) Close() { s.end(true) }

func (s *Stream) end(closed bool) {
	x := s.set
	x.mu.Lock()
	if s.closed {
		x.mu.Unlock()
		return
	}
	s.retire()
	s.groups, s.other, s.inARow = nil, false, 0
	if closed {
		s.closed = true
		x.streams--
	}
	s.publish(&Applied{})
	x.mu.Unlock()
	s.finish()
}

// retire gives up all that the stream holds. Its members are swept once the
// lock is free.
func (s *Stream) retire() {
	for _, m := range s.members {
		m.own, m.extra, m.rivals, m.doomed, m.orphans, m.dormant = table{}, nil, nil, nil, nil, nil
	}
	s.retired = append(s.retired, s.members...)
	s.members = nil
	s.set.layout++
	for i := range s.groups {
		s.groups[i].shapes, s.groups[i].unplaced = nil, nil
	}
}

// finish does what may follow a batch without the lock held throughout.
func (s *Stream) finish() {
	for _, m := range s.retired {
		s.set.sweep(m)
	}
	s.retired = nil
	s.set.trim()
}

// bound drops the orphans that are too many or too old.
func (s *Stream) bound() {
	for _, m := range s.members {
		if m.orphans.len() > 0 {
			m.orphans.bound(s.set.options.MaxOrphans, time.Now())
		}
	}
}

// publish copies the counters to where anybody may read them.
func (s *Stream) publish(a *Applied) {
	var resident [normalize.NoTier]int64
	var orphans int64
	for _, m := range s.members {
		for i, n := range m.residents {
			resident[i] += n
		}
		orphans += int64(m.orphans.len())
	}
	for i, n := range resident {
		setCounter(&s.stats.resident[i], n)
	}
	setCounter(&s.stats.orphans, orphans)
	addCounter(&s.stats.conflicts, a.Conflicts)
	addCounter(&s.stats.contentConfl, a.ContentConflicts)
	addCounter(&s.stats.stored, a.Stored)
	addCounter(&s.stats.removed, a.Removed)
}

// setCounter and addCounter spare the locked instruction where nothing changes:
// ten of them are as dear as a block.
func setCounter(c *atomic.Int64, n int64) {
	if c.Load() != n {
		c.Store(n)
	}
}

func addCounter(c *atomic.Int64, n int) {
	if n != 0 {
		c.Add(int64(n))
	}
}

// member returns the stream's part in a tree, nil if it has none.
func (s *Stream) member(t *tree) *member {
	for _, m := range s.members {
		if m.t == t {
			return m
		}
	}
	return nil
}

func (s *Stream) memberOf(shape normalize.Shape) *member {
	for _, m := range s.members {
		if m.t.shape == shape {
			return m
		}
	}
	return nil
}

// enter returns the stream's part in the tree of a shape, made where it is new.
func (s *Stream) enter(shape normalize.Shape) *member {
	if m := s.memberOf(shape); m != nil {
		return m
	}
	m := s.set.tree(shape).enter(s.set)
	m.seq, m.trims = s.seq, &s.stats.trimmed
	s.members = append(s.members, m)
	return m
}

// group returns the cache group of a store, learned where it is new; nil if
// nobody can tell what kind it is, or the stream has more than any engine.
func (s *Stream) group(op *normalize.Op) *group {
	index := max(op.Group, 0)
	g := s.findGroup(index)
	if g == nil {
		spec := op.Spec
		if spec == normalize.SpecAbsent {
			if index != 0 {
				return nil
			}
			spec = normalize.SpecFull
		}
		if len(s.groups) == maxGroups {
			return nil
		}
		s.set.layout++
		s.groups = append(s.groups, group{index: index, spec: spec, window: op.Window})
		return &s.groups[len(s.groups)-1]
	}
	if op.Spec != normalize.SpecAbsent && op.Spec != g.spec {
		return nil // one group is of one kind; a restart forgets it
	}
	return g
}

func (s *Stream) findGroup(index int32) *group {
	for i := range s.groups {
		if s.groups[i].index == index {
			return &s.groups[i]
		}
	}
	return nil
}

// hybrid says whether the stream has sliding-window groups.
func (s *Stream) hybrid() bool {
	for i := range s.groups {
		if s.groups[i].spec == normalize.SpecWindow {
			return true
		}
	}
	return false
}

// sees notes that group g stores blocks of a shape.
func (s *Stream) sees(g *group, shape normalize.Shape) {
	if !g.has(shape) {
		g.shapes = append(g.shapes, shape)
		s.set.layout++
	}
}

// lacks says whether one of the full-attention groups has no blocks of a shape
// that another one has: those say nothing of what the stream holds.
func (s *Stream) lacks(shape normalize.Shape) bool {
	has, lacks := false, false
	for i := range s.groups {
		if g := &s.groups[i]; g.spec == normalize.SpecFull && len(g.shapes) > 0 {
			if g.has(shape) {
				has = true
			} else {
				lacks = true
			}
		}
	}
	return has && lacks
}

// uneven says whether there is such a shape.
func (s *Stream) uneven() bool {
	return slices.ContainsFunc(s.members, func(m *member) bool { return s.lacks(m.t.shape) })
}

// inClass says whether handles of group g may stand in the tree of a shape: all
// full-attention groups share theirs, a window group has those of its shapes.
func (s *Stream) inClass(g *group, shape normalize.Shape) bool {
	if g.spec != normalize.SpecFull {
		return g.has(shape)
	}
	for i := range s.groups {
		if o := &s.groups[i]; o.spec == normalize.SpecFull && o.has(shape) {
			return true
		}
	}
	return false
}

func (g *group) has(shape normalize.Shape) bool {
	return slices.Contains(g.shapes, shape)
}

// locate finds the block that group g means by e.
func (s *Stream) locate(g *group, e zmqwire.EngineHash) (*member, ref) {
	for _, m := range s.members {
		if s.inClass(g, m.t.shape) {
			if b := m.lookUp(e); b != noRef {
				return m, b
			}
		}
	}
	return nil, noRef
}

// locateOrphan finds the orphan that group g means by e.
func (s *Stream) locateOrphan(g *group, e zmqwire.EngineHash) (*member, *orphan) {
	for _, m := range s.members {
		if s.inClass(g, m.t.shape) {
			if o := m.orphans.get(e); o != nil {
				return m, o
			}
		}
	}
	return nil, nil
}
