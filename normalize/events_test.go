package normalize

import (
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestMain asks for enough random prompts that those with an image at a block's
// very edge are among them; the command line can ask for another number.
func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", "5000"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// stored is the event of one block of four tokens with these extra keys.
func stored(change func(*zmqwire.Event), keys ...zmqwire.ExtraKey) *zmqwire.Event {
	ev := &zmqwire.Event{
		Kind: zmqwire.BlockStored, Group: zmqwire.NoGroup, BlockSize: 4,
		Hashes: []zmqwire.EngineHash{1}, Tokens: []uint32{1, 2, 3, 4},
		Extra: keys, ExtraEnd: []int{len(keys)},
	}
	if change != nil {
		change(ev)
	}
	return ev
}

func normalized(v View, events ...*zmqwire.Event) *Batch {
	in := new(zmqwire.Batch)
	for _, ev := range events {
		in.Events = append(in.Events, *ev)
	}
	b := new(Batch)
	NewNormalizer(v).Normalize(b, in)
	return b
}

// otherKey is an extra key of a form that means nothing.
func otherKey(form zmqwire.ExtraForm, raw ...byte) zmqwire.ExtraKey {
	return zmqwire.ExtraKey{Form: form, Raw: raw, Text: raw[min(len(raw), 2):]}
}

func TestExtraKeys(t *testing.T) {
	const tokens = "\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x04\x00\x00\x00"
	hash := func(seed uint64) LocalHash { return LocalHash(xxh3.HashStringSeed(tokens, seed)) }
	lora := func(ev *zmqwire.Event) { ev.LoraName = []byte("a") }
	child := func(ev *zmqwire.Event) { ev.Parent, ev.HasParent = 9, true }
	mapSalt := func(ev *zmqwire.Event) { ev.CacheSalt = []byte("s") }
	text, native, bare, none := zmqwire.ExtraText, View{}, View{ExtraKeys: BareMM}, View{ExtraKeys: None}
	opaque := func(keys ...zmqwire.ExtraKey) (sum uint64) {
		for _, k := range keys {
			sum += xxh3.HashSeed(k.Raw, 2)
		}
		return sum
	}
	loraHash, saltHash := xxh3.HashStringSeed("a", 0), xxh3.HashStringSeed("s", 1)
	hex := fmt.Sprintf("%064x", 5)
	item := zmqwire.ExtraMM("x", 0)
	withItems := func(hs ...uint64) LocalHash {
		words := []uint32{1, 2, 3, 4}
		for _, h := range hs {
			words = append(words, uint32(h), uint32(h>>32))
		}
		return hashWords(words, 1337)
	}
	bytesA := otherKey(zmqwire.ExtraBytes, 0xc4, 1, 'a')
	invalid := otherKey(zmqwire.ExtraBytes, 0xc4, 1, 0xff)
	aMap, aNil := otherKey(zmqwire.ExtraOther, 0x80), otherKey(zmqwire.ExtraOther, 0xc0)

	f := func(name string, v View, change func(*zmqwire.Event), want LocalHash, keys ...zmqwire.ExtraKey) {
		t.Helper()
		b := normalized(v, stored(change, keys...))
		if got := b.Locals(nil, &b.Ops[0], b.Ops[0].Salt); !slices.Equal(got, []LocalHash{want}) {
			t.Errorf("%s: %x, want %x", name, got, want)
		}
	}
	f("none", native, nil, hash(1337))
	f("the adapter's name", native, lora, hash(1337+loraHash), text("a"))
	f("the adapter's name, not in the keys", native, lora, hash(1337+loraHash))
	f("the adapter's name as bytes", native, lora, hash(1337+loraHash), bytesA)
	f("bytes of no adapter", native, nil, hash(1337+opaque(bytesA)), bytesA)
	f("an adapter's name that is no text", native, func(ev *zmqwire.Event) { ev.LoraName = []byte{0xff} },
		hash(1337+xxh3.HashSeed([]byte{0xff}, 0)+opaque(invalid)), invalid)
	f("adapter and salt of one name", native, lora, hash(1337+loraHash+xxh3.HashStringSeed("a", 1)), text("a"), text("a"))
	f("a salt", native, nil, hash(1337+saltHash), text("s"))
	f("a tagged salt", native, nil, hash(1337+saltHash), text("dynamo-cache-salt:s"))
	f("a tag and no salt", native, nil, hash(1337+xxh3.HashStringSeed("dynamo-cache-salt:", 1)), text("dynamo-cache-salt:"))
	f("two bare strings", native, nil, hash(1337+saltHash+opaque(text("s2"))), text("s"), text("s2"))
	f("a bare string away from the root", native, child, hash(1337+opaque(text("s"))), text("s"))
	f("empty strings", native, nil, hash(1337), text(""), text(""))
	f("the map's own salt", native, mapSalt, hash(1337+saltHash))
	f("the map's own salt wins", native, mapSalt, hash(1337+saltHash), text("other"))
	f("an item", native, nil, withItems(xxh3.HashString("x")), item)
	f("an item's offset does not matter", native, nil, withItems(xxh3.HashString("x")), zmqwire.ExtraMM("x", -3))
	f("an item twice", native, nil, withItems(xxh3.HashString("x"), xxh3.HashString("x")), item, item)
	f("an item without identifier", native, nil, hash(1337+opaque(zmqwire.ExtraMM("", 0))), zmqwire.ExtraMM("", 0))
	f("a map and a nil", native, nil, hash(1337+opaque(aMap, aNil)), aMap, aNil)
	f("hex is a salt where items are pairs", native, nil, hash(1337+xxh3.HashStringSeed(hex, 1)), text(hex))
	f("hex is an item where items are bare", bare, child, withItems(0), text(hex))
	f("anything else is a salt there too", bare, nil, hash(1337+saltHash), text("s"))
	f("the adapter goes before a bare item", bare, func(ev *zmqwire.Event) { ev.LoraName = []byte(hex) },
		hash(1337+xxh3.HashStringSeed(hex, 0)), text(hex))
	f("where there should be no keys, all but the adapter is opaque", none, lora,
		hash(1337+loraHash+opaque(text("s"), item)), text("a"), text("s"), item)
}

// A chain's salt is its root's: what another block's event says does not count.
func TestSaltIsTheRoots(t *testing.T) {
	b := normalized(View{}, stored(func(ev *zmqwire.Event) { ev.Parent, ev.HasParent, ev.CacheSalt = 9, true, []byte("s") }))
	if got := b.Ops[0].Salt; got != 0 {
		t.Errorf("salt %x, want none", got)
	}
}

// One huge message does not hold its memory for ever.
func TestRetention(t *testing.T) {
	n := NewNormalizer(image99)
	b := new(Batch)
	n.Normalize(b, textBatch(1<<21, 16, withImages))
	n.Normalize(b, &zmqwire.Batch{Events: make([]zmqwire.Event, 1)})
	n.Normalize(b, textBatch(16, 16, withImages))
	if cap(b.arena) > keepWords || cap(b.blocks) > keepBlocks || cap(n.keys) > keepKeys || cap(n.mm) > keepKeys {
		t.Errorf("kept %d words, %d blocks, %d keys, %d items", cap(b.arena), cap(b.blocks), cap(n.keys), cap(n.mm))
	}
}

func TestUnidentifiedBlocks(t *testing.T) {
	ev := stored(func(ev *zmqwire.Event) {
		ev.Hashes, ev.Tokens = []zmqwire.EngineHash{1, 2}, []uint32{1, 2, 3, 4, 5, 6, 99, 8}
		ev.ExtraEnd = nil
	})
	f := func(v View, want ...uint64) {
		t.Helper()
		b := normalized(v, ev)
		got := b.Locals(nil, &b.Ops[0], 0)
		for i, seed := range want {
			if w := hashWords(ev.Tokens[4*i:4*i+4], seed); got[i] != w {
				t.Errorf("%+v block %d: %x, want %x", v, i, got[i], w)
			}
		}
	}
	hidden := 1337 + xxh3.HashStringSeed("unidentified", 2)
	f(View{}, 1337, 1337)
	f(View{ExtraKeys: None}, 1337, 1337)
	f(View{IDs: TokenIDs{Image: 99, HasImage: true}}, 1337, hidden)
	f(View{IDs: TokenIDs{Video: 99, HasVideo: true}}, 1337, hidden)
	f(View{IDs: TokenIDs{Image: 99, HasImage: true}, ExtraKeys: None}, 1337, hidden)
	f(View{IDs: TokenIDs{Image: 98, HasImage: true}}, 1337, 1337)
}

func TestOps(t *testing.T) {
	image := View{IDs: TokenIDs{Image: 99, HasImage: true}}
	f := func(name string, ev *zmqwire.Event, want *Op, skips ...SkipReason) {
		t.Helper()
		b := normalized(image, ev)
		var got *Op
		if len(b.Ops) == 1 {
			got = &b.Ops[0]
			got.Hashes, got.Parent, got.HasParent = nil, 0, false
		}
		var counts [NumSkipReasons]uint64
		for _, r := range skips {
			counts[r]++
		}
		if d := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Op{})); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
		if b.Skips.ByReason != counts {
			t.Errorf("%s: skipped %v, want %v", name, b.Skips.ByReason, counts)
		}
	}
	store := func(change func(*Op)) *Op {
		op := &Op{Kind: OpStore, Group: zmqwire.NoGroup, Shape: Shape{BlockSize: 4}}
		change(op)
		return op
	}
	placed := store(func(*Op) {})
	unplaced := store(func(op *Op) { op.Form = Unplaced })
	set := func(change func(*zmqwire.Event)) *zmqwire.Event { return stored(change) }

	f("a store", set(nil), placed)
	f("a group of sliding windows", set(func(ev *zmqwire.Event) { ev.Group, ev.Spec, ev.Window = 2, []byte("sliding_window"), 128 }),
		store(func(op *Op) { op.Group, op.Spec, op.Window = 2, SpecWindow, 128 }))
	f("more tokens than a window has hashes", set(func(ev *zmqwire.Event) { ev.Spec, ev.Tokens = []byte("sliding_window_mla"), make([]uint32, 8) }),
		store(func(op *Op) { op.Spec, op.Form = SpecWindow, Unplaced }))
	f("a full group", set(func(ev *zmqwire.Event) { ev.Spec = []byte("sink_full_attention") }), store(func(op *Op) { op.Spec = SpecFull }))
	f("a group of another kind", set(func(ev *zmqwire.Event) { ev.Spec = []byte("mamba") }),
		store(func(op *Op) { op.Spec, op.Form = SpecOther, Unplaced }), SkipOtherSpec)
	f("a notice of another kind", set(func(ev *zmqwire.Event) { ev.Spec, ev.Tokens, ev.BlockSize = []byte("mamba"), nil, 0 }),
		store(func(op *Op) { op.Spec, op.Form, op.Shape = SpecOther, Unplaced, Shape{} }), SkipOtherSpec)
	f("more tokens than hashes", set(func(ev *zmqwire.Event) { ev.Tokens = make([]uint32, 8) }), unplaced, SkipTokenCount)
	f("no tokens of a block size", set(func(ev *zmqwire.Event) { ev.Tokens = nil }), unplaced, SkipTokenCount)
	f("a notice", set(func(ev *zmqwire.Event) { ev.Tokens, ev.BlockSize = nil, 0 }),
		store(func(op *Op) { op.Form, op.Shape = Notice, Shape{} }))
	f("tokens of no block size", set(func(ev *zmqwire.Event) { ev.BlockSize = 0 }), nil, SkipZeroBlockSize)
	f("extra keys of fewer blocks", set(func(ev *zmqwire.Event) { ev.ExtraEnd = []int{} }), unplaced, SkipExtraKeysCount)
	f("extra keys of more blocks", set(func(ev *zmqwire.Event) { ev.ExtraEnd = []int{0, 0} }), unplaced, SkipExtraKeysCount)
	f("no extra keys", set(func(ev *zmqwire.Event) { ev.ExtraEnd = nil }), placed)
	f("a hash twice", set(func(ev *zmqwire.Event) { ev.Hashes = []zmqwire.EngineHash{3, 3} }), nil, SkipRepeatedHash)
	f("its own parent", set(func(ev *zmqwire.Event) { ev.Parent, ev.HasParent = 1, true }), nil, SkipOwnParent)
	f("a parent that only looks like one", set(func(ev *zmqwire.Event) { ev.Parent = 1 }), placed)
	f("pairs", set(func(ev *zmqwire.Event) { ev.Pairs, ev.Tokens = true, make([]uint32, 5) }), store(func(op *Op) { op.Shape.Window = Pairs }))
	f("pairs without their last", set(func(ev *zmqwire.Event) { ev.Pairs = true }),
		store(func(op *Op) { op.Shape.Window, op.Form = Pairs, Unplaced }), SkipTokenCount)
	f("lookahead", set(func(ev *zmqwire.Event) { ev.Lookahead, ev.LookaheadTokens = 2, []uint32{5, 6} }), store(func(op *Op) { op.Shape.Window = 2 }))
	f("lookahead of other blocks", set(func(ev *zmqwire.Event) { ev.Lookahead, ev.LookaheadTokens = 2, []uint32{5} }),
		store(func(op *Op) { op.Shape.Window, op.Form = 2, Unplaced }), SkipLookaheadCount)
	f("lookahead too long to name", set(func(ev *zmqwire.Event) { ev.Lookahead, ev.LookaheadTokens = 1<<15, make([]uint32, 1<<15) }),
		unplaced, SkipLookaheadCount)
	f("an unknown medium", set(func(ev *zmqwire.Event) { ev.Medium = []byte("tape") }), nil, SkipUnknownMedium)
	f("another place", set(func(ev *zmqwire.Event) { ev.Locality = []byte("REMOTE") }), nil, SkipNotLocal)
	f("a place nobody knows", set(func(ev *zmqwire.Event) { ev.Locality = []byte("NEAR") }), nil, SkipNotLocal)
	f("this place", set(func(ev *zmqwire.Event) { ev.Locality = []byte("LOCAL") }), placed)
	f("a clear", &zmqwire.Event{Kind: zmqwire.AllBlocksCleared}, &Op{Kind: OpClear, Group: zmqwire.NoGroup})
	f("a removal", &zmqwire.Event{Kind: zmqwire.BlockRemoved, Group: 1, Medium: []byte("fs"), Hashes: []zmqwire.EngineHash{1, 1}, Remaining: []uint32{1, 0}},
		&Op{Kind: OpRemove, Group: 1, Tier: Disk, Remaining: []uint32{1, 0}})
	f("a removal's odd counts", &zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: []zmqwire.EngineHash{1}, Remaining: []uint32{1, 0}},
		&Op{Kind: OpRemove})
	f("a removal elsewhere", &zmqwire.Event{Kind: zmqwire.BlockRemoved, Locality: []byte("REMOTE")}, nil, SkipNotLocal)
	f("nothing known", &zmqwire.Event{Kind: 77}, nil)
}

