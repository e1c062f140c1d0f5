package api

import (
	"encoding/binary"
	"math"
	"math/bits"
	"net/http"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth bounds the nesting of a body. Schemas for structured output, the
// deepest values that ride along with a prompt, stay far below it.
const maxDepth = 256

// scanner reads one JSON text from front to back, once. It checks the whole
// grammar, also of what it skips, and builds nothing it is not asked for:
// 8 192 token ids cost encoding/json 2.3 ms and this about 40 µs, which is most
// of what a question costs.
//
// Stricter than encoding/json: text that is not UTF-8 and lone surrogates are
// refused in strings that are kept (two salts must never become one by
// replacement), and so are bodies nested deeper than maxDepth.
type scanner struct {
	b []byte
	i int
	// key holds an unescaped object key until the next one.
	key []byte
}

// malformed is an error of grammar at the scanner's place.
func (s *scanner) malformed(what string) *Error {
	if s.i >= len(s.b) {
		return failf(http.StatusBadRequest, ReasonMalformedBody, "the body ends at byte %d: %s", len(s.b), what)
	}
	return failf(http.StatusBadRequest, ReasonMalformedBody, "at byte %d of the body: %s", s.i, what)
}

// space moves past white space and returns the byte that stands there, 0 at
// the end (a NUL in the text is no token of the grammar either).
func (s *scanner) space() byte {
	for s.i < len(s.b) {
		switch c := s.b[s.i]; c {
		case ' ', '\t', '\n', '\r':
			s.i++
		default:
			return c
		}
	}
	return 0
}

// end refuses anything but white space after the value.
func (s *scanner) end() *Error {
	if s.space(); s.i < len(s.b) {
		return s.malformed("expected nothing after the value")
	}
	return nil
}

// literal consumes word if it stands here.
func (s *scanner) literal(word string) bool {
	if len(s.b)-s.i < len(word) || string(s.b[s.i:s.i+len(word)]) != word {
		return false
	}
	s.i += len(word)
	return true
}

// null consumes a null if it stands here.
func (s *scanner) null() bool {
	return s.space() == 'n' && s.literal("null")
}

// object calls field for each member, the scanner standing before the member's
// value, which field must consume. key is valid until the next call.
func (s *scanner) object(field func(key []byte) *Error) *Error {
	if s.space() != '{' {
		return s.malformed("expected an object")
	}
	s.i++
	if s.space() == '}' {
		s.i++
		return nil
	}
	for {
		if s.space() != '"' {
			return s.malformed("expected a field's name in quotes")
		}
		key, err := s.text()
		if err != nil {
			return err
		}
		if s.space() != ':' {
			return s.malformed("expected ':'")
		}
		s.i++
		if err := field(key); err != nil {
			return err
		}
		switch s.space() {
		case ',':
			s.i++
		case '}':
			s.i++
			return nil
		default:
			return s.malformed("expected ',' or '}'")
		}
	}
}

// array calls elem before each element, which elem must consume.
func (s *scanner) array(elem func(i int) *Error) *Error {
	if s.space() != '[' {
		return s.malformed("expected an array")
	}
	s.i++
	if s.space() == ']' {
		s.i++
		return nil
	}
	for i := 0; ; i++ {
		if err := elem(i); err != nil {
			return err
		}
		switch s.space() {
		case ',':
			s.i++
		case ']':
			s.i++
			return nil
		default:
			return s.malformed("expected ',' or ']'")
		}
	}
}

const (
	lows  = 0x0101010101010101
	highs = 0x8080808080808080
)

// plain moves past the bytes of a string that mean only themselves, eight at a
// time: images travel beside prompts as megabytes of base64.
func (s *scanner) plain() {
	i := s.i
	for i+8 <= len(s.b) {
		w := binary.LittleEndian.Uint64(s.b[i:])
		quote, slash := w^('"'*lows), w^('\\'*lows)
		// The lowest bit set is exact; a borrow only spoils those above it.
		m := ((quote-lows)&^quote | (slash-lows)&^slash | (w-0x20*lows)&^w) & highs
		if m != 0 {
			s.i = i + bits.TrailingZeros64(m)>>3
			return
		}
		i += 8
	}
	for i < len(s.b) && s.b[i] != '"' && s.b[i] != '\\' && s.b[i] >= 0x20 {
		i++
	}
	s.i = i
}

// text reads a string, unescaped; a view of the body where it holds no escape,
// of s.key otherwise. The scanner stands at the opening quote.
func (s *scanner) text() ([]byte, *Error) {
	s.i++
	start := s.i
	s.plain()
	if s.i >= len(s.b) {
		return nil, s.malformed("a string is not closed")
	}
	if s.b[s.i] == '"' {
		t := s.b[start:s.i]
		s.i++
		if !utf8.Valid(t) {
			s.i = start
			return nil, s.malformed("the string is not UTF-8")
		}
		return t, nil
	}
	s.key = append(s.key[:0], s.b[start:s.i]...)
	if err := s.escaped(); err != nil {
		return nil, err
	}
	if !utf8.Valid(s.key) {
		s.i = start
		return nil, s.malformed("the string is not UTF-8")
	}
	return s.key, nil
}

// escaped appends the rest of a string to s.key, from its first escape on.
func (s *scanner) escaped() *Error {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case '"':
			s.i++
			return nil
		case '\\':
			r, err := s.escape()
			if err != nil {
				return err
			}
			s.key = utf8.AppendRune(s.key, r)
		default:
			start := s.i
			if s.plain(); s.i == start {
				return s.malformed("a control character in a string")
			}
			s.key = append(s.key, s.b[start:s.i]...)
		}
	}
	return s.malformed("a string is not closed")
}

