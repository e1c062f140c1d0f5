package zmqwire

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// node is a msgpack value as vmihailenco/msgpack reads it: the second opinion
// on every byte that the cursor reads.
type node struct {
	kind     valueKind
	bin      bool
	bits     uint64 // of an integer
	negative bool
	float    float64
	text     []byte
	list     []node // of a map: key, value, key, value, ...
	raw      []byte
}

// parse reads one value and returns how many bytes it has. The library takes
// counts for true and recurses, so the cursor must have skipped the value first
// and it must be small.
func parse(b []byte) (n node, size int, err error) {
	r := bytes.NewReader(b)
	n, err = parseNode(msgpack.NewDecoder(r), r, b)
	return n, len(b) - r.Len(), err
}

func parseNode(d *msgpack.Decoder, r *bytes.Reader, b []byte) (n node, err error) {
	begin := len(b) - r.Len()
	code, err := d.PeekCode()
	if err != nil {
		return n, err
	}
	switch {
	case code == 0xc0:
		n.kind, err = kindNil, d.DecodeNil()
	case code == 0xc2 || code == 0xc3:
		n.kind = kindBool
		_, err = d.DecodeBool()
	case code == 0xcf:
		n.kind = kindInt
		n.bits, err = d.DecodeUint64()
	case code <= 0x7f || code >= 0xe0 || 0xcc <= code && code <= 0xd3:
		n.kind = kindInt
		var v int64
		v, err = d.DecodeInt64()
		n.bits, n.negative = uint64(v), v < 0
	case code == 0xca || code == 0xcb:
		n.kind = kindFloat
		n.float, err = d.DecodeFloat64()
	case code&0xe0 == 0xa0 || 0xd9 <= code && code <= 0xdb || 0xc4 <= code && code <= 0xc6:
		n.kind, n.bin = kindText, code <= 0xc6 && code >= 0xc4
		n.text, err = d.DecodeBytes()
	case code&0xf0 == 0x90 || code == 0xdc || code == 0xdd:
		n.kind = kindArray
		var count int
		if count, err = d.DecodeArrayLen(); err == nil {
			n.list, err = parseNodes(d, r, b, count)
		}
	case code&0xf0 == 0x80 || code == 0xde || code == 0xdf:
		n.kind = kindMap
		var count int
		if count, err = d.DecodeMapLen(); err == nil {
			n.list, err = parseNodes(d, r, b, 2*count)
		}
	case 0xd4 <= code && code <= 0xd8 || 0xc7 <= code && code <= 0xc9:
		n.kind = kindExt
		var length int
		if _, length, err = d.DecodeExtHeader(); err == nil {
			err = d.ReadFull(make([]byte, length))
		}
	default:
		err = errors.New("no msgpack")
	}
	n.raw = b[begin : len(b)-r.Len()]
	return n, err
}

func parseNodes(d *msgpack.Decoder, r *bytes.Reader, b []byte, count int) (list []node, err error) {
	for range count {
		n, err := parseNode(d, r, b)
		if err != nil {
			return nil, err
		}
		list = append(list, n)
	}
	return list, nil
}

func (n node) within(limit uint64) bool {
	return n.kind == kindInt && !n.negative && n.bits <= limit
}

// model reads batches as docs/wire.md tells it, one named value after another.
// It shares no code with the Decoder.
type model struct {
	batch    Batch
	extra    int
	maxExtra int
}

// pair is a named value of an event.
type pair struct {
	name  string
	value node
}

func modelBatch(payload []byte) (*Batch, bool) {
	n, size, err := parse(payload)
	if err != nil || size != len(payload) {
		return nil, false
	}
	m := model{batch: Batch{Rank: -1}, maxExtra: 1024 + len(payload)/8}
	var parts []pair
	switch n.kind {
	case kindArray:
		for i, v := range n.list {
			if i < 3 {
				parts = append(parts, pair{[]string{"ts", "events", "data_parallel_rank"}[i], v})
			}
		}
		if len(parts) < 2 {
			return nil, false
		}
	case kindMap:
		parts = pairsOf(n)
	}
	found := 0
	for _, p := range parts {
		switch p.name {
		case "ts":
			m.timestamp(p.value)
		case "data_parallel_rank":
			m.rank(p.value)
		case "events":
			found++
			if p.value.kind != kindArray {
				return nil, false
			}
			for _, ev := range p.value.list {
				m.event(ev)
			}
		}
	}
	return &m.batch, found == 1
}

