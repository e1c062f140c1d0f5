package zmqwire

import (
	"bytes"
	"math"
	"testing"
)

func TestCursorSkip(t *testing.T) {
	f := func(in string, want int) {
		t.Helper()
		b := unhex(t, in)
		c := cursor{b: b}
		ok := c.skip()
		if ok != (want >= 0) || ok && c.pos != want {
			t.Errorf("skip(%s) = %v at %d, want %d", in, ok, c.pos, want)
		}
		if !ok && c.pos != 0 {
			t.Errorf("skip(%s) failed and moved to %d", in, c.pos)
		}
	}
	const fails = -1

	f("", fails)
	f("c1", fails)
	f("c0 c0", 1)
	f("c2", 1)
	f("7f", 1)
	f("e0", 1)
	f("cc ff", 2)
	f("cd ffff", 3)
	f("ce ffffffff", 5)
	f("cf ffffffffffffffff", 9)
	f("d0 80", 2)
	f("d1 8000", 3)
	f("d2 80000000", 5)
	f("d3 8000000000000000", 9)
	f("d3 80000000000000", fails)
	f("ca 00000000", 5)
	f("cb 0000000000000000", 9)
	f("a0", 1)
	f("a3 616263", 4)
	f("a3 6162", fails)
	f("d9 03 616263", 5)
	f("d9", fails)
	f("da 0003 616263", 6)
	f("db 00000003 616263", 8)
	f("c4 00", 2)
	f("c5 0001 ff", 4)
	f("c6 00000001 ff", 6)
	f("c6 ffffffff", fails)
	f("d4 01 ff", 3)
	f("d5 01 ffff", 4)
	f("d6 01 ffffffff", 6)
	f("d7 01 ffffffffffffffff", 10)
	f("d8 01 ffffffffffffffffffffffffffffffff", 18)
	f("d8 01 ff", fails)
	f("c7 00 01", 3)
	f("c7 02 01 ffff", 5)
	f("c8 0001 01 ff", 5)
	f("c9 00000001 01 ff", 7)
	f("c9 ffffffff 01", fails)
	f("90", 1)
	f("92 01 02 03", 3)
	f("92 01", fails)
	f("dc 0002 01 02", 5)
	f("dd 00000002 01 02", 7)
	f("dd ffffffff", fails)
	f("80", 1)
	f("81 01 02", 3)
	f("81 01", fails)
	f("de 0001 01 02", 5)
	f("df 00000001 01 02", 7)
	f("df ffffffff 01", fails)
	f("df 80000000 01 01", fails)
	f("93 91 91 c0 81 a1 61 92 01 02 c4 01 00", 13)
	f("92 92 01 02 c1", fails)
	// Each of these counts could be true by itself, but not both.
	f("92 93 01 02 03", fails)
}

// TestCursorSkipDeep nests as deep as there are bytes.
func TestCursorSkipDeep(t *testing.T) {
	const depth = 16 << 20
	in := append(bytes.Repeat([]byte{0x91}, depth), 0xc0)
	c := cursor{b: in}
	if !c.skip() || c.pos != len(in) {
		t.Errorf("stopped at %d of %d", c.pos, len(in))
	}
	c = cursor{b: in[:depth]}
	if c.skip() || !c.short {
		t.Error("an array without its element was skipped")
	}
}

func TestCursorInteger(t *testing.T) {
	f := func(in string, bits uint64, negative bool) {
		t.Helper()
		c := cursor{b: unhex(t, in)}
		got, neg, ok := c.integer()
		if !ok || got != bits || neg != negative || c.pos != len(c.b) {
			t.Errorf("integer(%s) = %d, %v, %v at %d, want %d, %v", in, got, neg, ok, c.pos, bits, negative)
		}
	}
	below := func(v int64) uint64 { return uint64(v) }

	f("00", 0, false)
	f("7f", 127, false)
	f("ff", below(-1), true)
	f("e0", below(-32), true)
	f("cc 80", 128, false)
	f("cd 8000", 0x8000, false)
	f("ce 80000000", 1<<31, false)
	f("cf ffffffffffffffff", math.MaxUint64, false)
	f("d0 80", below(-128), true)
	f("d0 7f", 127, false)
	f("d1 8000", below(math.MinInt16), true)
	f("d1 7fff", math.MaxInt16, false)
	f("d2 80000000", below(math.MinInt32), true)
	f("d2 7fffffff", math.MaxInt32, false)
	f("d3 8000000000000000", below(math.MinInt64), true)
	f("d3 7fffffffffffffff", math.MaxInt64, false)
}

