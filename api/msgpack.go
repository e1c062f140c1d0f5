package api

import (
	"encoding/binary"
	"math"
	"net/http"
	"strconv"
	"unicode/utf8"
	"unsafe"

	"github.com/kvindexd/kvindexd/normalize"
)

// mcursor reads one msgpack value from front to back. Every count is checked
// against the bytes that are left before anything is reserved for it, and what
// is skipped is skipped without recursion: these are bytes of the network.
type mcursor struct {
	b []byte
	i int
	// json is the buffer that features are transcribed into.
	json []byte
}

// mkind is the type of a msgpack value.
type mkind uint8

const (
	mNil mkind = iota + 1
	mBool
	mUint // also a signed form that is not negative
	mInt  // negative
	mFloat
	mStr
	mBin
	mArray
	mMap
	mExt
)

func (k mkind) String() string {
	switch k {
	case mNil:
		return "nil"
	case mBool:
		return "a boolean"
	case mUint:
		return "a number"
	case mInt:
		return "a negative number"
	case mFloat:
		return "a float"
	case mStr:
		return "a string"
	case mBin:
		return "bytes"
	case mArray:
		return "an array"
	case mMap:
		return "a map"
	}
	return "an extension"
}

// head is the first part of a value: its type, and its value or the number of
// bytes or elements that follow.
type head struct {
	kind mkind
	n    uint64
}

func (c *mcursor) malformed(what string) *Error {
	return failf(http.StatusBadRequest, ReasonMalformedBody, "at byte %d of the msgpack body: %s", c.i, what)
}

// take consumes n bytes that are there.
func (c *mcursor) take(n uint64) ([]byte, bool) {
	if n > uint64(len(c.b)-c.i) {
		return nil, false
	}
	v := c.b[c.i : c.i+int(n)]
	c.i += int(n)
	return v, true
}

// big consumes a big-endian unsigned of n bytes.
func (c *mcursor) big(n int) (uint64, bool) {
	v, ok := c.take(uint64(n))
	if !ok {
		return 0, false
	}
	switch n {
	case 1:
		return uint64(v[0]), true
	case 2:
		return uint64(binary.BigEndian.Uint16(v)), true
	case 4:
		return uint64(binary.BigEndian.Uint32(v)), true
	}
	return binary.BigEndian.Uint64(v), true
}

// next consumes the head of a value. Containers have at least one byte for
// each element (two for each pair), strings and bytes all of theirs.
func (c *mcursor) next() (head, *Error) {
	start := c.i
	h, ok := c.header()
	left := uint64(len(c.b) - c.i)
	switch h.kind {
	case mStr, mBin, mArray, mExt:
		ok = ok && h.n <= left
	case mMap:
		ok = ok && h.n <= left/2
	}
	if !ok {
		c.i = start
		return head{}, c.malformed("the body ends inside a value, or the byte begins none")
	}
	return h, nil
}

func (c *mcursor) header() (head, bool) {
	first, ok := c.big(1)
	if !ok {
		return head{}, false
	}
	switch b := byte(first); {
	case b < 0x80:
		return head{mUint, first}, true
	case b < 0x90:
		return head{mMap, first & 0x0f}, true
	case b < 0xa0:
		return head{mArray, first & 0x0f}, true
	case b < 0xc0:
		return head{mStr, first & 0x1f}, true
	case b >= 0xe0:
		return head{mInt, uint64(int64(int8(b)))}, true
	}
	return c.longHeader(byte(first))
}

