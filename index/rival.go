package index

import "github.com/kvindexd/kvindexd/zmqwire"

// A rivalry is two or more handles of one stream for one content: an adapter
// re-pointed to another path, an unnoticed restart under another hash seed, an
// image at another offset. A request of now reaches only the newest, so its
// copies alone decide; the former ones are kept so that their removals find
// something else than the newest's copies.
type rivalry struct {
	newest zmqwire.EngineHash
	former []formerHandle
}

type formerHandle struct {
	engine zmqwire.EngineHash
	// unnamed: the handle that stood alone when the rivalry began. Only its
	// removal, or its return, tells its name.
	unnamed bool
	copies  map[uint8]uint32 // by plane
}

// rival makes e the newest handle of block b, which the stream knows under
// another one. The former's copies stop deciding.
func (m *member) rival(r *run, en *entry, b ref, e zmqwire.EngineHash) {
	if m.rivals == nil {
		m.rivals = make(map[ref]*rivalry)
	}
	rv := m.rivals[b]
	former := formerHandle{unnamed: true}
	if rv == nil {
		rv = &rivalry{}
		m.rivals[b] = rv
	} else {
		former = formerHandle{engine: rv.newest}
	}
	former.copies = m.takeCopies(r, en, b)
	rv.former = append(rv.former, former)
	rv.newest = e
	if !en.own { // e cannot be the shared one: that is the former
		m.disown(en, b.run())
	}
	m.own.put(uint64(e), uint32(b))
}

// takeCopies takes the block out of every plane and returns what stood there.
func (m *member) takeCopies(r *run, en *entry, b ref) map[uint8]uint32 {
	var copies map[uint8]uint32
	for p := range m.planes {
		p := uint8(p)
		if !m.in(en, b, p) {
			continue
		}
		if copies == nil {
			copies = make(map[uint8]uint32)
		}
		key := copyKey{b, p}
		copies[p] = 1 + m.extra[key]
		delete(m.extra, key)
		m.set(r, en, b, p, false)
	}
	return copies
}

// prefer makes e the newest handle of b again, if it is a former one, and says
// whether it was.
func (m *member) prefer(r *run, en *entry, b ref, e zmqwire.EngineHash) bool {
	if !m.former(b, e) {
		return false
	}
	rv := m.rivals[b]
	f := rv.find(e)
	back := f.copies
	*f = formerHandle{engine: rv.newest, copies: m.takeCopies(r, en, b)}
	rv.newest = e
	for p, n := range back {
		m.addCopy(r, en, b, p, n, false)
	}
	return true
}

// former says whether e is a handle of b that no longer decides.
func (m *member) former(b ref, e zmqwire.EngineHash) bool {
	rv := m.rivals[b]
	return rv != nil && rv.newest != e
}

// holdsAs says whether the stream has a copy of b under the name e.
func (m *member) holdsAs(b ref, e zmqwire.EngineHash) bool {
	if m.former(b, e) {
		return len(m.rivals[b].find(e).copies) > 0
	}
	return m.residentIn(m.entry(b.run()), b)
}

// find returns e's record: one of that name, else the unnamed one takes it.
func (rv *rivalry) find(e zmqwire.EngineHash) *formerHandle {
	for i := range rv.former {
		if f := &rv.former[i]; !f.unnamed && f.engine == e {
			return f
		}
	}
	for i := range rv.former {
		if f := &rv.former[i]; f.unnamed {
			f.engine, f.unnamed = e, false
			return f
		}
	}
	rv.former = append(rv.former, formerHandle{engine: e})
	return &rv.former[len(rv.former)-1]
}

// removeFormer takes a copy from a former handle; false if e is the newest, or
// has no rival.
func (m *member) removeFormer(b ref, e zmqwire.EngineHash, p uint8, left int64) bool {
	if !m.former(b, e) {
		return false
	}
	f := m.rivals[b].find(e)
	takeCopy(f.copies, p, left)
	return true
}

// forgetRivals drops all handles of a block, but the one that is forgotten
// beside it; false if one of them has no name, and nothing was dropped.
func (m *member) forgetRivals(b ref) bool {
	rv := m.rivals[b]
	if rv == nil {
		return true
	}
	for i := range rv.former {
		if rv.former[i].unnamed {
			return false
		}
	}
	delete(m.rivals, b)
	m.dropOwn(b, rv.newest)
	for _, f := range rv.former {
		m.dropOwn(b, f.engine)
	}
	return true
}

func (m *member) dropOwn(b ref, e zmqwire.EngineHash) {
	m.own.delIf(uint64(e), uint32(b))
}
