package zmqwire

import (
	"encoding/binary"
	"fmt"

	"github.com/vmihailenco/msgpack/v5"
)

// EncodeOptions say in which of vLLM's forms a batch is written. The zero value
// is that of vLLM 0.22 and 0.23: arrays, integer hashes.
type EncodeOptions struct {
	// Maps writes events as maps, as vLLM 0.24 and later do.
	Maps bool
	// Map16 writes the head of a BlockStored map in three bytes, as msgspec
	// does for a struct that declares 16 fields or more: vLLM 0.33's.
	Map16 bool
	// BytesHashes writes engine hashes as 32 bytes, the handle last.
	BytesHashes bool
	// Slots is the length of a BlockStored array, tag included: 6 (vLLM 0.9),
	// 8 (0.15) or 12 (0.22). 0 is 12.
	Slots int
}

// AppendBatch appends the msgpack form of b to dst. It refuses what the asked
// form cannot carry, and an extra key whose Raw is not one msgpack value;
// ExtraText and ExtraMM make such keys.
func AppendBatch(dst []byte, b *Batch, o EncodeOptions) ([]byte, error) {
	switch o.Slots {
	case 0:
		o.Slots = len(storedSlots)
	case 6, 8, 12:
	default:
		return dst, fmt.Errorf("zmqwire: encode: %d slots, expected 6, 8 or 12", o.Slots)
	}
	out := appender{dst}
	e := batchEncoder{Encoder: msgpack.GetEncoder(), options: o, out: &out}
	defer msgpack.PutEncoder(e.Encoder)
	e.Reset(&out)
	e.UseCompactInts(true)
	e.array(3)
	e.check(e.EncodeFloat64(b.Timestamp))
	e.array(len(b.Events))
	for i := range b.Events {
		if e.event(&b.Events[i]); e.err != nil {
			return dst, fmt.Errorf("zmqwire: encode: event %d: %w", i, e.err)
		}
	}
	if b.Rank < 0 {
		e.null()
	} else {
		e.uint(uint64(b.Rank))
	}
	if e.err != nil {
		return dst, fmt.Errorf("zmqwire: encode: %w", e.err)
	}
	return out.b, nil
}

// appender is a bytes.Buffer of the caller's bytes.
type appender struct{ b []byte }

func (a *appender) Write(p []byte) (int, error) {
	a.b = append(a.b, p...)
	return len(p), nil
}

func (a *appender) WriteByte(c byte) error {
	a.b = append(a.b, c)
	return nil
}

// batchEncoder keeps the first error.
type batchEncoder struct {
	*msgpack.Encoder
	options EncodeOptions
	out     *appender
	err     error
}

func (e *batchEncoder) check(err error) {
	if e.err == nil {
		e.err = err
	}
}

func (e *batchEncoder) array(n int)   { e.check(e.EncodeArrayLen(n)) }
func (e *batchEncoder) uint(v uint64) { e.check(e.EncodeUint(v)) }
func (e *batchEncoder) null()         { e.check(e.EncodeNil()) }
func (e *batchEncoder) key(s string)  { e.check(e.EncodeString(s)) }

func (e *batchEncoder) text(s []byte) {
	if s == nil {
		e.null()
		return
	}
	e.check(e.EncodeString(string(s)))
}

func (e *batchEncoder) event(ev *Event) {
	switch {
	case ev.Kind != BlockStored && ev.Kind != BlockRemoved && ev.Kind != AllBlocksCleared:
		e.check(fmt.Errorf("kind %d, expected a known one", ev.Kind))
	case e.options.Maps:
		e.mapEvent(ev)
	default:
		if name := e.unfit(ev); name != "" {
			e.check(fmt.Errorf("%s does not fit into an array of %d slots", name, e.options.Slots))
			return
		}
		e.arrayEvent(ev)
	}
}

// entry is one key of a map event, or one slot of an array.
type entry struct {
	field field
	name  string
	// always says that vLLM writes the key even where its value is nil.
	always bool
	has    func(*Event) bool
	write  func(*batchEncoder, *Event)
}