// longHeader reads the heads whose first byte is only a tag (c0 … df).
func (c *mcursor) longHeader(tag byte) (h head, ok bool) {
	switch tag {
	case 0xc0:
		return head{mNil, 0}, true
	case 0xc2, 0xc3:
		return head{mBool, uint64(tag & 1)}, true
	case 0xc4, 0xc5, 0xc6:
		h.kind = mBin
		h.n, ok = c.big(1 << (tag - 0xc4))
	case 0xc7, 0xc8, 0xc9:
		h.kind = mExt
		h.n, ok = c.big(1 << (tag - 0xc7))
		h.n++ // the type
	case 0xca:
		h.kind = mFloat
		h.n, ok = c.big(4)
		h.n = math.Float64bits(float64(math.Float32frombits(uint32(h.n))))
	case 0xcb:
		h.kind = mFloat
		h.n, ok = c.big(8)
	case 0xcc, 0xcd, 0xce, 0xcf:
		h.kind = mUint
		h.n, ok = c.big(1 << (tag - 0xcc))
	case 0xd0, 0xd1, 0xd2, 0xd3:
		return c.signed(1 << (tag - 0xd0))
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8:
		return head{mExt, 1<<(tag-0xd4) + 1}, true
	case 0xd9, 0xda, 0xdb:
		h.kind = mStr
		h.n, ok = c.big(1 << (tag - 0xd9))
	case 0xdc, 0xdd:
		h.kind = mArray
		h.n, ok = c.big(2 << (tag - 0xdc))
	case 0xde, 0xdf:
		h.kind = mMap
		h.n, ok = c.big(2 << (tag - 0xde))
	}
	return h, ok
}

func (c *mcursor) signed(width int) (head, bool) {
	v, ok := c.big(width)
	shift := 64 - 8*width
	n := int64(v<<shift) >> shift
	if n < 0 {
		return head{mInt, uint64(n)}, ok
	}
	return head{mUint, uint64(n)}, ok
}

// end refuses anything after the value.
func (c *mcursor) end() *Error {
	if c.i != len(c.b) {
		return c.malformed("expected nothing after the value")
	}
	return nil
}

// object calls field for each pair of a map, the cursor standing before its
// value, which field must consume. key is a view of the body.
func (c *mcursor) object(field func(key []byte) *Error) *Error {
	h, err := c.next()
	if err != nil {
		return err
	}
	if h.kind != mMap {
		return failf(http.StatusBadRequest, ReasonMalformedBody, "expected a map, not %s", h.kind)
	}
	for range h.n {
		key, err := c.text("a string as the field's name")
		if err != nil {
			return err
		}
		if err := field(key); err != nil {
			return err
		}
	}
	return nil
}

// array calls elem before each element, which elem must consume.
func (c *mcursor) array(elem func(i int) *Error) *Error {
	h, err := c.expect(mArray, "an array")
	if err != nil {
		return err
	}
	for i := range int(h.n) {
		if err := elem(i); err != nil {
			return err
		}
	}
	return nil
}

// expect consumes the head of a value of one kind. Of another kind, the value
// is passed over and the error is the field's.
func (c *mcursor) expect(k mkind, want string) (head, *Error) {
	start := c.i
	h, err := c.next()
	if err != nil || h.kind == k {
		return h, err
	}
	c.i = start
	if err := c.skip(); err != nil {
		return h, err
	}
	return h, badField("", "must be %s, not %s", want, h.kind)
}

// text reads a str as a view of the body.
func (c *mcursor) text(want string) ([]byte, *Error) {
	h, err := c.expect(mStr, want)
	if err != nil {
		return nil, err
	}
	t, _ := c.take(h.n)
	if !utf8.Valid(t) {
		return nil, c.malformed("the string is not UTF-8")
	}
	return t, nil
}

func (c *mcursor) null() bool {
	if c.i < len(c.b) && c.b[c.i] == 0xc0 {
		c.i++
		return true
	}
	return false
}

func (c *mcursor) str() (string, *Error) {
	t, err := c.text("a string")
	return string(t), err
}

func (c *mcursor) integer(min, max int64) (int64, *Error) {
	start := c.i
	h, err := c.next()
	if err != nil {
		return 0, err
	}
	if h.kind != mUint && h.kind != mInt {
		c.i = start
		if err := c.skip(); err != nil {
			return 0, err
		}
		return 0, badField("", "must be a whole number, not %s", h.kind)
	}
	n := int64(h.n)
	if (h.kind == mUint && h.n > math.MaxInt64) || n < min || n > max {
		return 0, badField("", "must be a whole number from %d to %d", min, max)
	}
	return n, nil
}

