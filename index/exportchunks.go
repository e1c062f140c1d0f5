package index

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// Chunks hands out what the last Take copied, to be kept in this order. A chunk
// is valid during the call. The first error of emit ends it, and the export.
func (e *Export) Chunks(emit func(chunk []byte) error) error {
	if err := e.emitHeads(emit); err != nil {
		return err
	}
	number := e.streams
	e.streams++
	out := chunker{emit: emit, b: e.chunk[:0]}
	out.head = binary.AppendUvarint([]byte{ChunkVersion, streamChunk}, uint64(number))
	out.begin()
	out.b = append(out.b, e.taken.begin...)
	entries, memberships := 0, 0
	for i := range e.taken.members {
		tm := &e.taken.members[i]
		n, k := tm.encode(&out, e.taken.tailOf(i))
		entries, memberships = entries+n, memberships+k
	}
	for _, rec := range e.taken.tail {
		if rec.kind == recUnplaced {
			out.b = append(append(out.b, recUnplaced), rec.body...)
			out.cut()
		}
	}
	out.b = append(out.b, recEnd)
	out.b = binary.AppendUvarint(out.b, uint64(entries))
	out.b = binary.AppendUvarint(out.b, uint64(memberships))
	out.flush()
	if e.chunk = out.b; len(e.taken.members) > 0 {
		e.spare = e.taken.members[0]
	}
	e.taken = takenStream{}
	return out.err
}

func (e *Export) emitHeads(emit func([]byte) error) error {
	from := 0
	for _, to := range append(e.cuts, len(e.heads)) {
		if to == from {
			continue
		}
		e.chunk = append(e.chunk[:0], ChunkVersion, treeChunk)
		e.chunk = append(e.chunk, e.heads[from:to]...)
		if err := emit(e.chunk); err != nil {
			return err
		}
		from = to
	}
	e.heads, e.cuts = e.heads[:0], e.cuts[:0]
	return nil
}

func (t *takenStream) tailOf(member int) []tailRecord {
	var out []tailRecord
	for _, rec := range t.tail {
		if rec.member == member && rec.kind != recUnplaced {
			out = append(out, rec)
		}
	}
	// A block's copies and rivals come after its entry, whatever their order.
	slices.SortStableFunc(out, func(a, b tailRecord) int { return int(a.kind) - int(b.kind) })
	return out
}

// encode writes the member's entries, in the export's order, and what else is
// known of their blocks.
func (tm *takenMember) encode(out *chunker, tail []tailRecord) (entries, memberships int) {
	out.b = append(out.b, tm.head...)
	slices.SortFunc(tm.entries, func(a, b takenEntry) int { return int(a.number) - int(b.number) })
	handles := newHandles(tm)
	last := int64(0)
	for i := range tm.entries {
		en := &tm.entries[i]
		own := handles.of(i)
		if en.known == 0 {
			continue
		}
		entries, memberships = entries+1, memberships+bits.OnesCount64(en.known)
		out.b = binary.AppendVarint(append(out.b, recEntry), int64(en.number)-last)
		last = int64(en.number)
		out.b = en.append(out.b, tm.planes)
		out.b = appendWords(out.b, own)
		out.cut()
	}
	for _, a := range handles.aliases {
		out.b = append(out.b, recAlias)
		out.b = handles.appendBlock(out.b, a.block)
		out.b = binary.LittleEndian.AppendUint64(out.b, a.engine)
		out.cut()
	}
	for _, rec := range tail {
		if !handles.has(rec.block) {
			continue
		}
		out.b = append(out.b, rec.kind)
		out.b = handles.appendBlock(out.b, rec.block)
		out.b = append(out.b, rec.body...)
		out.cut()
	}
	return entries, memberships
}