// pairsOf returns a map's values that have a name.
func pairsOf(n node) (pairs []pair) {
	for i := 0; i < len(n.list); i += 2 {
		if key := n.list[i]; key.kind == kindText {
			pairs = append(pairs, pair{string(key.text), n.list[i+1]})
		}
	}
	return pairs
}

func (m *model) timestamp(v node) {
	switch {
	case v.kind == kindFloat:
		m.batch.Timestamp = v.float
	case v.kind == kindInt && v.negative:
		m.batch.Timestamp = float64(int64(v.bits))
	case v.kind == kindInt:
		m.batch.Timestamp = float64(v.bits)
	default:
		m.batch.Odd++
	}
}

func (m *model) rank(v node) {
	switch {
	case v.kind == kindNil:
		m.batch.Rank = -1
	case v.within(math.MaxInt32):
		m.batch.Rank = int32(v.bits)
	default:
		m.batch.Odd++
	}
}

func (m *model) event(n node) {
	ev := Event{Group: NoGroup}
	odd, extra := m.batch.Odd, m.extra
	tag, values, ok := m.values(n)
	switch {
	case !ok:
	case tag == "BlockStored":
		ev.Kind = BlockStored
		ok = m.fill(&ev, values) && storedWhole(&ev, values)
	case tag == "BlockRemoved":
		ev.Kind = BlockRemoved
		ok = m.fill(&ev, values) && named(values, "block_hashes")
		if ok && ev.Remaining != nil && len(ev.Remaining) != len(ev.Hashes) {
			ev.Remaining = nil
			m.batch.Odd++
		}
		if !ok {
			m.batch.LostRemovals++
		}
	case tag == "AllBlocksCleared":
		ev.Kind = AllBlocksCleared
	default:
		m.batch.Unknown++
		return
	}
	if !ok {
		m.batch.Malformed++
		m.batch.Odd, m.extra = odd, extra
		return
	}
	m.batch.Events = append(m.batch.Events, ev)
}

// values returns an event's tag and the values that are read of it.
func (m *model) values(n node) (tag string, values []pair, ok bool) {
	switch n.kind {
	case kindArray:
		if len(n.list) == 0 || n.list[0].kind != kindText {
			return "", nil, false
		}
		tag = string(n.list[0].text)
		switch tag {
		case "BlockStored":
			values, ok = storedPairs(n.list[1:])
			if !ok {
				values = []pair{{"misplaced", node{}}}
			}
		case "BlockRemoved":
			for i, v := range n.list[1:] {
				if i < 3 {
					values = append(values, pair{[]string{"block_hashes", "medium", "group_idx"}[i], v})
				}
			}
		}
		return tag, values, true
	case kindMap:
		for _, p := range pairsOf(n) {
			if p.name == "type" {
				return string(p.value.text), pairsOf(n), p.value.kind == kindText
			}
		}
	}
	return "", nil, false
}

// storedPairs names the slots of a BlockStored array.
func storedPairs(slots []node) (values []pair, ok bool) {
	var spec, window bool
	for i, v := range slots {
		switch {
		case i < 8:
			name := []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"}[i]
			values = append(values, pair{name, v})
		case i > 10 || v.kind == kindNil:
		case v.kind == kindText && !spec:
			spec = true
			values = append(values, pair{"kv_cache_spec_kind", v})
		case v.kind == kindInt && i == 8:
			values = append(values, pair{"group_idx", v})
		case v.kind == kindInt && !window && (spec || i == 10):
			window = true
			values = append(values, pair{"kv_cache_spec_sliding_window", v})
		default:
			return nil, false
		}
	}
	return values, true
}