// isString says whether a str stands here.
func (c *mcursor) isString() bool {
	start := c.i
	h, err := c.next()
	c.i = start
	return err == nil && h.kind == mStr
}

// u64 reads one whole number from 0 to 2^64-1.
func (c *mcursor) u64() (uint64, *Error) {
	n, err := c.unsigned(0, math.MaxUint64, false, "a number from 0 to 2^64-1")
	return n, err.scalar()
}

// unsigned reads element i of an array of whole numbers up to max.
func (c *mcursor) unsigned(i int, max uint64, signed bool, want string) (uint64, *Error) {
	start := c.i
	h, err := c.next()
	if err != nil {
		return 0, err
	}
	switch {
	case h.kind == mUint && h.n <= max, h.kind == mInt && signed:
		return h.n, nil
	case h.kind == mUint:
		return 0, badIndex("", i, "must be %s; the number is too large", want)
	}
	c.i = start
	if err := c.skip(); err != nil {
		return 0, err
	}
	return 0, badIndex("", i, "must be %s, not %s", want, h.kind)
}

// tokens appends an array of token ids, or one bin of u32 little endian.
func (c *mcursor) tokens(dst []uint32) ([]uint32, *Error) {
	n, raw, err := c.numbers("an array of token ids, or bytes of them as u32 little endian", 4)
	if err != nil {
		return dst, err
	}
	if raw != nil {
		return appendUint32s(dst, raw), nil
	}
	for i := range n {
		v, err := c.unsigned(i, math.MaxUint32, false, "a token id (0 to 4294967295)")
		if err != nil {
			return dst, err
		}
		dst = append(dst, uint32(v))
	}
	return dst, nil
}

// hashes appends an array of u64, or one bin of u64 little endian.
func (c *mcursor) hashes(dst []uint64, signed bool) ([]uint64, *Error) {
	n, raw, err := c.numbers("an array of hashes, or bytes of them as u64 little endian", 8)
	if err != nil {
		return dst, err
	}
	for ; len(raw) > 0; raw = raw[8:] {
		dst = append(dst, binary.LittleEndian.Uint64(raw))
	}
	for i := range n {
		v, err := c.unsigned(i, math.MaxUint64, signed, "a hash (0 to 2^64-1)")
		if err != nil {
			return dst, err
		}
		dst = append(dst, v)
	}
	return dst, nil
}

// numbers reads the head of an array (n elements follow) or a whole bin of
// numbers of width bytes.
func (c *mcursor) numbers(want string, width int) (n int, raw []byte, err *Error) {
	start := c.i
	h, err := c.next()
	if err != nil {
		return 0, nil, err
	}
	switch h.kind {
	case mArray:
		return int(h.n), nil, nil
	case mBin:
		if h.n%uint64(width) != 0 {
			return 0, nil, badField("", "must have a multiple of %d bytes, not %d", width, h.n)
		}
		raw, _ := c.take(h.n)
		return 0, raw, nil
	}
	c.i = start
	if err := c.skip(); err != nil {
		return 0, nil, err
	}
	return 0, nil, badField("", "must be %s, not %s", want, h.kind)
}