func (en *takenEntry) append(dst []byte, planes []planeMask) []byte {
	var flags byte
	n, isPrefix := prefix(en.known)
	if en.own {
		flags |= entryOwn
	}
	if isPrefix {
		flags |= entryPrefix
	}
	if en.simple {
		flags |= entrySimple
	}
	dst = append(dst, flags)
	if isPrefix {
		dst = append(dst, byte(n))
	} else {
		dst = binary.LittleEndian.AppendUint64(dst, en.known)
	}
	if en.simple {
		return dst
	}
	planes = planes[en.planes[0]:en.planes[1]]
	dst = append(dst, byte(len(planes)))
	for _, p := range planes {
		dst = append(dst, p.plane)
		dst = binary.LittleEndian.AppendUint64(dst, p.mask&en.known)
	}
	return dst
}

// handles brings a member's own handles to its entries.
type handles struct {
	tm      *takenMember
	at      map[uint32]int32 // run -> its entry
	from    []int            // by entry: where its words begin
	words   []uint64         // one for each known block of the entries that are own
	filled  []uint64         // by entry: the blocks that have theirs
	aliases []ownHandle      // further handles of a block
}

func newHandles(tm *takenMember) *handles {
	h := &handles{tm: tm, at: make(map[uint32]int32, len(tm.entries)),
		from: make([]int, len(tm.entries)+1), filled: make([]uint64, len(tm.entries))}
	n := 0
	for i := range tm.entries {
		en := &tm.entries[i]
		h.at[en.run], h.from[i] = int32(i), n
		if en.own {
			n += bits.OnesCount64(en.known)
		}
	}
	h.from[len(tm.entries)] = n
	h.words = make([]uint64, n)
	for _, o := range tm.own {
		h.put(o)
	}
	for i := range tm.entries {
		if en := &tm.entries[i]; en.own && h.filled[i] != en.known {
			h.shorten(i, en)
		}
	}
	return h
}

// put gives a block its handle. Of several the newest is it.
func (h *handles) put(o ownHandle) {
	i, ok := h.at[o.block.run()]
	if !ok || h.tm.entries[i].known&o.block.bit() == 0 || !h.tm.entries[i].own {
		return
	}
	newest, rival := h.tm.rivals[o.block]
	if h.filled[i]&o.block.bit() != 0 || rival && uint64(newest) != o.engine {
		h.aliases = append(h.aliases, o)
		return
	}
	h.filled[i] |= o.block.bit()
	h.words[h.from[i]+bits.OnesCount64(h.tm.entries[i].known&(o.block.bit()-1))] = o.engine
}

// shorten leaves out the blocks whose handle went while others had their turn.
func (h *handles) shorten(i int, en *takenEntry) {
	words := h.words[h.from[i]:h.from[i+1]]
	k := 0
	for left, n := en.known, 0; left != 0; left, n = left&(left-1), n+1 {
		if h.filled[i]>>bits.TrailingZeros64(left)&1 != 0 {
			words[k] = words[n]
			k++
		}
	}
	en.known = h.filled[i]
}

// of returns the handles of entry i.
func (h *handles) of(i int) []uint64 {
	en := &h.tm.entries[i]
	if !en.own {
		return nil
	}
	return h.words[h.from[i]:][:bits.OnesCount64(en.known)]
}

func (h *handles) has(b ref) bool {
	i, ok := h.at[b.run()]
	return ok && h.tm.entries[i].known&b.bit() != 0
}

// appendBlock names a block: its run in the export and its place there.
func (h *handles) appendBlock(dst []byte, b ref) []byte {
	dst = binary.AppendUvarint(dst, uint64(h.tm.entries[h.at[b.run()]].number))
	return append(dst, byte(b.off()))
}

// chunker cuts records into chunks.
type chunker struct {
	emit func([]byte) error
	head []byte // of each chunk
	b    []byte
	err  error
}

func (c *chunker) begin() { c.b = append(c.b[:0], c.head...) }

// cut ends the chunk where it is large enough. It is called between records.
func (c *chunker) cut() {
	if len(c.b) >= chunkTarget {
		c.flush()
		c.begin()
	}
}

func (c *chunker) flush() {
	if c.err == nil && len(c.b) > len(c.head) {
		c.err = c.emit(c.b)
	}
}