func named(values []pair, name string) bool {
	for _, p := range values {
		if p.name == name && p.value.kind != kindNil {
			return true
		}
	}
	return false
}

func storedWhole(ev *Event, values []pair) bool {
	if !named(values, "block_hashes") || !named(values, "token_ids") || !named(values, "block_size") {
		return false
	}
	if ev.BlockSize == 0 && len(ev.Tokens) > 0 {
		return false
	}
	return ev.Lookahead == 0 || !ev.Pairs && len(ev.LookaheadTokens) == ev.Lookahead*len(ev.Hashes)
}

func (m *model) fill(ev *Event, values []pair) bool {
	seen := map[string]bool{}
	for _, p := range values {
		if !reads(ev.Kind, p.name) {
			continue
		}
		if seen[p.name] {
			return false
		}
		seen[p.name] = true
		if p.value.kind != kindNil && !m.value(ev, p.name, p.value) {
			return false
		}
	}
	return true
}

func reads(kind EventKind, name string) bool {
	switch name {
	case "misplaced", "type", "block_hashes", "medium", "group_idx", "locality", "ownership", "session_id":
		return true
	case "remaining_copy_counts":
		return kind == BlockRemoved
	case "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "extra_keys", "kv_cache_spec_kind",
		"kv_cache_spec_sliding_window", "lookahead_token_ids", "cache_salt":
		return kind == BlockStored
	}
	return false
}

func (m *model) value(ev *Event, name string, v node) (ok bool) {
	text := func(dst *[]byte) bool { *dst = v.text; return v.kind == kindText }
	oddly := func(ok bool) bool {
		if !ok {
			m.batch.Odd++
		}
		return true
	}
	switch name {
	case "type":
		return v.kind == kindText
	case "block_hashes":
		return v.kind == kindArray && eachOf(v, func(h node) bool {
			hash, ok := handle(h)
			ev.Hashes = append(ev.Hashes, hash)
			return ok
		})
	case "parent_block_hash":
		ev.HasParent = true
		ev.Parent, ok = handle(v)
		return ok
	case "token_ids":
		return tokens(ev, v)
	case "block_size":
		ev.BlockSize = uint32(v.bits)
		return v.within(math.MaxUint32)
	case "lora_id":
		ev.HasLoraID = v.kind != kindInt || v.bits != 0
		return oddly(v.kind == kindInt)
	case "medium":
		return text(&ev.Medium)
	case "lora_name":
		return text(&ev.LoraName)
	case "extra_keys":
		return m.extraKeys(ev, v)
	case "group_idx":
		ev.Group = int32(v.bits)
		return v.within(math.MaxInt32)
	case "kv_cache_spec_kind":
		return text(&ev.Spec)
	case "kv_cache_spec_sliding_window":
		if v.within(math.MaxUint32) {
			ev.Window = uint32(v.bits)
		}
		return oddly(v.within(math.MaxUint32))
	case "lookahead_token_ids":
		return lookahead(ev, v)
	case "locality":
		return text(&ev.Locality)
	case "ownership":
		return oddly(text(&ev.Ownership))
	case "session_id":
		return oddly(text(&ev.SessionID))
	case "cache_salt":
		return text(&ev.CacheSalt)
	case "remaining_copy_counts":
		ev.Remaining = []uint32{}
		if v.kind != kindArray || !eachOf(v, func(n node) bool {
			ev.Remaining = append(ev.Remaining, uint32(n.bits))
			return n.within(math.MaxUint32)
		}) {
			ev.Remaining = nil
		}
		return oddly(ev.Remaining != nil)
	}
	return false
}

func eachOf(v node, f func(node) bool) bool {
	for _, n := range v.list {
		if !f(n) {
			return false
		}
	}
	return true
}

func handle(v node) (h EngineHash, ok bool) {
	for _, b := range v.text[max(0, len(v.text)-8):] {
		h = h<<8 + EngineHash(b)
	}
	if v.kind == kindInt {
		h = EngineHash(v.bits)
	}
	return h, v.kind == kindInt || v.kind == kindText
}

