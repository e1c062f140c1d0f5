package zmqwire

import (
	"encoding/binary"
	"math"
)

// cursor reads msgpack from bytes that it neither owns nor trusts. Its methods
// never panic, never recurse and never allocate. One that reads a single value
// and fails has not moved, so that a caller can look at the value in another
// way or skip it.
type cursor struct {
	b   []byte
	pos int
	// short says that a method failed because the bytes ended, or cannot hold
	// as many values as a count says. It is never taken back.
	short bool
}

// valueKind is what a value's first byte says of it. Integers of all widths are
// one kind, and so are str and bin.
type valueKind uint8

const (
	kindInvalid valueKind = iota // 0xc1, or no byte left
	kindNil
	kindBool
	kindInt
	kindFloat
	kindText
	kindArray
	kindMap
	kindExt
)

// lead describes a value's first byte. After it stand width bytes of a big
// endian length. The body is fixed bytes longer than that length; without a
// length field the first byte holds it, under mask.
type lead struct {
	kind               valueKind
	width, fixed, mask uint8
}

// Of the msgpack specification: every first byte.
var leads = func() (t [256]lead) {
	fill := func(from, to int, l lead) {
		for i := from; i <= to; i++ {
			t[i] = l
		}
	}
	fill(0x00, 0x7f, lead{kind: kindInt})
	fill(0x80, 0x8f, lead{kind: kindMap, mask: 0x0f})
	fill(0x90, 0x9f, lead{kind: kindArray, mask: 0x0f})
	fill(0xa0, 0xbf, lead{kind: kindText, mask: 0x1f})
	t[0xc0] = lead{kind: kindNil}
	fill(0xc2, 0xc3, lead{kind: kindBool})
	t[0xca] = lead{kind: kindFloat, fixed: 4}
	t[0xcb] = lead{kind: kindFloat, fixed: 8}
	for i, width := range []uint8{1, 2, 4} {
		t[0xc4+i] = lead{kind: kindText, width: width} // bin
		t[0xd9+i] = lead{kind: kindText, width: width} // str
		t[0xc7+i] = lead{kind: kindExt, width: width, fixed: 1}
	}
	for i, width := range []uint8{1, 2, 4, 8} {
		t[0xcc+i] = lead{kind: kindInt, fixed: width} // uint
		t[0xd0+i] = lead{kind: kindInt, fixed: width} // int
	}
	for i := range 5 {
		t[0xd4+i] = lead{kind: kindExt, fixed: 1 + 1<<i}
	}
	for i, width := range []uint8{2, 4} {
		t[0xdc+i] = lead{kind: kindArray, width: width}
		t[0xde+i] = lead{kind: kindMap, width: width}
	}
	fill(0xe0, 0xff, lead{kind: kindInt})
	return t
}()

// kind returns the kind of the next value.
func (c *cursor) kind() valueKind {
	if c.pos >= len(c.b) {
		return kindInvalid
	}
	return leads[c.b[c.pos]].kind
}

// is says whether the next value is of the wanted kind.
func (c *cursor) is(want valueKind) bool {
	if c.pos >= len(c.b) {
		c.short = true
		return false
	}
	return leads[c.b[c.pos]].kind == want
}

// isBin says whether the next value is a bin, not a str.
func (c *cursor) isBin() bool {
	return c.is(kindText) && 0xc4 <= c.b[c.pos] && c.b[c.pos] <= 0xc6
}

// head reads the next value's head without moving: its kind, the bytes of the
// head, and n, the bytes of its body or the number of its elements (arrays) or
// pairs (maps). It fails if the bytes left cannot hold so much; an element takes
// one byte at least.
func (c *cursor) head() (kind valueKind, size, n int, ok bool) {
	rest := c.b[c.pos:]
	if len(rest) == 0 {
		c.short = true
		return kindInvalid, 0, 0, false
	}
	l := leads[rest[0]]
	size = 1 + int(l.width)
	if len(rest) < size {
		c.short = true
		return kindInvalid, 0, 0, false
	}
	var length uint64
	switch l.width {
	case 0:
		length = uint64(rest[0] & l.mask)
	case 1:
		length = uint64(rest[1])
	case 2:
		length = uint64(binary.BigEndian.Uint16(rest[1:]))
	case 4:
		length = uint64(binary.BigEndian.Uint32(rest[1:]))
	}
	length += uint64(l.fixed)
	least := length
	if l.kind == kindMap {
		least *= 2
	}
	if least > uint64(len(rest)-size) {
		c.short = true
		return kindInvalid, 0, 0, false
	}
	return l.kind, size, int(length), l.kind != kindInvalid
}

// skip moves past the next value, whatever it is and however deep it nests.
func (c *cursor) skip() bool {
	start := c.pos
	for left := 1; left > 0; left-- {
		kind, size, n, ok := c.head()
		if !ok {
			c.pos = start
			return false
		}
		c.pos += size
		switch kind {
		case kindArray:
			left += n
		case kindMap:
			left += 2 * n
		default:
			c.pos += n
		}
		if left-1 > len(c.b)-c.pos { // so left cannot overflow either
			c.short = true
			c.pos = start
			return false
		}
	}
	return true
}

// null moves past a nil, if the next value is one.
func (c *cursor) null() bool {
	if c.pos < len(c.b) && c.b[c.pos] == 0xc0 {
		c.pos++
		return true
	}
	return false
}

// arrayLen moves past an array's head.
func (c *cursor) arrayLen() (int, bool) { return c.count(kindArray) }

// mapLen moves past a map's head and returns the number of its pairs.
func (c *cursor) mapLen() (int, bool) { return c.count(kindMap) }