// escape reads one escape sequence, or two that make a surrogate pair.
func (s *scanner) escape() (rune, *Error) {
	r, ok := s.unit()
	if !ok {
		return 0, s.malformed("an escape that JSON does not have")
	}
	if !utf16.IsSurrogate(r) {
		return r, nil
	}
	if s.i < len(s.b) && s.b[s.i] == '\\' {
		if low, ok := s.unit(); ok {
			if r = utf16.DecodeRune(r, low); r != utf8.RuneError {
				return r, nil
			}
		}
	}
	return 0, s.malformed("half of a surrogate pair")
}

// unit reads one escape as the UTF-16 unit it stands for.
func (s *scanner) unit() (rune, bool) {
	if s.i+1 >= len(s.b) {
		return 0, false
	}
	c := s.b[s.i+1]
	if c != 'u' {
		s.i += 2
		return simpleEscape(c)
	}
	if len(s.b)-s.i < 6 {
		return 0, false
	}
	r := rune(0)
	for _, c := range s.b[s.i+2 : s.i+6] {
		d, ok := hexDigit(c)
		if !ok {
			return 0, false
		}
		r = r<<4 | rune(d)
	}
	s.i += 6
	return r, true
}

func simpleEscape(c byte) (rune, bool) {
	switch c {
	case '"', '\\', '/':
		return rune(c), true
	case 'b':
		return '\b', true
	case 'f':
		return '\f', true
	case 'n':
		return '\n', true
	case 'r':
		return '\r', true
	case 't':
		return '\t', true
	}
	return 0, false
}

func hexDigit(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10, true
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}

// str reads a string as an owned Go string.
func (s *scanner) str() (string, *Error) {
	if s.space() != '"' {
		return "", s.wrong("a string")
	}
	t, err := s.text()
	return string(t), err
}

// isString says whether a string stands here.
func (s *scanner) isString() bool { return s.space() == '"' }

// u64 reads one whole number from 0 to 2^64-1.
func (s *scanner) u64() (uint64, *Error) {
	n, err := s.element(0, math.MaxUint64, "a number from 0 to 2^64-1")
	return n, err.scalar()
}

// integer reads a whole number in [min, max].
func (s *scanner) integer(min, max int64) (int64, *Error) {
	c := s.space()
	if c != '-' && (c < '0' || c > '9') {
		return 0, s.wrong("a whole number")
	}
	start := s.i
	if err := s.number(); err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(string(s.b[start:s.i]), 10, 64)
	if err != nil || n < min || n > max {
		return 0, badField("", "must be a whole number from %d to %d", min, max)
	}
	return n, nil
}

// wrong says that a value of another type stands here: an invalid field where
// the value is JSON at all, a malformed body where it is not.
func (s *scanner) wrong(want string) *Error {
	c := s.space()
	if err := s.skip(); err != nil {
		return err
	}
	return badField("", "must be %s, not %s", want, typeName(c))
}

