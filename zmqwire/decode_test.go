package zmqwire

import (
	"bytes"
	"errors"
	"math"
	"runtime"
	"strings"
	"testing"
)

// batchOf packs events into a batch of vLLM's form.
func batchOf(t testing.TB, events ...any) []byte {
	t.Helper()
	return pack(t, arr{1.5, arr(events), 0})
}

// stored is a BlockStored map of one block, with more keys behind.
func stored(more ...any) obj {
	return append(obj{"type", "BlockStored", "block_hashes", arr{7}, "parent_block_hash", nil,
		"token_ids", arr{1, 2}, "block_size", 2}, more...)
}

// storedSlotsWith is a BlockStored array of one block, with more slots behind.
func storedSlotsWith(more ...any) arr {
	return append(arr{"BlockStored", arr{7}, nil, arr{1, 2}, 2}, more...)
}

const (
	plain   = "BlockStored [7] tokens=[1 2]/2"
	dropped = "malformed=1 unknown=0 odd=0 lost_removals=0"
	lost    = "malformed=1 unknown=0 odd=0 lost_removals=1"
	unknown = "malformed=0 unknown=1 odd=0 lost_removals=0"
	odd     = "\nmalformed=0 unknown=0 odd=1 lost_removals=0"
)

// TestDecodeStored is about what BlockStored says, one decision a line.
func TestDecodeStored(t *testing.T) {
	f := decodes(t)

	// Lengths of arrays.
	f(storedSlotsWith()[:4], dropped)
	f(storedSlotsWith(), plain)
	f(storedSlotsWith(nil), plain)
	f(storedSlotsWith(nil, "GPU", nil, nil, nil, nil, nil), plain+` medium="GPU"`)
	f(storedSlotsWith(nil, "CPU", "a", arr{nil}, 1, "mamba", 4, "more", arr{}, 1),
		plain+` medium="CPU" lora="a" spec="mamba" extra=[()] group=1 window=4`)

	// Slots from 9 on go by their type.
	f(storedSlotsWith(nil, nil, nil, nil, "mamba"), plain+` spec="mamba"`)
	f(storedSlotsWith(nil, nil, nil, nil, "mamba", 4), plain+` spec="mamba" window=4`)
	f(storedSlotsWith(nil, nil, nil, nil, "mamba", nil, 4), plain+` spec="mamba" window=4`)
	f(storedSlotsWith(nil, nil, nil, nil, nil, "mamba", 4), plain+` spec="mamba" window=4`)
	f(storedSlotsWith(nil, nil, nil, nil, nil, nil, 4), plain+` window=4`)
	f(storedSlotsWith(nil, nil, nil, nil, 3, nil, 4), plain+` group=3 window=4`)
	f(storedSlotsWith(nil, nil, nil, nil, 3, nil, "mamba"), plain+` spec="mamba" group=3`)
	f(storedSlotsWith(nil, nil, nil, nil, nil, 3), dropped)
	f(storedSlotsWith(nil, nil, nil, nil, 3, 3), dropped)
	f(storedSlotsWith(nil, nil, nil, nil, "mamba", 4, 4), dropped)
	f(storedSlotsWith(nil, nil, nil, nil, "mamba", "mamba"), dropped)
	f(storedSlotsWith(nil, nil, nil, nil, arr{}), dropped)
	f(storedSlotsWith(nil, nil, nil, nil, false), dropped)
	f(storedSlotsWith(nil, nil, nil, nil, 1.0), dropped)

	// Keys of maps.
	f(stored(), plain)
	f(obj{"block_size", 2, "token_ids", arr{1, 2}, "block_hashes", arr{7}, "type", "BlockStored"}, plain)
	f(obj{arr{1}, 2, "type", "BlockStored", obj{}, nil, "block_hashes", arr{7}, 5, 6, "token_ids", arr{1, 2},
		"block_size", 2, "future", obj{"deep", arr{arr{}}}, "ext", unhex(t, "d4 01 00")}, plain)
	f(obj{"type", "BlockStored", "block_hashes", arr{7}, "token_ids", arr{1, 2}}, dropped)
	f(obj{"type", "BlockStored", "block_hashes", arr{7}, "block_size", 2}, dropped)
	f(obj{"type", "BlockStored", "token_ids", arr{1, 2}, "block_size", 2}, dropped)
	f(stored("medium", nil, "lora_name", nil, "extra_keys", nil, "group_idx", nil, "kv_cache_spec_kind", nil,
		"kv_cache_spec_sliding_window", nil, "lookahead_token_ids", nil, "locality", nil, "ownership", nil,
		"session_id", nil, "cache_salt", nil, "lora_id", nil), plain)
	f(stored("medium", "CPU", "medium", "CPU"), dropped)
	f(stored("medium", nil, "medium", "CPU"), dropped)
	f(stored("type", "BlockStored"), dropped)
	f(stored("remaining_copy_counts", "?", "remaining_copy_counts", 1), plain)
	f(stored("future", 1, "future", 2), plain)
	f(unhex(t, "de0004 a474797065 ab426c6f636b53746f726564 ac626c6f636b5f686173686573 9107 a9746f6b656e5f696473 920102 aa626c6f636b5f73697a65 02"), plain)
	f(unhex(t, "df00000004 a474797065 ab426c6f636b53746f726564 ac626c6f636b5f686173686573 9107 a9746f6b656e5f696473 920102 aa626c6f636b5f73697a65 02"), plain)

	// Handles.
	f(arr{"BlockStored", arr{int64(-2), []byte{1, 2}, "ab", uint64(math.MaxUint64)}, nil, arr{1}, 1},
		"BlockStored [18446744073709551614 258 24930 18446744073709551615] tokens=[1]/1")
	f(arr{"BlockStored", arr{}, nil, arr{1}, 1}, "BlockStored [] tokens=[1]/1")
	f(arr{"BlockStored", arr{7}, []byte("........\x00\x00\x00\x00\x00\x00\x00\x09"), arr{1}, 1}, "BlockStored [7] <- 9 tokens=[1]/1")
	f(arr{"BlockStored", arr{7}, int64(-1), arr{1}, 1}, "BlockStored [7] <- 18446744073709551615 tokens=[1]/1")
	f(arr{"BlockStored", arr{7}, 0, arr{1}, 1}, "BlockStored [7] <- 0 tokens=[1]/1")
	f(arr{"BlockStored", 7, nil, arr{1}, 1}, dropped)
	f(arr{"BlockStored", nil, nil, arr{1}, 1}, dropped)
	f(arr{"BlockStored", arr{nil}, nil, arr{1}, 1}, dropped)
	f(arr{"BlockStored", arr{7.0}, nil, arr{1}, 1}, dropped)
	f(arr{"BlockStored", arr{arr{7}}, nil, arr{1}, 1}, dropped)
	f(arr{"BlockStored", arr{true}, nil, arr{1}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, arr{6}, arr{1}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, 6.0, arr{1}, 1}, dropped)

	// Tokens and block sizes.
	f(arr{"BlockStored", arr{7}, nil, arr{uint32(math.MaxUint32)}, 1}, "BlockStored [7] tokens=[4294967295]/1")
	f(arr{"BlockStored", arr{7}, nil, arr{uint64(math.MaxUint32 + 1)}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{-1}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{1, nil}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{"1"}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, nil, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, []byte{1, 2}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{1}, nil}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{1}, -1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{1}, 1.0}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{1}, uint64(math.MaxUint32 + 1)}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{1}, 0}, dropped)
	f(arr{"BlockStored", arr{7, 8}, nil, arr{}, 0}, "BlockStored [7 8] tokens=[]/0")
	f(arr{"BlockStored", arr{7}, nil, arr{}, 2}, "BlockStored [7] tokens=[]/2")
	f(obj{"type", "BlockStored", "block_hashes", arr{7}, "block_size", 0, "token_ids", arr{}, arr{1, 2}, 3}, "BlockStored [7] tokens=[]/0")
	f(arr{"BlockStored", arr{7}, nil, arr{1, 2, 3, 4, 5}, 2}, "BlockStored [7] tokens=[1 2 3 4 5]/2")

	// EAGLE pairs.
	f(arr{"BlockStored", arr{7}, nil, arr{arr{1, 2}, arr{2, 3}}, 2}, "BlockStored [7] tokens=[1 2 3]/2 pairs")
	f(arr{"BlockStored", arr{7}, nil, arr{arr{1, 2}}, 1}, "BlockStored [7] tokens=[1 2]/1 pairs")
	f(arr{"BlockStored", arr{7}, nil, arr{arr{1, 2}, arr{3, 4}}, 2}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{arr{1, 2}, 3}, 2}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{1, arr{1, 2}}, 2}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{arr{1, 2, 3}}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{arr{1}}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{arr{}}, 1}, dropped)
	f(arr{"BlockStored", arr{7}, nil, arr{arr{1, -2}}, 1}, dropped)

	// Lookahead.
	two := func(lookahead any) obj {
		return obj{"type", "BlockStored", "block_hashes", arr{7, 8}, "token_ids", arr{1, 2}, "block_size", 1, "lookahead_token_ids", lookahead}
	}
	f(two(nil), "BlockStored [7 8] tokens=[1 2]/1")
	f(two(arr{}), "BlockStored [7 8] tokens=[1 2]/1")
	f(two(arr{arr{2}, arr{3}}), "BlockStored [7 8] tokens=[1 2]/1 lookahead=1:[2 3]")
	f(two(arr{arr{2, 3}, arr{3, 4}}), "BlockStored [7 8] tokens=[1 2]/1 lookahead=2:[2 3 3 4]")
	f(two(arr{arr{2, 3}, arr{3}}), dropped)
	f(two(arr{arr{2}}), dropped)
	f(two(arr{arr{2}, arr{3}, arr{4}}), dropped)
	f(two(arr{arr{}, arr{}}), dropped)
	f(obj{"type", "BlockStored", "block_hashes", arr{7, 8, 9}, "token_ids", arr{1, 2, 3}, "block_size", 1,
		"lookahead_token_ids", arr{arr{2}, arr{3, 4, 5}, arr{6, 7}}}, dropped)
	f(two(arr{nil, nil}), dropped)
	f(two(arr{arr{2}, nil}), dropped)
	f(two(arr{2, 3}), dropped)
	f(two(arr{arr{2}, arr{-3}}), dropped)
	f(two("23"), dropped)
	f(obj{"type", "BlockStored", "block_hashes", arr{7}, "token_ids", arr{arr{1, 2}}, "block_size", 1, "lookahead_token_ids", arr{arr{2}}}, dropped)
	f(obj{"type", "BlockStored", "block_hashes", arr{}, "token_ids", arr{1}, "block_size", 1, "lookahead_token_ids", arr{arr{2}}}, dropped)
	f(obj{"lookahead_token_ids", arr{arr{9}}, "token_ids", arr{1}, "block_size", 1, "block_hashes", arr{7}, "type", "BlockStored"},
		"BlockStored [7] tokens=[1]/1 lookahead=1:[9]")

	// Extra keys.
	f(stored("extra_keys", arr{}), plain+" extra=[]")
	f(stored("extra_keys", arr{nil, arr{}, nil}), plain+" extra=[() () ()]")
	f(stored("extra_keys", arr{arr{"ab", []byte("cd"), arr{"ef", int64(-3)}, nil, 1, 1.5, arr{"ef"}, arr{"ef", "3"}, arr{[]byte("ef"), 3}, obj{"a", 1}}, nil}),
		plain+" extra=[(str:ab:a26162 bin:cd:c4026364 item:ef:92a26566fd other::c0 other::01 other::cb3ff8000000000000"+
			" other::91a26566 other::92a26566a133 other::92c402656603 other::81a16101) ()]")
	f(stored("extra_keys", arr{arr{unhex(t, "dc0002 a26566 d3fffffffffffffffd"), unhex(t, "d40100")}}),
		plain+" extra=[(item:ef:dc0002a26566d3fffffffffffffffd other::d40100)]")
	f(stored("extra_keys", arr{arr{""}}), plain+" extra=[(str::a0)]")
	f(stored("extra_keys", "ab"), dropped)
	f(stored("extra_keys", arr{"ab"}), dropped)
	f(stored("extra_keys", arr{1}), dropped)
	f(stored("extra_keys", obj{"a", 1}), dropped)
	f(stored("extra_keys", false), dropped)

	// Names. What cannot be read must not pass for the device, for no adapter,
	// for the group of full attention.
	f(stored("medium", ""), plain+` medium=""`)
	f(stored("medium", []byte("CPU")), plain+` medium="CPU"`)
	f(stored("medium", 1), dropped)
	f(stored("medium", arr{"GPU"}), dropped)
	f(stored("lora_name", ""), plain+` lora=""`)
	f(stored("lora_name", 1), dropped)
	f(stored("lora_id", 0), plain)
	f(stored("lora_id", 3), plain+" lora_id")
	f(stored("lora_id", "a"), plain+" lora_id"+odd)
	f(stored("cache_salt", "s"), plain+` salt="s"`)
	f(stored("cache_salt", 1), dropped)
	f(stored("locality", "REMOTE"), plain+` locality="REMOTE"`)
	f(stored("locality", 1), dropped)
	f(stored("ownership", "a", "session_id", "b"), plain+` ownership="a" session="b"`)
	f(stored("ownership", 1), plain+odd)
	f(stored("session_id", arr{1, arr{}}), plain+odd)
	f(stored("group_idx", 0), plain+" group=0")
	f(stored("group_idx", math.MaxInt32), plain+" group=2147483647")
	f(stored("group_idx", math.MaxInt32+1), dropped)
	f(stored("group_idx", -1), dropped)
	f(stored("group_idx", "0"), dropped)
	f(stored("group_idx", 0.0), dropped)
	f(stored("kv_cache_spec_kind", 1), dropped)
	f(stored("kv_cache_spec_kind", ""), plain+` spec=""`)
	f(stored("kv_cache_spec_sliding_window", 128), plain+" window=128")
	f(stored("kv_cache_spec_sliding_window", -1), plain+odd)
	f(stored("kv_cache_spec_sliding_window", "128"), plain+odd)
}

