package zmqwire

import (
	"fmt"
	"math"
	"slices"
)

const (
	// keepPayload is the largest payload whose buffers a Decoder keeps for
	// the next one, in bytes. A larger payload gets buffers of its own, which
	// go with its batch: one huge message then pins no memory on a stream that
	// is quiet afterwards. The largest batch in the recorded captures has
	// 132 058 bytes.
	keepPayload = 256 << 10
	// maxEvents bounds the one place where a batch in memory is more than
	// eight times its bytes: an Event has 384, and the shortest one has
	// leastEvent on the wire. It is 64 times what a scheduler step of vLLM
	// evicts or stores when it takes 64 Ki tokens in blocks of 16.
	maxEvents  = 1 << 18
	leastEvent = len("\x92\xacBlockRemoved\x90")
	// An extra key takes 56 bytes in memory and one at least on the wire, so
	// a batch may have one for each extraKeyBytes of its payload, and
	// freeExtraKeys beside. A block with one extra key of one character, a
	// hash of eight bytes and one token has 13 bytes.
	extraKeyBytes = 8
	freeExtraKeys = 1024
	// maxLookahead is far above any drafting depth, and fits 16 bits.
	maxLookahead = math.MaxInt16
)

// A Decoder turns payloads into batches. The zero value is ready. It is for one
// goroutine; its buffers are reused, so decoding does not allocate in the
// steady state.
type Decoder struct {
	c     cursor
	batch Batch

	// What the events' slices point into. They only grow within a batch; one
	// that is reallocated stays with the events that point into it.
	hashes    []EngineHash
	remaining []uint32
	tokens    []uint32
	extra     []ExtraKey
	extraEnds []int

	maxExtra int
}

// Decode reads one payload. The batch is the Decoder's: it is valid until the
// next Decode and borrows from payload. The error, in whose chain is
// ErrMalformed, says that the batch itself cannot be read; an event that cannot
// be read costs itself only, and is counted in the batch.
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	if len(payload) > keepPayload {
		d = new(Decoder)
	}
	d.reset(payload)
	var err error
	switch d.c.kind() {
	case kindArray:
		err = d.arrayBatch()
	case kindMap:
		err = d.mapBatch()
	default:
		err = d.fail("batch", "an array or a map")
	}
	if err != nil {
		return nil, err
	}
	if d.c.pos != len(payload) {
		return nil, d.fail("payload", "its end")
	}
	return &d.batch, nil
}

func (d *Decoder) reset(payload []byte) {
	d.c = cursor{b: payload}
	clear(d.batch.Events) // they point into the last payload
	clear(d.extra)
	d.batch = Batch{Rank: -1, Events: d.batch.Events[:0]}
	d.hashes, d.remaining, d.tokens = d.hashes[:0], d.remaining[:0], d.tokens[:0]
	d.extra, d.extraEnds = d.extra[:0], d.extraEnds[:0]
	d.maxExtra = freeExtraKeys + len(payload)/extraKeyBytes
}

// fail returns the error of a batch that cannot be read.
func (d *Decoder) fail(field, expected string) error {
	return fmt.Errorf("zmqwire: %w batch: %s at byte %d of %d: expected %s", ErrMalformed, field, d.c.pos, len(d.c.b), expected)
}

func (d *Decoder) arrayBatch() error {
	n, ok := d.c.arrayLen()
	if !ok || n < 2 {
		return d.fail("batch", "an array of ts, events, data_parallel_rank")
	}
	if !d.timestamp() {
		return d.fail("ts", "a value")
	}
	if err := d.events(); err != nil {
		return err
	}
	for slot := 2; slot < n; slot++ {
		if slot == 2 && d.rank() {
			continue
		}
		if !d.c.skip() {
			return d.fail("batch", "a value in every slot")
		}
	}
	return nil
}

