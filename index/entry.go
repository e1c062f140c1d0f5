package index

import "github.com/kvindexd/kvindexd/normalize"

// Past wideFrom entries a run keeps a bitset of the streams that hold all of
// it, so that a walk costs one AND per 64 streams; below wideUntil it is given
// back.
const (
	wideFrom  = 8
	wideUntil = 4
)

// find returns the place of slot's entry among the run's, or where it would
// stand and false.
func (t *tree) find(r *run, slot uint32) (int, bool) {
	es := t.all(r)
	lo, hi := 0, len(es)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if es[mid].slot < slot {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(es) && es[lo].slot == slot
}

// entry returns m's entry in run id, nil if it has none. It stays where it is
// until an entry of the run comes or goes.
func (t *tree) entry(m *member, r *run) *entry {
	if i, ok := t.find(r, m.slot); ok {
		return t.entries.at(r.entries + uint32(i))
	}
	return nil
}

// join returns m's entry in run id, which it makes where there is none.
func (t *tree) join(m *member, id uint32) *entry {
	if id == m.hotRun {
		return m.hot
	}
	r := t.run(id)
	i, ok := t.find(r, m.slot)
	if ok {
		return t.entries.at(r.entries + uint32(i))
	}
	m.cool()
	t.makeRoom(r)
	es := t.entries.array(r.entries, int(r.nentries)+1)
	copy(es[i+1:], es[i:])
	es[i] = entry{slot: m.slot, pos: uint32(len(m.runs))}
	m.shared++
	if m.ownByHabit {
		m.owns(&es[i])
	}
	r.nentries++
	m.runs = append(m.runs, id)
	if r.nentries > wideFrom && r.wide == 0 {
		t.rebuildWide(r)
	}
	return &es[i]
}

func (t *tree) makeRoom(r *run) {
	if r.entries == 0 {
		r.entries = t.entries.alloc(0)
	}
	if class := t.entries.class(r.entries); r.nentries == 1<<class {
		t.resizeEntries(r, class+1)
	}
}

func (t *tree) resizeEntries(r *run, class uint8) {
	to := t.entries.alloc(class)
	copy(t.entries.array(to, int(r.nentries)), t.all(r))
	t.entries.free(r.entries)
	r.entries = to
}

// leave takes m's entry in run id away. Its blocks must be forgotten already,
// or m dead: nothing but the entry goes.
func (t *tree) leave(m *member, id uint32) {
	r := t.run(id)
	i, ok := t.find(r, m.slot)
	if !ok {
		return
	}
	m.cool()
	es := t.all(r)
	if !es[i].own {
		m.shared--
	}
	t.freePlanes(es[i].planes)
	m.dropRun(t, es[i].pos)
	copy(es[i:], es[i+1:])
	r.nentries--
	t.clearWide(r, m.slot)
	if r.nentries == 0 {
		t.entries.free(r.entries)
		r.entries = 0
	} else if class := t.entries.class(r.entries); class > 0 && r.nentries <= 1<<class/4 {
		t.resizeEntries(r, class-1)
	}
	if r.nentries < wideUntil {
		t.dropWide(r)
	}
}

func (t *tree) freePlanes(p uint32) {
	for p != 0 {
		next := t.planes.at(p).next
		t.planes.free(p)
		p = next
	}
}

// planeMask returns which blocks of an entry stand in plane p, where p is kept
// out of line; nil for none.
func (t *tree) planeMask(e *entry, p uint8) *planeMask {
	for at := e.planes; at != 0; {
		pm := t.planes.at(at)
		if pm.plane == p {
			return pm
		}
		at = pm.next
	}
	return nil
}

func (t *tree) addPlane(e *entry, p uint8) *planeMask {
	at := t.planes.alloc(0)
	pm := t.planes.at(at)
	*pm = planeMask{plane: p, next: e.planes}
	e.planes = at
	return pm
}

// rebuildWide computes the run's bitset anew, as wide as the tree's slots.
func (t *tree) rebuildWide(r *run) {
	t.dropWide(r)
	r.wide = t.words.alloc(classFor((len(t.members) + 63) / 64))
	all := lowBits(int(r.n))
	for i := range t.all(r) {
		if e := t.entries.at(r.entries + uint32(i)); e.held == all {
			*t.words.at(r.wide + e.slot/64) |= 1 << (e.slot % 64)
		}
	}
}

func (t *tree) dropWide(r *run) {
	if r.wide != 0 {
		t.words.free(r.wide)
		r.wide = 0
	}
}

// wideWords is how many words the run's bitset has.
func (t *tree) wideWords(r *run) uint32 { return 1 << t.words.class(r.wide) }

// setWide notes that slot holds all of the run.
func (t *tree) setWide(r *run, slot uint32) {
	if slot/64 >= t.wideWords(r) {
		t.rebuildWide(r)
		return
	}
	*t.words.at(r.wide + slot/64) |= 1 << (slot % 64)
}

// clearWide notes that slot does not hold all of the run.
func (t *tree) clearWide(r *run, slot uint32) {
	if r.wide != 0 && slot/64 < t.wideWords(r) {
		*t.words.at(r.wide + slot/64) &^= 1 << (slot % 64)
	}
}

// setHeld changes which blocks of the run the entry holds on the device.
func (t *tree) setHeld(m *member, r *run, e *entry, held uint64) {
	m.residents[normalize.Device] += ones(held) - ones(e.held)
	e.held = held
	if r.wide == 0 {
		return
	}
	if held == lowBits(int(r.n)) {
		t.setWide(r, e.slot)
	} else {
		t.clearWide(r, e.slot)
	}
}
