package index

import (
	"slices"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// An orphanage keeps the blocks whose parent was never announced, or is
// forgotten. Their chain's salt is unknown, so they have no hash yet and match
// nobody; their content waits for the parent.
type orphanage struct {
	byHandle map[zmqwire.EngineHash]*orphan
	waiting  map[zmqwire.EngineHash][]zmqwire.EngineHash // parent -> children
	oldest   *orphan
	newest   *orphan
	bytes    int64
}

type orphan struct {
	handle, parent zmqwire.EngineHash
	content        normalize.Content
	copies         map[uint8]uint32 // by plane
	since          time.Time
	older, newer   *orphan
}

// orphanAge is how long a block waits for its parent. vLLM announces a parent
// before its child, so one that is still missing after minutes was lost.
const orphanAge = 10 * time.Minute

const orphanOverhead = 200 // bytes of maps and record, beside the content

func newOrphanage() *orphanage {
	return &orphanage{
		byHandle: make(map[zmqwire.EngineHash]*orphan),
		waiting:  make(map[zmqwire.EngineHash][]zmqwire.EngineHash),
	}
}

func (h *orphanage) len() int {
	if h == nil {
		return 0
	}
	return len(h.byHandle)
}

// get returns the orphan called e, nil if there is none.
func (h *orphanage) get(e zmqwire.EngineHash) *orphan {
	if h == nil {
		return nil
	}
	return h.byHandle[e]
}

func (h *orphanage) add(o *orphan) {
	h.byHandle[o.handle] = o
	h.waiting[o.parent] = append(h.waiting[o.parent], o.handle)
	h.bytes += int64(o.content.Bytes()) + orphanOverhead
	if o.older = h.newest; o.older != nil {
		o.older.newer = o
	} else {
		h.oldest = o
	}
	h.newest = o
}

// drop takes the orphan out; what waits for it goes on waiting.
func (h *orphanage) drop(o *orphan) {
	delete(h.byHandle, o.handle)
	h.bytes -= int64(o.content.Bytes()) + orphanOverhead
	if o.older != nil {
		o.older.newer = o.newer
	} else {
		h.oldest = o.newer
	}
	if o.newer != nil {
		o.newer.older = o.older
	} else {
		h.newest = o.older
	}
	siblings := h.waiting[o.parent]
	i := slices.Index(siblings, o.handle)
	siblings = slices.Delete(siblings, i, i+1)
	if len(siblings) == 0 {
		delete(h.waiting, o.parent)
	} else {
		h.waiting[o.parent] = siblings
	}
}

// again notes that the orphan was stored once more: of two handles for one
// content the one stored last is the newest, also when both had to wait.
func (h *orphanage) again(o *orphan) {
	siblings := h.waiting[o.parent]
	i := slices.Index(siblings, o.handle)
	copy(siblings[i:], siblings[i+1:])
	siblings[len(siblings)-1] = o.handle
}

// bound drops orphans past the count and the age; it returns how many.
func (h *orphanage) bound(most int, now time.Time) (dropped int) {
	for h.oldest != nil && (len(h.byHandle) > most || now.Sub(h.oldest.since) > orphanAge) {
		h.drop(h.oldest)
		dropped++
	}
	return dropped
}

// waitsFor returns the orphan that waits for e and was stored first, nil if
// there is none.
func (h *orphanage) waitsFor(e zmqwire.EngineHash) *orphan {
	if h == nil || len(h.waiting) == 0 {
		return nil
	}
	if children := h.waiting[e]; len(children) > 0 {
		return h.byHandle[children[0]]
	}
	return nil
}