// TestDecodeRemoved is about what BlockRemoved says.
func TestDecodeRemoved(t *testing.T) {
	f := decodes(t)
	removed := func(more ...any) obj { return append(obj{"type", "BlockRemoved", "block_hashes", arr{7, 8}}, more...) }
	const both = "BlockRemoved [7 8]"

	f(arr{"BlockRemoved", arr{7, 8}}, both)
	f(arr{"BlockRemoved", arr{7, 8}, "CPU"}, both+` medium="CPU"`)
	f(arr{"BlockRemoved", arr{7, 8}, nil, 1}, both+" group=1")
	f(arr{"BlockRemoved", arr{7, 8}, nil, nil, arr{1}, obj{}}, both)
	f(arr{"BlockRemoved", arr{}}, "BlockRemoved []")
	f(removed("medium", "GPU", "group_idx", 0, "locality", "LOCAL", "ownership", "o", "session_id", "s"),
		both+` medium="GPU" locality="LOCAL" ownership="o" session="s" group=0`)
	f(removed("token_ids", "?", "token_ids", "?", "extra_keys", 1), both)
	f(removed("ownership", 1), both+odd)

	f(arr{"BlockRemoved"}, lost)
	f(arr{"BlockRemoved", nil}, lost)
	f(arr{"BlockRemoved", 7}, lost)
	f(arr{"BlockRemoved", arr{7, nil}}, lost)
	f(arr{"BlockRemoved", arr{7}, 1}, lost)
	f(arr{"BlockRemoved", arr{7}, nil, "0"}, lost)
	f(obj{"type", "BlockRemoved"}, lost)
	f(removed("medium", 1), lost)
	f(removed("group_idx", -1), lost)
	f(removed("locality", 1), lost)
	f(removed("block_hashes", arr{9}), lost)

	f(removed("remaining_copy_counts", arr{0, 2}), "BlockRemoved [7 8] remaining=[0 2]")
	f(obj{"remaining_copy_counts", arr{1}, "block_hashes", arr{7}, "type", "BlockRemoved"}, "BlockRemoved [7] remaining=[1]")
	f(removed("remaining_copy_counts", nil), both)
	f(removed("remaining_copy_counts", arr{0}), both+odd)
	f(removed("remaining_copy_counts", arr{0, 1, 2}), both+odd)
	f(removed("remaining_copy_counts", arr{0, -1}), both+odd)
	f(removed("remaining_copy_counts", arr{0, nil}), both+odd)
	f(removed("remaining_copy_counts", 1), both+odd)
}