// TestCursorRefuses: each method leaves what it does not read where it is.
func TestCursorRefuses(t *testing.T) {
	values := map[valueKind][]string{
		kindInvalid: {"", "c1"},
		kindNil:     {"c0"},
		kindBool:    {"c2", "c3"},
		kindInt:     {"00", "ff", "cc 01", "d3 ffffffffffffffff"},
		kindFloat:   {"ca 3fc00000", "cb 3ff8000000000000"},
		kindText:    {"a1 61", "c4 01 61", "d9 01 61"},
		kindArray:   {"90", "dc 0000"},
		kindMap:     {"80", "de 0000"},
		kindExt:     {"d4 00 00"},
	}
	methods := map[string]struct {
		read  func(*cursor) bool
		takes []valueKind
	}{
		"null":       {(*cursor).null, []valueKind{kindNil}},
		"boolean":    {func(c *cursor) bool { _, ok := c.boolean(); return ok }, []valueKind{kindBool}},
		"integer":    {func(c *cursor) bool { _, _, ok := c.integer(); return ok }, []valueKind{kindInt}},
		"float":      {func(c *cursor) bool { _, ok := c.float(); return ok }, []valueKind{kindInt, kindFloat}},
		"text":       {func(c *cursor) bool { _, ok := c.text(); return ok }, []valueKind{kindText}},
		"arrayLen":   {func(c *cursor) bool { _, ok := c.arrayLen(); return ok }, []valueKind{kindArray}},
		"mapLen":     {func(c *cursor) bool { _, ok := c.mapLen(); return ok }, []valueKind{kindMap}},
		"engineHash": {func(c *cursor) bool { _, ok := c.engineHash(); return ok }, []valueKind{kindInt, kindText}},
	}
	for name, m := range methods {
		for kind, ins := range values {
			for _, in := range ins {
				takes := false
				for _, k := range m.takes {
					takes = takes || k == kind
				}
				c := cursor{b: unhex(t, in)}
				ok := m.read(&c)
				if ok != takes {
					t.Errorf("%s(%s) = %v, want %v", name, in, ok, takes)
				}
				if want := len(c.b); ok && c.pos != want || !ok && c.pos != 0 {
					t.Errorf("%s(%s) = %v moved to %d", name, in, ok, c.pos)
				}
			}
		}
	}
}

func TestCursorEngineHash(t *testing.T) {
	f := func(in string, want EngineHash) {
		t.Helper()
		c := cursor{b: unhex(t, in)}
		if got, ok := c.engineHash(); !ok || got != want {
			t.Errorf("engineHash(%s) = %#x, %v, want %#x", in, got, ok, want)
		}
	}
	f("07", 7)
	f("fe", math.MaxUint64-1)
	f("cf 0102030405060708", 0x0102030405060708)
	f("d3 fffffffffffffffe", math.MaxUint64-1)
	f("c4 00", 0)
	f("c4 01 ff", 0xff)
	f("c4 07 01020304050607", 0x01020304050607)
	f("c4 08 0102030405060708", 0x0102030405060708)
	f("c4 09 ff 0102030405060708", 0x0102030405060708)
	f("a2 6162", 0x6162)
	f("a9 ff 6162636465666768", 0x6162636465666768)
}

// TestCursorUint32s reads each form near the end of the bytes, where the quick
// way ends, and far from it.
func TestCursorUint32s(t *testing.T) {
	f := func(in string, want ...uint32) {
		t.Helper()
		for _, after := range []int{0, 1, 7, 8, 64} {
			c := cursor{b: append(unhex(t, in), make([]byte, after)...)}
			out := make([]uint32, len(want))
			if !c.uint32s(out) || c.pos != len(c.b)-after {
				t.Errorf("uint32s(%s) failed, or ended at %d", in, c.pos)
				continue
			}
			for i := range want {
				if out[i] != want[i] {
					t.Errorf("uint32s(%s)[%d] = %d, want %d", in, i, out[i], want[i])
				}
			}
		}
	}
	fails := func(in string) {
		t.Helper()
		for _, after := range []int{0, 8} {
			c := cursor{b: append(unhex(t, in), make([]byte, after)...)}
			if c.uint32s(make([]uint32, 1)) {
				t.Errorf("uint32s(%s) did not fail", in)
			}
		}
	}
	f("")
	f("00 7f", 0, 127)
	f("cc 00 cc ff", 0, 255)
	f("cd 0000 cd ffff", 0, 65535)
	f("ce 00000000 ce ffffffff", 0, math.MaxUint32)
	f("cf 0000000000000001 cf 00000000ffffffff", 1, math.MaxUint32)
	f("d0 7f d1 7fff d2 7fffffff d3 00000000ffffffff", 127, math.MaxInt16, math.MaxInt32, math.MaxUint32)
	f("01 cc 80 cd 0102 ce 00010203 01", 1, 128, 0x102, 0x10203, 1)
	fails("ff")
	fails("d0 ff")
	fails("cf 0000000100000000")
	fails("d3 ffffffffffffffff")
	fails("c0")
	fails("a1 31")
	fails("ca 3f800000")
	fails("c1")
}