func tokens(ev *Event, v node) bool {
	if v.kind != kindArray {
		return false
	}
	ev.Pairs = len(v.list) > 0 && v.list[0].kind == kindArray
	for i, n := range v.list {
		if !ev.Pairs {
			ev.Tokens = append(ev.Tokens, uint32(n.bits))
			if !n.within(math.MaxUint32) {
				return false
			}
			continue
		}
		if n.kind != kindArray || len(n.list) != 2 || !n.list[0].within(math.MaxUint32) || !n.list[1].within(math.MaxUint32) {
			return false
		}
		if i > 0 && uint64(ev.Tokens[i]) != n.list[0].bits {
			return false
		}
		ev.Tokens = append(ev.Tokens[:i], uint32(n.list[0].bits), uint32(n.list[1].bits))
	}
	return true
}

func lookahead(ev *Event, v node) bool {
	return v.kind == kindArray && eachOf(v, func(block node) bool {
		if block.kind != kindArray || len(block.list) == 0 || len(block.list) > math.MaxInt16 {
			return false
		}
		if ev.Lookahead != 0 && ev.Lookahead != len(block.list) {
			return false
		}
		ev.Lookahead = len(block.list)
		return eachOf(block, func(n node) bool {
			ev.LookaheadTokens = append(ev.LookaheadTokens, uint32(n.bits))
			return n.within(math.MaxUint32)
		})
	})
}

func (m *model) extraKeys(ev *Event, v node) bool {
	ev.ExtraEnd = []int{}
	return v.kind == kindArray && eachOf(v, func(entry node) bool {
		if entry.kind != kindArray && entry.kind != kindNil {
			return false
		}
		if m.extra += len(entry.list); m.extra > m.maxExtra {
			return false
		}
		for _, item := range entry.list {
			key := ExtraKey{Form: ExtraOther, Raw: item.raw}
			switch {
			case item.kind == kindText && item.bin:
				key.Form, key.Text = ExtraBytes, item.text
			case item.kind == kindText:
				key.Form, key.Text = ExtraString, item.text
			case item.kind == kindArray && len(item.list) == 2 && item.list[0].kind == kindText && !item.list[0].bin && item.list[1].kind == kindInt:
				key.Form, key.Text = ExtraItem, item.list[0].text
			}
			ev.Extra = append(ev.Extra, key)
		}
		ev.ExtraEnd = append(ev.ExtraEnd, len(ev.Extra))
		return true
	})
}

// checkOracle compares the Decoder with the model on one payload.
func checkOracle(t *testing.T, d *Decoder, payload []byte) {
	t.Helper()
	got, err := d.Decode(payload)
	if c := (cursor{b: payload}); !c.skip() {
		if err == nil {
			t.Fatalf("%x: decoded, though it cannot be skipped", payload)
		}
		return
	}
	want, ok := modelBatch(payload)
	if ok != (err == nil) {
		t.Fatalf("%x\nmodel: readable %v, Decoder: %v", payload, ok, err)
	}
	if err != nil {
		if !errors.Is(err, ErrMalformed) {
			t.Fatalf("%v: not ErrMalformed", err)
		}
		return
	}
	if g, w := showBatch(got), showBatch(want); g != w {
		t.Fatalf("%x\n got %s\nwant %s", payload, g, w)
	}
	sameTime := got.Timestamp == want.Timestamp || math.IsNaN(got.Timestamp) && math.IsNaN(want.Timestamp)
	if !sameTime || got.Rank != want.Rank {
		t.Fatalf("%x\n got ts %v, rank %d\nwant ts %v, rank %d", payload, got.Timestamp, got.Rank, want.Timestamp, want.Rank)
	}
}