// TestDecodeCleared: a clear is a clear, whatever stands beside its tag.
func TestDecodeCleared(t *testing.T) {
	f := decodes(t)
	f(arr{"AllBlocksCleared"}, "AllBlocksCleared")
	f(arr{"AllBlocksCleared", "GPU", arr{1, obj{2, 3}}, unhex(t, "d40100")}, "AllBlocksCleared")
	f(obj{"type", "AllBlocksCleared"}, "AllBlocksCleared")
	f(obj{"medium", 1, "medium", 2, "block_hashes", 3, "type", "AllBlocksCleared", 4, 5}, "AllBlocksCleared")
	f(obj{"type", "AllBlocksCleared", "type", 5}, "AllBlocksCleared")
}

// TestDecodeTag is about events that are none of the known ones.
func TestDecodeTag(t *testing.T) {
	f := decodes(t)
	f(arr{"BlockMoved", arr{7}}, unknown)
	f(obj{"type", "BlockMoved", "token_ids", "?"}, unknown)
	f(arr{""}, unknown)
	f(arr{}, dropped)
	f(obj{}, dropped)
	f(arr{nil}, dropped)
	f(arr{1, arr{7}}, dropped)
	f(arr{arr{"BlockStored"}}, dropped)
	f(obj{"block_hashes", arr{7}}, dropped)
	f(obj{"type", nil}, dropped)
	f(nil, dropped)
	f("BlockStored", dropped)
	f(17, dropped)
	f(true, dropped)
	f(1.5, dropped)
	f(unhex(t, "d40100"), dropped)
}