func (d *Decoder) mapBatch() error {
	n, ok := d.c.mapLen()
	if !ok {
		return d.fail("batch", "a map of ts, events, data_parallel_rank")
	}
	found := false
	for range n {
		key, ok := d.c.text()
		if !ok {
			ok = d.c.skip()
		}
		switch {
		case !ok:
		case string(key) == "events":
			if found {
				return d.fail("batch", "one value for events")
			}
			found = true
			if err := d.events(); err != nil {
				return err
			}
		case string(key) == "ts":
			ok = d.timestamp()
		case string(key) == "data_parallel_rank":
			ok = d.rank() || d.c.skip()
		default:
			ok = d.c.skip()
		}
		if !ok {
			return d.fail("batch", "a key and a value")
		}
	}
	if !found {
		return d.fail("batch", "events")
	}
	return nil
}

// timestamp reads ts. Nothing depends on it, so what is no number is odd.
func (d *Decoder) timestamp() bool {
	ts, ok := d.c.float()
	if ok {
		d.batch.Timestamp = ts
		return true
	}
	d.batch.Odd++
	return d.c.skip()
}

// rank reads data_parallel_rank. It returns false, without having moved, at
// what is none: the stream then counts as the one that it was configured as.
func (d *Decoder) rank() bool {
	if d.c.null() {
		d.batch.Rank = -1
		return true
	}
	v, ok := d.c.unsigned(math.MaxInt32)
	if !ok {
		d.batch.Odd++
		return false
	}
	d.batch.Rank = int32(v)
	return true
}

func (d *Decoder) events() error {
	n, ok := d.c.arrayLen()
	if !ok {
		return d.fail("events", "an array")
	}
	for i := range n {
		if len(d.batch.Events) == maxEvents {
			return d.fail("events", fmt.Sprintf("at most %d of them", maxEvents))
		}
		d.makeRoom(n - i)
		if !d.event() {
			return d.fail("events", fmt.Sprintf("%d whole events", n))
		}
	}
	return nil
}

// makeRoom makes room for an event where left more are announced: for twice as
// many as there are, but for no more than the bytes left can hold.
func (d *Decoder) makeRoom(left int) {
	have := len(d.batch.Events)
	if have == cap(d.batch.Events) {
		left = min(left, 1+(len(d.c.b)-d.c.pos)/leastEvent)
		d.batch.Events = slices.Grow(d.batch.Events, min(left, max(have, 16)))
	}
}

// outcome is what became of an event.
type outcome uint8

const (
	eventRead outcome = iota
	eventMalformed
	eventUnknown
)

// event reads the next event into the batch, or skips and counts it. It returns
// false if the event's end cannot be found.
func (d *Decoder) event() bool {
	start, odd := d.c.pos, d.batch.Odd
	hashes, remaining, tokens := len(d.hashes), len(d.remaining), len(d.tokens)
	extra, extraEnds := len(d.extra), len(d.extraEnds)

	last := len(d.batch.Events)
	d.batch.Events = append(d.batch.Events, Event{Group: NoGroup})
	ev := &d.batch.Events[last]
	result := d.readEvent(ev)
	switch {
	case result == eventRead && ev.Kind == AllBlocksCleared:
		// Nothing that stands beside its tag can change what it says.
		d.c.pos = start
		return d.c.skip()
	case result == eventRead:
		return true
	case result == eventUnknown:
		d.batch.Unknown++
	default:
		d.batch.Malformed++
		if ev.Kind == BlockRemoved {
			d.batch.LostRemovals++
		}
	}
	*ev = Event{}
	clear(d.extra[extra:])
	d.batch.Events, d.batch.Odd = d.batch.Events[:last], odd
	d.hashes, d.remaining, d.tokens = d.hashes[:hashes], d.remaining[:remaining], d.tokens[:tokens]
	d.extra, d.extraEnds = d.extra[:extra], d.extraEnds[:extraEnds]
	d.c.pos = start
	return d.c.skip()
}