// littleEndian says whether this machine stores numbers as the wire does.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// appendUint32s appends the u32 that raw holds, little endian.
func appendUint32s(dst []uint32, raw []byte) []uint32 {
	n := len(raw) / 4
	if n == 0 {
		return dst
	}
	first := len(dst)
	dst = append(dst, make([]uint32, n)...)
	if littleEndian {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&dst[first])), 4*n), raw)
		return dst
	}
	for i := range n {
		dst[first+i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return dst
}

func (c *mcursor) strs(dst []string) ([]string, *Error) {
	err := c.array(func(i int) *Error {
		v, err := c.str()
		if err != nil && err.Reason == ReasonInvalidField {
			return err.within("[" + itoa(i) + "]")
		}
		dst = append(dst, v)
		return err
	})
	return dst, err
}

// raw skips one value and returns its encoding, a view of the body.
func (c *mcursor) raw() ([]byte, *Error) {
	start := c.i
	err := c.skip()
	return c.b[start:c.i], err
}

// skip moves past one value. What is still owed is a number, not a stack.
func (c *mcursor) skip() *Error {
	for owed := uint64(1); owed > 0; owed-- {
		h, err := c.next()
		if err != nil {
			return err
		}
		switch h.kind {
		case mStr, mBin, mExt:
			c.i += int(h.n)
		case mArray:
			owed += h.n
		case mMap:
			owed += 2 * h.n
		}
		if owed > uint64(len(c.b)-c.i)+1 {
			return c.malformed("the body ends inside a value")
		}
	}
	return nil
}

// maxFeatureDepth bounds the nesting of features, which recurse: an object of
// objects of arrays of objects of arrays.
const maxFeatureDepth = 16

// features transcribes the value to JSON and parses that, so that there is one
// reading of features. kwargs_data is passed over.
func (c *mcursor) features() (*normalize.Features, *Error) {
	c.json = c.json[:0]
	if err := c.transcribe(0); err != nil {
		return nil, err
	}
	return parseFeatures(c.json)
}

// transcribe appends one value to c.json. Bytes become null, which no feature
// may be; extensions and map keys that are no strings are refused.
func (c *mcursor) transcribe(depth int) *Error {
	if depth > maxFeatureDepth {
		return badField("", "is nested deeper than %d", maxFeatureDepth)
	}
	h, err := c.next()
	if err != nil {
		return err
	}
	switch h.kind {
	case mArray:
		return c.transcribeArray(h.n, depth)
	case mMap:
		return c.transcribeMap(h.n, depth)
	case mStr:
		t, _ := c.take(h.n)
		if !utf8.Valid(t) {
			return c.malformed("the string is not UTF-8")
		}
		c.json = appendString(c.json, string(t))
	case mBin, mExt:
		c.i += int(h.n)
		c.json = append(c.json, "null"...)
	default:
		c.json = appendScalar(c.json, h)
	}
	return nil
}

func appendScalar(dst []byte, h head) []byte {
	switch h.kind {
	case mBool:
		return strconv.AppendBool(dst, h.n == 1)
	case mUint:
		return strconv.AppendUint(dst, h.n, 10)
	case mInt:
		return strconv.AppendInt(dst, int64(h.n), 10)
	case mFloat:
		if f := math.Float64frombits(h.n); !math.IsNaN(f) && !math.IsInf(f, 0) {
			return strconv.AppendFloat(dst, f, 'e', -1, 64)
		}
	}
	return append(dst, "null"...)
}

func (c *mcursor) transcribeArray(n uint64, depth int) *Error {
	c.json = append(c.json, '[')
	for i := range n {
		if i > 0 {
			c.json = append(c.json, ',')
		}
		if err := c.transcribe(depth + 1); err != nil {
			return err
		}
	}
	c.json = append(c.json, ']')
	return nil
}

func (c *mcursor) transcribeMap(n uint64, depth int) *Error {
	c.json = append(c.json, '{')
	comma := false
	for range n {
		key, err := c.text("a string as the field's name")
		if err != nil {
			return err
		}
		if depth == 0 && string(key) == "kwargs_data" {
			if err := c.skip(); err != nil {
				return err
			}
			continue
		}
		if comma {
			c.json = append(c.json, ',')
		}
		comma = true
		c.json = append(appendString(c.json, string(key)), ':')
		if err := c.transcribe(depth + 1); err != nil {
			return err
		}
	}
	c.json = append(c.json, '}')
	return nil
}