// decodes returns a function that checks one event. It stands between two
// stores, which must come through whatever the event is.
func decodes(t *testing.T) func(event any, want string) {
	var d Decoder
	return func(event any, want string) {
		t.Helper()
		b, err := d.Decode(batchOf(t, arr{"BlockStored", arr{1}, nil, arr{10}, 1}, event,
			obj{"type", "BlockStored", "block_hashes", arr{2}, "token_ids", arr{11}, "block_size", 1}))
		if err != nil {
			t.Errorf("%v: %v", event, err)
			return
		}
		const before, after = "BlockStored [1] tokens=[10]/1\n", "BlockStored [2] tokens=[11]/1"
		lines := showBatch(b)
		got, ok := strings.CutPrefix(lines, before)
		got, counts, found := strings.Cut(got, after)
		if got = strings.TrimSpace(got + strings.TrimPrefix(counts, "\n")); !ok || !found || got != want {
			t.Errorf("%v\n got %s\nwant %s", event, lines, want)
		}
	}
}

func TestDecodeBatch(t *testing.T) {
	var d Decoder
	clearEvent := arr{arr{"AllBlocksCleared"}}
	f := func(payload any, ts float64, rank int32, odd int) {
		t.Helper()
		b, err := d.Decode(pack(t, payload))
		if err != nil {
			t.Error(err)
			return
		}
		if b.Timestamp != ts || b.Rank != rank || b.Odd != odd || len(b.Events) != 1 {
			t.Errorf("%v: ts %v, rank %d, odd %d, %d events, want %v, %d, %d, 1", payload, b.Timestamp, b.Rank, b.Odd, len(b.Events), ts, rank, odd)
		}
	}
	f(arr{1.5, clearEvent}, 1.5, -1, 0)
	f(arr{1.5, clearEvent, nil}, 1.5, -1, 0)
	f(arr{1.5, clearEvent, 3}, 1.5, 3, 0)
	f(arr{1.5, clearEvent, 3, "more", obj{}}, 1.5, 3, 0)
	f(arr{float32(0.5), clearEvent}, 0.5, -1, 0)
	f(arr{7, clearEvent}, 7, -1, 0)
	f(arr{int64(-7), clearEvent}, -7, -1, 0)
	f(arr{nil, clearEvent, 3}, 0, 3, 1)
	f(arr{"now", clearEvent, "3"}, 0, -1, 2)
	f(arr{1.5, clearEvent, -1}, 1.5, -1, 1)
	f(arr{1.5, clearEvent, math.MaxInt32 + 1}, 1.5, -1, 1)
	f(obj{"ts", 1.5, "events", clearEvent, "data_parallel_rank", 3}, 1.5, 3, 0)
	f(obj{"data_parallel_rank", nil, "future", arr{1}, 1, 2, "events", clearEvent, "ts", 2}, 2, -1, 0)
	f(obj{"events", clearEvent}, 0, -1, 0)
	f(obj{"events", clearEvent, "data_parallel_rank", "3"}, 0, -1, 1)

	fails := func(payload any, want string) {
		t.Helper()
		b, err := d.Decode(pack(t, payload))
		if b != nil || !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, %v, want %q", payload, b, err, want)
		}
	}
	fails(raw{}, "batch at byte 0 of 0: expected an array or a map")
	fails(nil, "batch at byte 0 of 1: expected an array or a map")
	fails("batch", "expected an array or a map")
	fails(unhex(t, "c1"), "expected an array or a map")
	fails(arr{}, "expected an array of ts, events, data_parallel_rank")
	fails(arr{1.5}, "expected an array of ts, events, data_parallel_rank")
	fails(arr{1.5, nil, 0}, "events at byte 10 of 12: expected an array")
	fails(arr{1.5, obj{}, 0}, "expected an array")
	fails(obj{}, "expected events")
	fails(obj{"ts", 1.5}, "expected events")
	fails(obj{"events", clearEvent, "events", clearEvent}, "expected one value for events")
	fails(append(raw(pack(t, arr{1.5, clearEvent, 0})), 0xc0), "payload at byte 30 of 31: expected its end")
	fails(unhex(t, "ddffffffff"), "expected an array of")
	fails(unhex(t, "dfffffffff"), "expected a map of")
	fails(unhex(t, "92 c0 ddffffffff"), "events at byte 2 of 7: expected an array")
	fails(unhex(t, "92 c0 91 93 ab426c6f636b53746f726564 c1 c0"), "expected 1 whole events")
}