func (d *Decoder) readEvent(ev *Event) outcome {
	switch d.c.kind() {
	case kindArray:
		return d.arrayEvent(ev)
	case kindMap:
		return d.mapEvent(ev)
	}
	return eventMalformed
}

// field is a value of an event, under whatever slot or key it stands.
type field uint8

const (
	fieldNone field = iota
	fieldType
	fieldBlockHashes
	fieldParent
	fieldTokenIDs
	fieldBlockSize
	fieldLoraID
	fieldMedium
	fieldLoraName
	fieldExtraKeys
	fieldGroup
	fieldSpec
	fieldWindow
	fieldLookahead
	fieldLocality
	fieldOwnership
	fieldSessionID
	fieldCacheSalt
	fieldRemaining
)

// fields is a set of them.
type fields uint32

func setOf(all ...field) (s fields) {
	for _, f := range all {
		s |= 1 << f
	}
	return s
}

func (s fields) has(f field) bool { return s>>f&1 != 0 }

var (
	// The slots of vLLM's arrays, in order.
	storedSlots = [...]field{fieldType, fieldBlockHashes, fieldParent, fieldTokenIDs, fieldBlockSize,
		fieldLoraID, fieldMedium, fieldLoraName, fieldExtraKeys, fieldGroup, fieldSpec, fieldWindow}
	removedSlots = [...]field{fieldType, fieldBlockHashes, fieldMedium, fieldGroup}

	// What an event must have, neither absent nor nil.
	storedNeeds  = setOf(fieldBlockHashes, fieldTokenIDs, fieldBlockSize)
	removedNeeds = setOf(fieldBlockHashes)

	// What is read of a map.
	storedReads  = ^setOf(fieldNone, fieldRemaining)
	removedReads = setOf(fieldType, fieldBlockHashes, fieldMedium, fieldGroup, fieldLocality,
		fieldOwnership, fieldSessionID, fieldRemaining)
)

// firstTypedSlot is where the slots of a BlockStored array begin that some
// producers leave out or shift: there the type of a value says what it is.
const firstTypedSlot = 9

// kindOf returns the kind of event that a tag names, 0 for none.
func kindOf(tag []byte) EventKind {
	switch string(tag) {
	case "BlockStored":
		return BlockStored
	case "BlockRemoved":
		return BlockRemoved
	case "AllBlocksCleared":
		return AllBlocksCleared
	}
	return 0
}

func (d *Decoder) arrayEvent(ev *Event) outcome {
	n, ok := d.c.arrayLen()
	if !ok || n == 0 {
		return eventMalformed
	}
	tag, ok := d.c.text()
	if !ok {
		return eventMalformed
	}
	ev.Kind = kindOf(tag)
	switch ev.Kind {
	case BlockStored:
		return d.storedArray(ev, n)
	case BlockRemoved:
		return d.removedArray(ev, n)
	case AllBlocksCleared:
		return eventRead
	}
	return eventUnknown
}

func (d *Decoder) storedArray(ev *Event, n int) outcome {
	var have fields
	for slot := 1; slot < n; slot++ {
		var f field
		switch {
		case slot < firstTypedSlot:
			f = storedSlots[slot]
		case slot < len(storedSlots):
			if f = d.typedSlot(storedSlots[slot], have); f == fieldNone {
				return eventMalformed
			}
		}
		if !d.slot(ev, f, &have) {
			return eventMalformed
		}
	}
	return d.finishStored(ev, have)
}

// typedSlot says which field stands in one of the last slots of a BlockStored
// array, where vLLM has group_idx, kind and window in this order. A string is
// the kind, wherever it stands; an integer is the group in the first of these
// slots, and the window in the last and after a kind. fieldNone is a value that
// could be either or is none of them: the event might then belong to another
// group than it would seem to.
func (d *Decoder) typedSlot(standard field, have fields) field {
	switch d.c.kind() {
	case kindNil:
		return standard
	case kindText:
		if !have.has(fieldSpec) {
			return fieldSpec
		}
	case kindInt:
		switch {
		case standard == fieldGroup:
			return fieldGroup
		case have.has(fieldWindow):
			return fieldNone
		case standard == fieldWindow, have.has(fieldSpec):
			return fieldWindow
		}
	}
	return fieldNone
}