func (c *cursor) count(want valueKind) (int, bool) {
	if !c.is(want) {
		return 0, false
	}
	_, size, n, ok := c.head()
	if !ok {
		return 0, false
	}
	c.pos += size
	return n, true
}

// text reads a str or a bin. The bytes are the cursor's.
func (c *cursor) text() ([]byte, bool) {
	if !c.is(kindText) {
		return nil, false
	}
	_, size, n, ok := c.head()
	if !ok {
		return nil, false
	}
	begin := c.pos + size
	c.pos = begin + n
	return c.b[begin:c.pos:c.pos], true
}

// integer reads an integer of any width: its two's complement bits, and whether
// it is below zero.
func (c *cursor) integer() (bits uint64, negative, ok bool) {
	if !c.is(kindInt) {
		return 0, false, false
	}
	_, _, n, ok := c.head()
	if !ok {
		return 0, false, false
	}
	first, body := c.b[c.pos], c.b[c.pos+1:]
	c.pos += 1 + n
	var v int64
	switch first {
	case 0xcc:
		return uint64(body[0]), false, true
	case 0xcd:
		return uint64(binary.BigEndian.Uint16(body)), false, true
	case 0xce:
		return uint64(binary.BigEndian.Uint32(body)), false, true
	case 0xcf:
		return binary.BigEndian.Uint64(body), false, true
	case 0xd0:
		v = int64(int8(body[0]))
	case 0xd1:
		v = int64(int16(binary.BigEndian.Uint16(body)))
	case 0xd2:
		v = int64(int32(binary.BigEndian.Uint32(body)))
	case 0xd3:
		v = int64(binary.BigEndian.Uint64(body))
	default: // one byte: 0 to 127, -32 to -1
		v = int64(int8(first))
	}
	return uint64(v), v < 0, true
}

// unsigned reads an integer from 0 to limit.
func (c *cursor) unsigned(limit uint64) (uint64, bool) {
	start := c.pos
	v, negative, ok := c.integer()
	if !ok || negative || v > limit {
		c.pos = start
		return 0, false
	}
	return v, true
}

// float reads a float of either width, or an integer as a float.
func (c *cursor) float() (float64, bool) {
	if c.kind() == kindInt {
		v, negative, ok := c.integer()
		if negative {
			return float64(int64(v)), ok
		}
		return float64(v), ok
	}
	if !c.is(kindFloat) {
		return 0, false
	}
	_, _, n, ok := c.head()
	if !ok {
		return 0, false
	}
	body := c.b[c.pos+1:]
	c.pos += 1 + n
	if n == 4 {
		return float64(math.Float32frombits(binary.BigEndian.Uint32(body))), true
	}
	return math.Float64frombits(binary.BigEndian.Uint64(body)), true
}

// boolean reads true or false.
func (c *cursor) boolean() (value, ok bool) {
	if !c.is(kindBool) {
		return false, false
	}
	c.pos++
	return c.b[c.pos-1] == 0xc3, true
}

// engineHash reads a handle in either of its forms: an integer, or the last
// eight bytes of a str or bin.
func (c *cursor) engineHash() (EngineHash, bool) {
	if c.kind() == kindInt {
		v, _, ok := c.integer()
		return EngineHash(v), ok
	}
	s, ok := c.text()
	if !ok {
		return 0, false
	}
	if len(s) >= 8 {
		return EngineHash(binary.BigEndian.Uint64(s[len(s)-8:])), true
	}
	var h EngineHash
	for _, b := range s {
		h = h<<8 | EngineHash(b)
	}
	return h, true
}

// engineHashes reads len(out) handles.
func (c *cursor) engineHashes(out []EngineHash) bool {
	for i := range out {
		if rest := c.b[c.pos:]; len(rest) >= 9 && rest[0] == 0xcf {
			out[i] = EngineHash(binary.BigEndian.Uint64(rest[1:]))
			c.pos += 9
			continue
		}
		h, ok := c.engineHash()
		if !ok {
			return false
		}
		out[i] = h
	}
	return true
}

// narrow describes the first byte of a token in its usual forms: the bytes of
// the whole value, and how far 8 bytes from there, read big endian, are to be
// shifted left and right to leave the number. size 0 is any other form.
type narrow struct{ size, left, right uint8 }

var narrows = func() (t [256]narrow) {
	for i := range 0x80 {
		t[i] = narrow{size: 1, left: 0, right: 56}
	}
	t[0xcc] = narrow{size: 2, left: 8, right: 56}
	t[0xcd] = narrow{size: 3, left: 8, right: 48}
	t[0xce] = narrow{size: 5, left: 8, right: 32}
	return t
}()

// uint32s reads len(out) integers that fit in 32 bits. It is where most of a
// batch's bytes are read. Tokens of two and of four bytes stand mixed at random,
// which no branch predictor can follow, so the width is looked up and not
// branched on: a quarter less time for a batch of stores.
func (c *cursor) uint32s(out []uint32) bool {
	b, pos := c.b, c.pos
	for i := range out {
		if len(b)-pos >= 8 {
			n := narrows[b[pos]]
			if n.size != 0 {
				v := binary.BigEndian.Uint64(b[pos:])
				out[i] = uint32(v << (n.left & 63) >> (n.right & 63))
				pos += int(n.size)
				continue
			}
		}
		c.pos = pos
		v, ok := c.unsigned(math.MaxUint32)
		if !ok {
			return false
		}
		out[i], pos = uint32(v), c.pos
	}
	c.pos = pos
	return true
}