// entries in the order of vLLM's structs; the arrays' slots come first.
var (
	hashesEntry = entry{fieldBlockHashes, "block_hashes", true, nil,
		func(e *batchEncoder, ev *Event) { e.hashes(ev.Hashes) }}
	mediumEntry = entry{fieldMedium, "medium", true, func(ev *Event) bool { return ev.Medium != nil },
		func(e *batchEncoder, ev *Event) { e.text(ev.Medium) }}
	groupEntry = entry{fieldGroup, "group_idx", false, func(ev *Event) bool { return ev.Group != NoGroup },
		func(e *batchEncoder, ev *Event) { e.uint(uint64(ev.Group)) }}
	localityEntry = entry{fieldLocality, "locality", false, func(ev *Event) bool { return ev.Locality != nil },
		func(e *batchEncoder, ev *Event) { e.text(ev.Locality) }}
	ownershipEntry = entry{fieldOwnership, "ownership", false, func(ev *Event) bool { return ev.Ownership != nil },
		func(e *batchEncoder, ev *Event) { e.text(ev.Ownership) }}
	sessionEntry = entry{fieldSessionID, "session_id", false, func(ev *Event) bool { return ev.SessionID != nil },
		func(e *batchEncoder, ev *Event) { e.text(ev.SessionID) }}

	storedEntries = []entry{
		hashesEntry,
		{fieldParent, "parent_block_hash", true, func(ev *Event) bool { return ev.HasParent },
			func(e *batchEncoder, ev *Event) { e.hash(ev.Parent) }},
		{fieldTokenIDs, "token_ids", true, nil,
			func(e *batchEncoder, ev *Event) { e.tokenIDs(ev) }},
		{fieldBlockSize, "block_size", true, nil,
			func(e *batchEncoder, ev *Event) { e.uint(uint64(ev.BlockSize)) }},
		{fieldLoraID, "lora_id", true, func(ev *Event) bool { return ev.HasLoraID },
			func(e *batchEncoder, ev *Event) { e.uint(1) }},
		mediumEntry,
		{fieldLoraName, "lora_name", true, func(ev *Event) bool { return ev.LoraName != nil },
			func(e *batchEncoder, ev *Event) { e.text(ev.LoraName) }},
		{fieldExtraKeys, "extra_keys", false, func(ev *Event) bool { return ev.ExtraEnd != nil },
			func(e *batchEncoder, ev *Event) { e.extraKeys(ev) }},
		groupEntry,
		{fieldSpec, "kv_cache_spec_kind", false, func(ev *Event) bool { return ev.Spec != nil },
			func(e *batchEncoder, ev *Event) { e.text(ev.Spec) }},
		{fieldWindow, "kv_cache_spec_sliding_window", false, func(ev *Event) bool { return ev.Window != 0 },
			func(e *batchEncoder, ev *Event) { e.uint(uint64(ev.Window)) }},
		{fieldLookahead, "lookahead_token_ids", false, func(ev *Event) bool { return ev.Lookahead != 0 },
			func(e *batchEncoder, ev *Event) { e.lookahead(ev) }},
		localityEntry,
		ownershipEntry,
		sessionEntry,
		{fieldCacheSalt, "cache_salt", false, func(ev *Event) bool { return ev.CacheSalt != nil },
			func(e *batchEncoder, ev *Event) { e.text(ev.CacheSalt) }},
	}
	removedEntries = []entry{
		hashesEntry,
		mediumEntry,
		groupEntry,
		localityEntry,
		ownershipEntry,
		sessionEntry,
		{fieldRemaining, "remaining_copy_counts", false, func(ev *Event) bool { return ev.Remaining != nil },
			func(e *batchEncoder, ev *Event) { e.uints(ev.Remaining) }},
	}
)

// layout returns an event's entries and how many of them its array holds.
func (e *batchEncoder) layout(ev *Event) (entries []entry, slots int) {
	switch ev.Kind {
	case BlockStored:
		return storedEntries, e.options.Slots - 1
	case BlockRemoved:
		// medium came with 0.15's eighth slot of a store, group_idx with
		// 0.22's twelfth.
		return removedEntries, map[int]int{6: 1, 8: 2, 12: 3}[e.options.Slots]
	}
	return nil, 0
}

// unfit names the first value that an array cannot carry.
func (e *batchEncoder) unfit(ev *Event) string {
	entries, slots := e.layout(ev)
	for _, en := range entries[slots:] {
		if en.has != nil && en.has(ev) {
			return en.name
		}
	}
	return ""
}

func (e *batchEncoder) arrayEvent(ev *Event) {
	entries, slots := e.layout(ev)
	e.array(1 + slots)
	e.key(ev.Kind.String())
	for _, en := range entries[:slots] {
		e.value(en, ev)
	}
}