func (d *Decoder) removedArray(ev *Event, n int) outcome {
	var have fields
	for slot := 1; slot < n; slot++ {
		f := fieldNone
		if slot < len(removedSlots) {
			f = removedSlots[slot]
		}
		if !d.slot(ev, f, &have) {
			return eventMalformed
		}
	}
	return d.finishRemoved(ev, have)
}

// slot reads the next value as field f and notes that f is there. nil is
// absence; fieldNone is skipped.
func (d *Decoder) slot(ev *Event, f field, have *fields) bool {
	switch {
	case d.c.null():
		return true
	case f == fieldNone:
		return d.c.skip()
	}
	*have |= 1 << f
	return d.read(ev, f)
}

func (d *Decoder) mapEvent(ev *Event) outcome {
	n, ok := d.c.mapLen()
	if !ok {
		return eventMalformed
	}
	tag, ok := d.mapTag(n)
	if !ok {
		return eventMalformed
	}
	ev.Kind = kindOf(tag)
	var reads fields
	switch ev.Kind {
	case BlockStored:
		reads = storedReads
	case BlockRemoved:
		reads = removedReads
	case AllBlocksCleared:
		return eventRead
	default:
		return eventUnknown
	}
	have, ok := d.pairs(ev, n, reads)
	switch {
	case !ok:
		return eventMalformed
	case ev.Kind == BlockRemoved:
		return d.finishRemoved(ev, have)
	}
	return d.finishStored(ev, have)
}

// mapTag finds the tag among n pairs and leaves the cursor before the first.
// vLLM writes it first.
func (d *Decoder) mapTag(n int) (tag []byte, ok bool) {
	start := d.c.pos
	defer func() { d.c.pos = start }()
	for range n {
		key, isText := d.c.text()
		switch {
		case isText && string(key) == "type":
			return d.c.text()
		case !isText && !d.c.skip(), !d.c.skip():
			return nil, false
		}
	}
	return nil, false
}

// pairs reads n pairs of an event. It fails at a field that cannot be read and
// at one that is there twice: nobody can say which of the two was meant.
func (d *Decoder) pairs(ev *Event, n int, reads fields) (have fields, ok bool) {
	var seen fields
	for range n {
		f := fieldNone
		if key, ok := d.c.text(); ok {
			f = fieldOf(key)
		} else if !d.c.skip() {
			return 0, false
		}
		switch {
		case !reads.has(f):
			f = fieldNone
		case seen.has(f):
			return 0, false
		}
		seen |= 1 << f
		if !d.slot(ev, f, &have) {
			return 0, false
		}
	}
	return have, true
}

// fieldOf returns the field of a map event's key.
func fieldOf(key []byte) field {
	switch string(key) {
	case "type":
		return fieldType
	case "block_hashes":
		return fieldBlockHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokenIDs
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoraID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoraName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpec
	case "kv_cache_spec_sliding_window":
		return fieldWindow
	case "lookahead_token_ids":
		return fieldLookahead
	case "locality":
		return fieldLocality
	case "ownership":
		return fieldOwnership
	case "session_id":
		return fieldSessionID
	case "cache_salt":
		return fieldCacheSalt
	case "remaining_copy_counts":
		return fieldRemaining
	}
	return fieldNone
}