// TestDecodeCutShort cuts a payload at each of its bytes.
func TestDecodeCutShort(t *testing.T) {
	var d Decoder
	for _, v := range readVectors(t) {
		payload := v.payload(t)
		for n := range payload {
			// Without spare capacity, so that reading past the end panics.
			if b, err := d.Decode(bytes.Clone(payload[:n])[:n:n]); err == nil {
				t.Errorf("%s: cut to %d of %d bytes: %v", v.Name, n, len(payload), b)
			}
		}
	}
}

// TestDecodeExtraKeysBound: more extra keys than any text could have cost the
// event, not the batch.
func TestDecodeExtraKeysBound(t *testing.T) {
	var d Decoder
	for _, n := range []int{freeExtraKeys, 2 * freeExtraKeys} {
		b, err := d.Decode(batchOf(t, stored("extra_keys", arr{make(arr, n)}), stored()))
		if err != nil {
			t.Fatal(err)
		}
		if want := n / (2 * freeExtraKeys); b.Malformed != want || len(b.Events) != 2-want {
			t.Errorf("%d extra keys: %d events, %d malformed, want %d", n, len(b.Events), b.Malformed, want)
		}
	}
}

// TestDecodeReuse: what one batch held does not show in the next, and a batch
// stands until then though the Decoder's buffers grow while it is read.
func TestDecodeReuse(t *testing.T) {
	full := stored("medium", "CPU", "lora_name", "a", "extra_keys", arr{arr{"a"}}, "group_idx", 2, "kv_cache_spec_kind", "mamba",
		"kv_cache_spec_sliding_window", 3, "lookahead_token_ids", arr{arr{4}}, "cache_salt", "s", "lora_id", 5)
	var d Decoder
	want := func(payload []byte) string {
		b, err := new(Decoder).Decode(payload)
		if err != nil {
			t.Fatal(err)
		}
		return showBatch(b)
	}
	for _, payload := range [][]byte{
		batchOf(t, full, full),
		batchOf(t, stored()),
		batchOf(t, stored("medium", 1), arr{"BlockRemoved", arr{1}}, stored("cache_salt", 5)),
		batchOf(t, full, stored("medium", 1), full, stored(), full, full, full, full, full, full),
		batchOf(t),
	} {
		b, err := d.Decode(payload)
		if err != nil {
			t.Fatal(err)
		}
		if got := showBatch(b); got != want(payload) {
			t.Errorf("\n got %s\nwant %s", got, want(payload))
		}
		for i := range b.Events {
			// What a caller appends must not run into the next event.
			_ = append(b.Events[i].Tokens, 99)
			_ = append(b.Events[i].Hashes, 99)
			_ = append(b.Events[i].Extra, ExtraKey{})
			_ = append(b.Events[i].ExtraEnd, 99)
		}
		if got := showBatch(b); got != want(payload) {
			t.Errorf("after appending\n got %s\nwant %s", got, want(payload))
		}
	}
}

