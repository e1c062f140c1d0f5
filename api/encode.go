package api

import (
	"strconv"
	"unicode/utf8"
)

// Answers are appended by hand: an answer of eight rows costs 1 µs so, and
// eight with reflection.

const hexDigits = "0123456789abcdef"

// appendString appends t as a JSON string; what is not UTF-8 becomes U+FFFD.
func appendString(dst []byte, t string) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(t); {
		c := t[i]
		if c >= 0x20 && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c < utf8.RuneSelf {
			dst = append(dst, t[start:i]...)
			dst = appendEscape(dst, c)
			i++
			start = i
			continue
		}
		r, size := utf8.DecodeRuneInString(t[i:])
		if r == utf8.RuneError && size == 1 {
			dst = append(dst, t[start:i]...)
			dst = append(dst, `\ufffd`...)
			start = i + 1
		}
		i += size
	}
	dst = append(dst, t[start:]...)
	return append(dst, '"')
}

func appendEscape(dst []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(dst, '\\', c)
	case '\n':
		return append(dst, '\\', 'n')
	case '\r':
		return append(dst, '\\', 'r')
	case '\t':
		return append(dst, '\\', 't')
	}
	return append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
}

// encoder appends one value in one encoding. Maps and arrays are given their
// number of members before them, because msgpack must say it first; the JSON
// form ignores it and sets commas.
type encoder struct {
	b       []byte
	msgpack bool
	// comma says that the JSON form owes one before the next member.
	comma bool
}

func (e *encoder) reset(msgpack bool) {
	e.b, e.msgpack, e.comma = e.b[:0], msgpack, false
}

// sep sets the comma between members.
func (e *encoder) sep() {
	if e.comma {
		e.b = append(e.b, ',')
	}
	e.comma = true
}

func (e *encoder) openMap(n int) {
	if e.msgpack {
		e.b = appendCount(e.b, n, 0x80, 0xde)
		return
	}
	e.sep()
	e.b = append(e.b, '{')
	e.comma = false
}

func (e *encoder) closeMap() {
	if !e.msgpack {
		e.b = append(e.b, '}')
		e.comma = true
	}
}

func (e *encoder) openArray(n int) {
	if e.msgpack {
		e.b = appendCount(e.b, n, 0x90, 0xdc)
		return
	}
	e.sep()
	e.b = append(e.b, '[')
	e.comma = false
}

func (e *encoder) closeArray() {
	if !e.msgpack {
		e.b = append(e.b, ']')
		e.comma = true
	}
}

// key begins a member of a map, whose value the next call appends. name is one
// of ours and needs no escaping.
func (e *encoder) key(name string) *encoder {
	if e.msgpack {
		e.str(name)
		return e
	}
	e.sep()
	e.b = append(e.b, '"')
	e.b = append(e.b, name...)
	e.b = append(e.b, '"', ':')
	e.comma = false
	return e
}

// name is key for a name that is not ours.
func (e *encoder) name(t string) {
	e.str(t)
	if !e.msgpack {
		e.b = append(e.b, ':')
		e.comma = false
	}
}

func (e *encoder) str(t string) {
	if e.msgpack {
		e.b = append(appendStrHead(e.b, len(t)), t...)
		return
	}
	e.sep()
	e.b = appendString(e.b, t)
}

func (e *encoder) uint(n uint64) {
	if e.msgpack {
		e.b = appendUint(e.b, n)
		return
	}
	e.sep()
	e.b = strconv.AppendUint(e.b, n, 10)
}

// int writes a number that is not negative.
func (e *encoder) int(n int) { e.uint(uint64(max(n, 0))) }

func (e *encoder) bool(v bool) {
	switch {
	case !e.msgpack:
		e.sep()
		e.b = strconv.AppendBool(e.b, v)
	case v:
		e.b = append(e.b, 0xc3)
	default:
		e.b = append(e.b, 0xc2)
	}
}

func (e *encoder) null() {
	if e.msgpack {
		e.b = append(e.b, 0xc0)
		return
	}
	e.sep()
	e.b = append(e.b, "null"...)
}

// appendCount appends the head of a map (fix 0x80, long 0xde) or of an array
// (0x90, 0xdc) of n members.
func appendCount(dst []byte, n int, fix, long byte) []byte {
	switch {
	case n < 16:
		return append(dst, fix|byte(n))
	case n <= 0xffff:
		return append(dst, long, byte(n>>8), byte(n))
	}
	return append(dst, long+1, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
}

func appendStrHead(dst []byte, n int) []byte {
	switch {
	case n < 32:
		return append(dst, 0xa0|byte(n))
	case n <= 0xff:
		return append(dst, 0xd9, byte(n))
	case n <= 0xffff:
		return append(dst, 0xda, byte(n>>8), byte(n))
	}
	return append(dst, 0xdb, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
}

func appendUint(dst []byte, n uint64) []byte {
	switch {
	case n < 0x80:
		return append(dst, byte(n))
	case n <= 0xff:
		return append(dst, 0xcc, byte(n))
	case n <= 0xffff:
		return append(dst, 0xcd, byte(n>>8), byte(n))
	case n <= 0xffffffff:
		return append(dst, 0xce, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	}
	return append(dst, 0xcf, byte(n>>56), byte(n>>48), byte(n>>40), byte(n>>32), byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
}