// read reads the next value, which is not nil, as field f. It returns false if
// the value is not what f promises and the event cannot do without it: because
// its blocks would then pass for others, or for held where they are not.
func (d *Decoder) read(ev *Event, f field) (ok bool) {
	switch f {
	case fieldType:
		_, ok = d.c.text() // read before
	case fieldBlockHashes:
		ev.Hashes, ok = d.hashArray()
	case fieldParent:
		ev.Parent, ok = d.c.engineHash()
		ev.HasParent = ok
	case fieldTokenIDs:
		ok = d.tokenIDs(ev)
	case fieldBlockSize:
		ev.BlockSize, ok = d.uint32()
	case fieldLoraID:
		id, _, isInt := d.c.integer()
		ev.HasLoraID = !isInt || id != 0
		ok = isInt || d.odd()
	case fieldMedium:
		ev.Medium, ok = d.c.text()
	case fieldLoraName:
		ev.LoraName, ok = d.c.text()
	case fieldExtraKeys:
		ok = d.extraKeys(ev)
	case fieldGroup:
		var group uint64
		group, ok = d.c.unsigned(math.MaxInt32)
		ev.Group = int32(group)
	case fieldSpec:
		ev.Spec, ok = d.c.text()
	case fieldWindow:
		ev.Window, ok = d.uint32()
		ok = ok || d.odd()
	case fieldLookahead:
		ok = d.lookahead(ev)
	case fieldLocality:
		ev.Locality, ok = d.c.text()
	case fieldOwnership:
		ev.Ownership, ok = d.c.text()
		ok = ok || d.odd()
	case fieldSessionID:
		ev.SessionID, ok = d.c.text()
		ok = ok || d.odd()
	case fieldCacheSalt:
		ev.CacheSalt, ok = d.c.text()
	case fieldRemaining:
		ok = d.remainingCopies(ev)
	}
	return ok
}

// odd leaves a value out of the event.
func (d *Decoder) odd() bool {
	d.batch.Odd++
	return d.c.skip()
}

func (d *Decoder) uint32() (uint32, bool) {
	v, ok := d.c.unsigned(math.MaxUint32)
	return uint32(v), ok
}

func (d *Decoder) finishStored(ev *Event, have fields) outcome {
	switch {
	case have&storedNeeds != storedNeeds,
		ev.BlockSize == 0 && len(ev.Tokens) > 0,
		ev.Lookahead > 0 && ev.Pairs,
		ev.Lookahead > 0 && len(ev.LookaheadTokens) != ev.Lookahead*len(ev.Hashes):
		return eventMalformed
	}
	return eventRead
}

func (d *Decoder) finishRemoved(ev *Event, have fields) outcome {
	if have&removedNeeds != removedNeeds {
		return eventMalformed
	}
	if ev.Remaining != nil && len(ev.Remaining) != len(ev.Hashes) {
		ev.Remaining = nil
		d.batch.Odd++
	}
	return eventRead
}

// extend returns buf with n more elements and these elements, which are not
// cleared. n has been checked against the payload.
func extend[T any](buf []T, n int) (all, added []T) {
	begin := len(buf)
	if cap(buf)-begin < n {
		// append's own growth is by a quarter, which copies large buffers
		// five times over.
		buf = slices.Grow(buf, max(n, begin))
	}
	all = buf[:begin+n]
	return all, all[begin : begin+n : begin+n]
}

func (d *Decoder) hashArray() (hashes []EngineHash, ok bool) {
	n, ok := d.c.arrayLen()
	if !ok {
		return nil, false
	}
	d.hashes, hashes = extend(d.hashes, n)
	return hashes, d.c.engineHashes(hashes)
}

// tokenIDs reads tokens, or EAGLE pairs of them.
func (d *Decoder) tokenIDs(ev *Event) (ok bool) {
	n, ok := d.c.arrayLen()
	if !ok {
		return false
	}
	if d.c.kind() == kindArray && n > 0 {
		ev.Pairs = true
		ev.Tokens, ok = d.tokenPairs(n)
		return ok
	}
	d.tokens, ev.Tokens = extend(d.tokens, n)
	return d.c.uint32s(ev.Tokens)
}