// TestDecodeAgainstModel makes batches of fields that are right, wrong, twice
// there and out of place, and compares the Decoder with the model.
func TestDecodeAgainstModel(t *testing.T) {
	if testing.Short() {
		t.Skip("20 000 random batches")
	}
	r := rand.New(rand.NewPCG(7, 11))
	var d Decoder
	outcomes := map[string]int{}
	for range 20_000 {
		var events arr
		for range r.IntN(4) {
			events = append(events, randomEvent(r))
		}
		payload := pack(t, arr{1.5, events, 0})
		checkOracle(t, &d, payload)
		if t.Failed() {
			return
		}
		outcomes["events"] += len(d.batch.Events)
		outcomes["malformed"] += d.batch.Malformed
		outcomes["unknown"] += d.batch.Unknown
		outcomes["odd"] += d.batch.Odd
	}
	for _, name := range []string{"events", "malformed", "unknown", "odd"} {
		if outcomes[name] < 200 {
			t.Errorf("only %d %s: the batches are too much alike", outcomes[name], name)
		}
	}
}

// fieldValues are values that vLLM sends in a field. What is sent in another
// field is what nobody promised in this one.
var fieldValues = map[string]arr{
	"block_hashes":                 {arr{7, 8}, arr{uint64(1 << 63), []byte("123456789")}, arr{-1, "ab"}, arr{}},
	"parent_block_hash":            {nil, 5, -5, []byte{1, 2}},
	"token_ids":                    {arr{1, 200, 300, 70000}, arr{arr{1, 2}, arr{2, 3}}, arr{}},
	"block_size":                   {2, 1, 0},
	"lora_id":                      {nil, 0, 3},
	"medium":                       {nil, "GPU", "", []byte("CPU")},
	"lora_name":                    {nil, "a"},
	"extra_keys":                   {nil, arr{nil, nil}, arr{arr{"a", arr{"b", -1}}, arr{}}, arr{arr{nil, 1, arr{"b"}, []byte("c")}}},
	"group_idx":                    {nil, 0, 2},
	"kv_cache_spec_kind":           {nil, "full_attention", "mamba"},
	"kv_cache_spec_sliding_window": {nil, 128},
	"lookahead_token_ids":          {nil, arr{}, arr{arr{1}, arr{2}}, arr{arr{1, 2}, arr{3, 4}}},
	"locality":                     {nil, "LOCAL"},
	"ownership":                    {nil, "o"},
	"session_id":                   {nil, "s"},
	"cache_salt":                   {nil, "s"},
	"remaining_copy_counts":        {nil, arr{0, 1}, arr{2}},
	"future":                       {1.5, true, arr{arr{}}, obj{1, 2}, raw{0xd4, 1, 0}},
}

func randomEvent(r *rand.Rand) any {
	names := []string{"parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "lookahead_token_ids", "locality", "ownership",
		"session_id", "cache_salt", "remaining_copy_counts", "future"}
	value := func(name string) any {
		if r.IntN(15) == 0 {
			name = names[r.IntN(len(names))]
		}
		values := fieldValues[name]
		return values[r.IntN(len(values))]
	}
	tag := []string{"BlockStored", "BlockStored", "BlockStored", "BlockRemoved", "BlockRemoved", "AllBlocksCleared", "BlockMoved"}[r.IntN(7)]
	slots := []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "future", "future"}
	if tag == "BlockRemoved" {
		slots = []string{"block_hashes", "medium", "group_idx", "future"}
	}
	if r.IntN(2) == 0 {
		event := arr{tag}
		for _, name := range slots[:len(slots)-r.IntN(len(slots))] {
			event = append(event, value(name))
		}
		return event
	}
	keys := []string{"block_hashes", "token_ids", "block_size"}
	for range r.IntN(6) {
		keys = append(keys, names[r.IntN(len(names))])
	}
	if r.IntN(10) == 0 {
		keys = keys[1:]
	}
	event := obj{}
	at := r.IntN(len(keys) + 1)
	for i, key := range keys {
		if i == at {
			event = append(event, "type", tag)
		}
		event = append(event, key, value(key))
	}
	if at == len(keys) {
		event = append(event, "type", tag)
	}
	return event
}