// TestDecodeKeepsLittle: the buffers of a huge message go with its batch.
func TestDecodeKeepsLittle(t *testing.T) {
	var d Decoder
	huge := batchOf(t, arr{"BlockRemoved", make(arr, 0)}, storedSlotsWith(nil, nil, nil, make(arr, 4<<20)))
	b, err := d.Decode(huge)
	if err != nil || len(b.Events) != 2 || len(b.Events[1].ExtraEnd) != 4<<20 {
		t.Fatal(err)
	}
	if d.batch.Events != nil || d.extraEnds != nil || d.c.b != nil {
		t.Error("the Decoder kept the buffers of a huge message")
	}
}

// TestDecodeForgets: what is kept of a batch does not hold its payload.
func TestDecodeForgets(t *testing.T) {
	var d Decoder
	good := stored("extra_keys", arr{arr{"a"}}, "medium", "GPU")
	bad := stored("extra_keys", arr{arr{"a"}}, "medium", "GPU", "group_idx", -1)
	for _, payload := range [][]byte{batchOf(t, good, good, bad), batchOf(t)} {
		if _, err := d.Decode(payload); err != nil {
			t.Fatal(err)
		}
	}
	for _, ev := range d.batch.Events[:cap(d.batch.Events)] {
		if ev.Medium != nil || ev.Extra != nil {
			t.Errorf("%s is kept", show(&ev))
		}
	}
	for _, key := range d.extra[:cap(d.extra)] {
		if key.Raw != nil {
			t.Errorf("extra key %q is kept", key.Raw)
		}
	}
}