// tokenPairs reads n pairs (a,b), (b,c), ... as n+1 tokens. Pairs that do not
// chain are no text.
func (d *Decoder) tokenPairs(n int) (tokens []uint32, ok bool) {
	d.tokens, tokens = extend(d.tokens, n+1)
	var pair [2]uint32
	for i := range n {
		if two, ok := d.c.arrayLen(); !ok || two != 2 || !d.c.uint32s(pair[:]) {
			return nil, false
		}
		if i > 0 && pair[0] != tokens[i] {
			return nil, false
		}
		tokens[i], tokens[i+1] = pair[0], pair[1]
	}
	return tokens, true
}

// lookahead reads one array of tokens per block, all equally long. An empty
// outer array is none.
func (d *Decoder) lookahead(ev *Event) bool {
	blocks, ok := d.c.arrayLen()
	if !ok {
		return false
	}
	begin := len(d.tokens)
	for i := range blocks {
		n, ok := d.c.arrayLen()
		if !ok || n == 0 || n > maxLookahead || i > 0 && n != ev.Lookahead {
			return false
		}
		ev.Lookahead = n
		var tokens []uint32
		d.tokens, tokens = extend(d.tokens, n)
		if !d.c.uint32s(tokens) {
			return false
		}
	}
	if blocks > 0 {
		ev.LookaheadTokens = d.tokens[begin:len(d.tokens):len(d.tokens)]
	}
	return true
}

// extraKeys reads one entry per block: nil, or an array of items.
func (d *Decoder) extraKeys(ev *Event) bool {
	n, ok := d.c.arrayLen()
	if !ok {
		return false
	}
	d.extraEnds, ev.ExtraEnd = extend(d.extraEnds, n)
	begin := len(d.extra)
	for i := range ev.ExtraEnd {
		if !d.c.null() && !d.extraItems() {
			return false
		}
		ev.ExtraEnd[i] = len(d.extra) - begin
	}
	ev.Extra = d.extra[begin:len(d.extra):len(d.extra)]
	return true
}

func (d *Decoder) extraItems() bool {
	n, ok := d.c.arrayLen()
	if !ok || n > d.maxExtra-len(d.extra) {
		return false
	}
	for range n {
		begin := d.c.pos
		form, text, ok := d.extraItem()
		if !ok {
			return false
		}
		var key []ExtraKey
		d.extra, key = extend(d.extra, 1)
		key[0] = ExtraKey{Form: form, Raw: d.c.b[begin:d.c.pos:d.c.pos], Text: text}
	}
	return true
}

// extraItem reads one item. No value is refused: what nobody knows is an
// identity that nobody can ask for.
func (d *Decoder) extraItem() (form ExtraForm, text []byte, ok bool) {
	begin := d.c.pos
	switch d.c.kind() {
	case kindText:
		form = ExtraString
		if d.c.isBin() {
			form = ExtraBytes
		}
		text, ok = d.c.text()
		return form, text, ok
	case kindArray:
		if text, ok = d.multimodalItem(); ok {
			return ExtraItem, text, true
		}
		d.c.pos = begin
	}
	return ExtraOther, nil, d.c.skip()
}

// multimodalItem reads [identifier, offset]; an identifier is a str.
func (d *Decoder) multimodalItem() (identifier []byte, ok bool) {
	n, ok := d.c.arrayLen()
	if !ok || n != 2 || d.c.isBin() {
		return nil, false
	}
	if identifier, ok = d.c.text(); !ok {
		return nil, false
	}
	_, _, ok = d.c.integer()
	return identifier, ok
}

// remainingCopies reads what a removal tells of the copies left. Where that is
// unreadable, the removal is one without it: of one copy each.
func (d *Decoder) remainingCopies(ev *Event) bool {
	begin := d.c.pos
	if n, ok := d.c.arrayLen(); ok {
		d.remaining, ev.Remaining = extend(d.remaining, n)
		if d.c.uint32s(ev.Remaining) {
			return true
		}
	}
	ev.Remaining = nil
	d.c.pos = begin
	return d.odd()
}