// typeName names the type of the value that begins with c.
func typeName(c byte) string {
	switch c {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}

// number moves past a number of JSON's grammar.
func (s *scanner) number() *Error {
	if s.i < len(s.b) && s.b[s.i] == '-' {
		s.i++
	}
	if s.i < len(s.b) && s.b[s.i] == '0' {
		s.i++
	} else if !s.digits() {
		return s.malformed("expected a value")
	}
	if s.i < len(s.b) && s.b[s.i] == '.' {
		s.i++
		if !s.digits() {
			return s.malformed("a fraction without digits")
		}
	}
	if s.i < len(s.b) && s.b[s.i]|0x20 == 'e' {
		s.i++
		if s.i < len(s.b) && (s.b[s.i] == '+' || s.b[s.i] == '-') {
			s.i++
		}
		if !s.digits() {
			return s.malformed("an exponent without digits")
		}
	}
	return nil
}

func (s *scanner) digits() bool {
	start := s.i
	for s.i < len(s.b) && s.b[s.i]-'0' <= 9 {
		s.i++
	}
	return s.i > start
}

// raw skips one value and returns its text, a view of the body.
func (s *scanner) raw() ([]byte, *Error) {
	s.space()
	start := s.i
	err := s.skip()
	return s.b[start:s.i], err
}

// skip moves past one value, checking its grammar, without recursion: a bit of
// nest says whether an open container is an object.
func (s *scanner) skip() *Error {
	var nest [maxDepth / 64]uint64
	depth := 0
	for {
		opened, err := s.skipStart(&nest, &depth)
		if err != nil {
			return err
		}
		if opened {
			continue
		}
		if done, err := s.skipEnd(&nest, &depth); done || err != nil {
			return err
		}
	}
}

// skipStart consumes a scalar, an empty container, or the beginning of a
// container up to its first value (opened).
func (s *scanner) skipStart(nest *[maxDepth / 64]uint64, depth *int) (opened bool, err *Error) {
	switch c := s.space(); c {
	case '"':
		return false, s.skipString()
	case '{', '[':
		s.i++
		if s.space() == c+2 { // ']' and '}' follow their openers by two
			s.i++
			return false, nil
		}
		if *depth == maxDepth {
			return false, failf(http.StatusBadRequest, ReasonMalformedBody, "nested deeper than %d at byte %d", maxDepth, s.i)
		}
		bit := uint64(1) << (*depth % 64)
		nest[*depth/64] &^= bit
		*depth++
		if c == '{' {
			nest[(*depth-1)/64] |= bit
			return true, s.skipKey()
		}
		return true, nil
	case 't', 'f', 'n':
		if s.literal("true") || s.literal("false") || s.literal("null") {
			return false, nil
		}
		return false, s.malformed("expected a value")
	}
	return false, s.number()
}

// skipEnd consumes what follows a value: closing brackets, and a comma up to
// the next value. done says that the outermost value is complete.
func (s *scanner) skipEnd(nest *[maxDepth / 64]uint64, depth *int) (done bool, err *Error) {
	for {
		if *depth == 0 {
			return true, nil
		}
		top := *depth - 1
		inObject := nest[top/64]&(1<<(top%64)) != 0
		switch c := s.space(); {
		case c == ',':
			s.i++
			if inObject {
				return false, s.skipKey()
			}
			return false, nil
		case c == '}' && inObject, c == ']' && !inObject:
			s.i++
			*depth--
		case inObject:
			return false, s.malformed("expected ',' or '}'")
		default:
			return false, s.malformed("expected ',' or ']'")
		}
	}
}

func (s *scanner) skipKey() *Error {
	if s.space() != '"' {
		return s.malformed("expected a field's name in quotes")
	}
	if err := s.skipString(); err != nil {
		return err
	}
	if s.space() != ':' {
		return s.malformed("expected ':'")
	}
	s.i++
	return nil
}

func (s *scanner) skipString() *Error {
	s.i++
	for {
		s.plain()
		switch {
		case s.i >= len(s.b):
			return s.malformed("a string is not closed")
		case s.b[s.i] == '"':
			s.i++
			return nil
		case s.b[s.i] != '\\':
			return s.malformed("a control character in a string")
		}
		if _, ok := s.unit(); !ok {
			return s.malformed("an escape that JSON does not have")
		}
	}
}