// TestDecodeAllocations is the budget of the steady state: none.
func TestDecodeAllocations(t *testing.T) {
	rich := stored("extra_keys", arr{arr{"a", arr{"b", 1}}}, "lookahead_token_ids", arr{arr{4}}, "medium", "GPU")
	payloads := map[string][]byte{
		"odd": batchOf(t, rich, stored("medium", 1), arr{"BlockMoved"}, stored("ownership", 1),
			arr{"BlockRemoved", arr{7}}, obj{"block_hashes", arr{1}, "remaining_copy_counts", arr{2}, "type", "BlockRemoved"},
			arr{"BlockStored", arr{7}, nil, arr{arr{1, 2}, arr{2, 3}}, 2}, arr{"AllBlocksCleared"}),
	}
	for name, o := range map[string]EncodeOptions{
		"arrays": {}, "arrays, bytes": {BytesHashes: true}, "maps": {Maps: true}, "maps, bytes": {Maps: true, BytesHashes: true},
	} {
		payload, err := AppendBatch(nil, storesBatch(16, 1), o)
		if err != nil {
			t.Fatal(err)
		}
		payloads[name] = payload
	}
	for name, payload := range payloads {
		var d Decoder
		allocs := testing.AllocsPerRun(100, func() {
			if _, err := d.Decode(payload); err != nil {
				t.Fatal(err)
			}
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations a batch, want 0", name, allocs)
		}
	}
}

// TestDecodeMemory: no payload takes more than a small multiple of its bytes.
func TestDecodeMemory(t *testing.T) {
	const size = 1 << 20
	fill := func(head string, body string) []byte {
		b := unhex(t, head)
		unit := unhex(t, body)
		return append(b, bytes.Repeat(unit, (size-len(b))/len(unit))...)
	}
	store := "ab426c6f636b53746f726564"
	for name, payload := range map[string][]byte{
		"a batch of endless length":     fill("ddffffffff", "00"),
		"events of endless number":      fill("92 c0 ddffffffff", "00"),
		"events of nothing":             fill("92 c0 dd000ffff0", "c0"),
		"the shortest events":           fill("92 c0 dd00011000", "92 ac426c6f636b52656d6f766564 90"),
		"clears":                        fill("92 c0 dd0000e000", "91 b0416c6c426c6f636b73436c6561726564"),
		"hashes of one byte":            fill("92 c0 91 95"+store+"dd000fff00", "01"),
		"hashes of an endless number":   fill("92 c0 91 95"+store+"ddffffffff", "01"),
		"hashes, the first of them bad": fill("92 c0 91 95"+store+"dd000fff00 c0", "01"),
		"tokens of one byte":            fill("92 c0 91 95"+store+"90 c0 dd000fff00", "01"),
		"pairs":                         fill("92 c0 91 95"+store+"90 c0 dd00055000", "92 01 01"),
		"extra keys of one byte":        fill("92 c0 91 99"+store+"90 c0 90 00 c0 c0 c0 91 dd000fff00", "01"),
		"extra keys of nothing":         fill("92 c0 91 99"+store+"90 c0 90 00 c0 c0 c0 dd000fff00", "c0"),
		"extra keys, nested":            fill("92 c0 91 99"+store+"90 c0 90 00 c0 c0 c0 dd00055000", "91 91 01"),
		"deep":                          fill("92 c0", "91"),
		"deep maps":                     fill("92 c0", "81 c0"),
	} {
		var d Decoder
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := d.Decode(payload)
		runtime.ReadMemStats(&after)
		// An event has 384 bytes, the shortest one 15 on the wire, and a buffer
		// that grows is copied: 59 bytes for each. Under the race detector
		// slices.Grow allocates twice.
		if got := float64(after.TotalAlloc-before.TotalAlloc) / size; got > 100 {
			t.Errorf("%s: %.1f bytes allocated for each byte (error %v)", name, got, err)
		} else {
			t.Logf("%s: %.1f bytes for each byte (error %v)", name, got, err)
		}
	}
}

// TestDecodeTooManyEvents is about the bound of what a batch can be.
func TestDecodeTooManyEvents(t *testing.T) {
	events := bytes.Repeat(pack(t, arr{"AllBlocksCleared"}), maxEvents+1)
	head := func(n int) []byte { return append(unhex(t, "92 c0 dd"), byte(n>>24), byte(n>>16), byte(n>>8), byte(n)) }
	var d Decoder
	if b, err := d.Decode(append(head(maxEvents), events[:len(events)/(maxEvents+1)*maxEvents]...)); err != nil || len(b.Events) != maxEvents {
		t.Error(err)
	}
	if _, err := d.Decode(append(head(maxEvents+1), events...)); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
}