func TestTiers(t *testing.T) {
	f := func(want Tier, media ...string) {
		t.Helper()
		for _, m := range media {
			if got := tierOf([]byte(m)); got != want {
				t.Errorf("%q: %v, want %v", m, got, want)
			}
		}
	}
	f(Device, "", "GPU", "gpu", "Device")
	f(Host, "CPU", "cpu_pinned", "CPU_TIER1")
	f(Disk, "CPU_TIER2", "disk", "NVMe", "STORAGE", "FS", "obj")
	f(External, "EXTERNAL", "network", "REMOTE", "shared")
	f(NoTier, "HBM", "GPU ", "GPU0", "CPU_TIER3", "ｇｐｕ", string(make([]byte, 1000)))
}

func TestSkipCountsAreBounded(t *testing.T) {
	var total SkipCounts
	n := NewNormalizer(View{})
	b := new(Batch)
	for i := range 100 {
		n.Normalize(b, &zmqwire.Batch{Events: []zmqwire.Event{{Kind: zmqwire.BlockRemoved, Medium: fmt.Appendf(nil, "m\xff%d", i)}}})
		total.Add(&b.Skips)
	}
	if len(total.Media) != maxMediumNames+1 || total.Media[0] != (MediumCount{"M?0", 1}) || total.Media[16] != (MediumCount{"(other)", 84}) {
		t.Errorf("unknown media: %v", total.Media)
	}
	if total.Total() != 100 {
		t.Errorf("total %d, want 100", total.Total())
	}
}

func TestRepeats(t *testing.T) {
	s := hashSet{mix: 0x9e3779b97f4a7c15, round: math.MaxUint32 - 20}
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.SampledFrom([]int{0, 2, 8, 9, 40, 300}).Draw(rt, "n")
		hs := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) zmqwire.EngineHash {
			return zmqwire.EngineHash(rapid.Uint64Range(0, 100_000).Draw(t, "hash"))
		}), n, n).Draw(rt, "hashes")
		sorted := slices.Compact(slices.Sorted(slices.Values(hs)))
		if got, want := s.repeats(hs), len(sorted) < len(hs); got != want {
			rt.Fatalf("repeats: %v, want %v", got, want)
		}
	})
	many := make([]zmqwire.EngineHash, maxHashSlots)
	for i := range many {
		many[i] = zmqwire.EngineHash(i)
	}
	if s.repeats(many) {
		t.Error("distinct hashes repeat")
	}
	if many[5] = 6; !s.repeats(many) {
		t.Error("a repeated hash is not found")
	}
	if len(s.slots) > maxHashSlots {
		t.Errorf("%d slots kept", len(s.slots))
	}
}
