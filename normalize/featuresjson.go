package normalize

import (
	"bytes"
	"io"

	"github.com/go-json-experiment/json/jsontext"
)

// ParseFeaturesJSON is ParseFeatures for the JSON text of a request's features.
// It reads the two members it needs as they stream by and skips all else, so
// that kwargs_data of megabytes and masks of thousands of booleans cost little.
// Of a name that comes twice the last value counts, as for vLLM. Text that is no
// JSON value, in valid UTF-8 and of bounded depth, is FeaturesNotObject.
func ParseFeaturesJSON(raw []byte) *Features {
	r := featuresReader{jsontext.NewDecoder(bytes.NewBuffer(raw), jsontext.AllowDuplicateNames(true))}
	f, err := r.features()
	if err == nil {
		_, err = r.dec.ReadToken() // what follows must be the end
	}
	if err != io.EOF {
		return badFeatures(FeaturesNotObject, paramRoot)
	}
	return f
}

// featuresReader reads the parts of a features object from a stream of tokens.
// Errors are the decoder's: text that is no JSON.
type featuresReader struct{ dec *jsontext.Decoder }

func (r featuresReader) features() (*Features, error) {
	switch r.dec.PeekKind() {
	case 'n':
		return nil, r.dec.SkipValue()
	case '{':
	default:
		return badFeatures(FeaturesNotObject, paramRoot), r.dec.SkipValue()
	}
	hashes := rawMember[rawIdent]{null: true}
	spans := rawMember[span]{null: true}
	err := r.object(func(name string) (err error) {
		switch name {
		case membHashes:
			hashes, err = readMember(r, r.ident)
		case membSpans:
			spans, err = readMember(r, r.span)
		default:
			err = r.dec.SkipValue()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return joinFeatures(hashes, spans), nil
}

// object reads an object and calls value to read each member's value.
func (r featuresReader) object(value func(name string) error) error {
	if _, err := r.dec.ReadToken(); err != nil {
		return err
	}
	for r.dec.PeekKind() == '"' {
		name, err := r.dec.ReadToken()
		if err != nil {
			return err
		}
		if err := value(name.String()); err != nil {
			return err
		}
	}
	_, err := r.dec.ReadToken()
	return err
}

func readMember[T any](r featuresReader, one func() (T, error)) (rawMember[T], error) {
	kind := r.dec.PeekKind()
	m := rawMember[T]{null: kind == 'n', object: kind == '{'}
	if !m.object {
		return m, r.dec.SkipValue()
	}
	m.lists = map[string]rawList[T]{}
	err := r.object(func(name string) (err error) {
		m.lists[name], err = readList(r, one)
		return err
	})
	return m, err
}

func readList[T any](r featuresReader, one func() (T, error)) (rawList[T], error) {
	kind := r.dec.PeekKind()
	l := rawList[T]{null: kind == 'n', array: kind == '['}
	if !l.array {
		return l, r.dec.SkipValue()
	}
	if _, err := r.dec.ReadToken(); err != nil {
		return l, err
	}
	for k := r.dec.PeekKind(); k != ']' && k != 0; k = r.dec.PeekKind() {
		v, err := one()
		if err != nil {
			return l, err
		}
		l.items = append(l.items, v)
	}
	_, err := r.dec.ReadToken()
	return l, err
}

func (r featuresReader) ident() (rawIdent, error) {
	if r.dec.PeekKind() != '"' {
		return rawIdent{}, r.dec.SkipValue()
	}
	s, err := r.dec.ReadToken()
	if err != nil {
		return rawIdent{}, err
	}
	h, ok := ParseIdentifier(s.String())
	return rawIdent{h, ok}, nil
}

func (r featuresReader) span() (span, error) {
	if r.dec.PeekKind() != '{' {
		return span{isBad: true}, r.dec.SkipValue()
	}
	var s span
	var offset, length int64
	var okOffset, okLength bool
	err := r.object(func(name string) (err error) {
		switch name {
		case "offset":
			offset, okOffset, err = r.integer()
		case "length":
			length, okLength, err = r.integer()
		case "is_embed":
			err = r.mask(&s)
		default:
			err = r.dec.SkipValue()
		}
		return err
	})
	s.setRange(offset, okOffset, length, okLength)
	return s, err
}

func (r featuresReader) integer() (int64, bool, error) {
	if r.dec.PeekKind() != '0' {
		return 0, false, r.dec.SkipValue()
	}
	raw, err := r.dec.ReadValue()
	if err != nil {
		return 0, false, err
	}
	n, ok := integerText(string(raw))
	return n, ok, nil
}

// mask reads is_embed into s.
func (r featuresReader) mask(s *span) error {
	kind := r.dec.PeekKind()
	raw, err := r.dec.ReadValue()
	if err != nil {
		return err
	}
	s.hasMask, s.badMask, s.mask = kind != 'n', false, nil
	switch kind {
	case 'n':
	case '[':
		s.mask, s.badMask = booleans(raw)
	default:
		s.badMask = true
	}
	return nil
}

// booleans reads a valid JSON array; bad if it holds anything but booleans.
func booleans(raw []byte) (mask []bool, bad bool) {
	mask = make([]bool, 0, bytes.Count(raw, []byte{','})+1)
	for i := 1; i < len(raw)-1; {
		switch raw[i] {
		case 't':
			mask = append(mask, true)
			i += len("true")
		case 'f':
			mask = append(mask, false)
			i += len("false")
		case ',', ' ', '\t', '\n', '\r':
			i++
		default:
			return nil, true
		}
	}
	return mask, false
}