func (e *batchEncoder) mapEvent(ev *Event) {
	entries, _ := e.layout(ev)
	n := 1
	for _, en := range entries {
		if en.always || en.has(ev) {
			n++
		}
	}
	if e.options.Map16 && ev.Kind == BlockStored {
		_, err := e.out.Write([]byte{0xde, 0, byte(n)})
		e.check(err)
	} else {
		e.check(e.EncodeMapLen(n))
	}
	e.key("type")
	e.key(ev.Kind.String())
	for _, en := range entries {
		if en.always || en.has(ev) {
			e.key(en.name)
			e.value(en, ev)
		}
	}
}

func (e *batchEncoder) value(en entry, ev *Event) {
	if en.has != nil && !en.has(ev) {
		e.null()
		return
	}
	en.write(e, ev)
}

func (e *batchEncoder) hash(h EngineHash) {
	if !e.options.BytesHashes {
		e.uint(uint64(h))
		return
	}
	var b [32]byte // of the length of a SHA-256
	binary.BigEndian.PutUint64(b[24:], uint64(h))
	e.check(e.EncodeBytes(b[:]))
}

func (e *batchEncoder) hashes(hs []EngineHash) {
	e.array(len(hs))
	for _, h := range hs {
		e.hash(h)
	}
}

func (e *batchEncoder) uints(vs []uint32) {
	e.array(len(vs))
	for _, v := range vs {
		e.uint(uint64(v))
	}
}

func (e *batchEncoder) tokenIDs(ev *Event) {
	if !ev.Pairs {
		e.uints(ev.Tokens)
		return
	}
	e.array(max(len(ev.Tokens)-1, 0))
	for i := 1; i < len(ev.Tokens); i++ {
		e.uints(ev.Tokens[i-1 : i+1])
	}
}

func (e *batchEncoder) lookahead(ev *Event) {
	if len(ev.LookaheadTokens) != ev.Lookahead*len(ev.Hashes) {
		e.check(fmt.Errorf("lookahead_token_ids: %d tokens, expected %d for each of %d blocks",
			len(ev.LookaheadTokens), ev.Lookahead, len(ev.Hashes)))
		return
	}
	e.array(len(ev.Hashes))
	for i := range ev.Hashes {
		e.uints(ev.LookaheadTokens[i*ev.Lookahead : (i+1)*ev.Lookahead])
	}
}

func (e *batchEncoder) extraKeys(ev *Event) {
	e.array(len(ev.ExtraEnd))
	begin := 0
	for _, end := range ev.ExtraEnd {
		if end < begin || end > len(ev.Extra) {
			e.check(fmt.Errorf("extra_keys: an entry that ends at %d, expected %d to %d", end, begin, len(ev.Extra)))
			return
		}
		if end == begin {
			e.null()
			continue
		}
		e.array(end - begin)
		for _, key := range ev.Extra[begin:end] {
			e.raw(key.Raw)
		}
		begin = end
	}
}

// raw writes what must be one msgpack value.
func (e *batchEncoder) raw(b []byte) {
	c := cursor{b: b}
	if !c.skip() || c.pos != len(b) {
		e.check(fmt.Errorf("extra_keys: an item of %d raw bytes, expected one msgpack value", len(b)))
		return
	}
	_, err := e.out.Write(b)
	e.check(err)
}

// ExtraText returns an extra key that is a bare string: an adapter's name or a
// cache salt.
func ExtraText(s string) ExtraKey {
	return rawKey(ExtraString, func(e *msgpack.Encoder) error { return e.EncodeString(s) })
}

// ExtraMM returns the extra key of a multimodal item: its identifier, and where
// it begins, counted from the block's begin (so it can be negative).
func ExtraMM(identifier string, offset int64) ExtraKey {
	return rawKey(ExtraItem, func(e *msgpack.Encoder) error {
		if err := e.EncodeArrayLen(2); err != nil {
			return err
		}
		if err := e.EncodeString(identifier); err != nil {
			return err
		}
		return e.EncodeInt(offset)
	})
}

func rawKey(form ExtraForm, encode func(*msgpack.Encoder) error) ExtraKey {
	var out appender
	if err := encode(msgpack.NewEncoder(&out)); err != nil {
		panic("BUG: writing to memory failed: " + err.Error())
	}
	c := cursor{b: out.b}
	if form == ExtraItem {
		c.arrayLen()
	}
	text, _ := c.text()
	return ExtraKey{Form: form, Raw: out.b, Text: text}
}
