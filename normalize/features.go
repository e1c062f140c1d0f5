package normalize

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
)

// Features is what a request says of its images and videos: vLLM's `features`
// object, read once and independent of any worker. A nil *Features is that of a
// request without any. It is immutable.
type Features struct {
	// defect is set where the object as a whole cannot be read.
	defect refusal
	// modalities, ascending by name.
	modalities []modality
}

// modality is the images, or the videos, of a request.
type modality struct {
	name   string
	member string // a member of the features where it stands
	defect refusal
	items  []item
}

// item is one image or video: its identifier and where its placeholder stands.
type item struct {
	hash   MMHash
	noHash bool // the identifier is no string, or empty

	span
}

// span is one placeholder. Values beyond an int64 are kept as the largest one:
// no prompt reaches there.
type span struct {
	offset, length int64
	isBad          bool
	bad            string // the part of it that is bad, "" where it is the whole

	hasMask bool   // is_embed is neither absent nor null
	badMask bool   // is_embed is no array of booleans
	mask    []bool // is_embed
}

// refusal is a reason and the field of the request that it is about.
type refusal struct {
	reason Reason
	param  string
}

// Names of the members that are read. kwargs_data, which can be megabytes, and
// whatever else stands there is not.
const (
	membHashes = "mm_hashes"
	membSpans  = "mm_placeholders"
	paramRoot  = "features"
	modImage   = "image"
	modVideo   = "video"
)

// Images returns the number of items that the features declare, as far as they
// can be read.
func (f *Features) Images() int {
	n := 0
	if f != nil {
		for i := range f.modalities {
			n += len(f.modalities[i].items)
		}
	}
	return n
}

// Empty says that no images are declared and nothing is wrong: absent or null
// features, absent or null hashes, empty lists.
func (f *Features) Empty() bool {
	if f == nil {
		return true
	}
	if f.defect != (refusal{}) {
		return false
	}
	for i := range f.modalities {
		if m := &f.modalities[i]; m.defect != (refusal{}) || len(m.items) > 0 {
			return false
		}
	}
	return true
}

// rawList is one modality's list of T as the request has it.
type rawList[T any] struct {
	null  bool // null, or absent
	array bool
	items []T
}

// rawIdent is one identifier.
type rawIdent struct {
	hash MMHash
	ok   bool
}

// rawMember is mm_hashes or mm_placeholders as the request has it.
type rawMember[T any] struct {
	null   bool // null, or absent
	object bool
	lists  map[string]rawList[T]
}

// ParseFeatures reads a request's features as encoding/json or a msgpack decoder
// gives them: nil, maps with string keys, []any, strings, booleans, numbers of
// any type. It never fails; what is wrong is told by Prompt.Project. An integer
// may come as a float64 of integral value, but a json.Number must be written as
// an integer.
func ParseFeatures(v any) *Features {
	if v == nil {
		return nil
	}
	obj, ok := v.(map[string]any)
	if !ok {
		return badFeatures(FeaturesNotObject, paramRoot)
	}
	return joinFeatures(
		memberOf(obj[membHashes], identOf),
		memberOf(obj[membSpans], spanOf),
	)
}

func badFeatures(r Reason, param string) *Features {
	return &Features{defect: refusal{r, param}}
}

// joinFeatures puts the two members together.
func joinFeatures(hashes rawMember[rawIdent], spans rawMember[span]) *Features {
	switch {
	case hashes.null:
		return nil
	case !hashes.object:
		return badFeatures(MMHashesNotObject, paramRoot+"."+membHashes)
	case !spans.object:
		return badFeatures(MMPlaceholdersNotObject, paramRoot+"."+membSpans)
	}
	names := slices.Collect(maps.Keys(hashes.lists))
	for name := range spans.lists {
		if _, ok := hashes.lists[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	f := &Features{modalities: make([]modality, 0, len(names))}
	for _, name := range names {
		h, ok := hashes.lists[name]
		h.null = h.null || !ok
		s, ok := spans.lists[name]
		s.null = s.null || !ok
		f.modalities = append(f.modalities, joinModality(name, h, s))
	}
	return f
}

func joinModality(name string, h rawList[rawIdent], s rawList[span]) modality {
	m := modality{name: name, member: membHashes}
	switch {
	case h.null:
		m.member = membSpans
		m.defect = refusal{UnpairedModality, m.param(membHashes)}
	case s.null:
		m.defect = refusal{UnpairedModality, m.param(membSpans)}
	case !h.array:
		m.defect = refusal{NotAnArray, m.param(membHashes)}
	case !s.array:
		m.defect = refusal{NotAnArray, m.param(membSpans)}
	case len(h.items) != len(s.items):
		m.defect = refusal{LengthMismatch, m.param(membSpans)}
	default:
		m.items = make([]item, len(h.items))
		for i := range m.items {
			m.items[i] = item{h.items[i].hash, !h.items[i].ok, s.items[i]}
		}
	}
	return m
}

// param names a modality's list in a member of the features.
func (m *modality) param(member string) string {
	return paramRoot + "." + member + "." + quoteName(m.name)
}

// paramOf names item i in that list.
func (m *modality) paramOf(member string, i int) string {
	return m.param(member) + "[" + strconv.Itoa(i) + "]"
}

// quoteName bounds and quotes a name that a request made up.
func quoteName(name string) string {
	const most = 32
	for _, c := range name {
		if c != '_' && (c < 'a' || c > 'z') || len(name) > most {
			return fmt.Sprintf("%.*q", most, name)
		}
	}
	return name
}

func memberOf[T any](v any, one func(any) T) rawMember[T] {
	obj, ok := v.(map[string]any)
	m := rawMember[T]{null: v == nil, object: ok}
	if ok {
		m.lists = make(map[string]rawList[T], len(obj))
		for name, l := range obj {
			m.lists[name] = listOf(l, one)
		}
	}
	return m
}

func listOf[T any](v any, one func(any) T) rawList[T] {
	arr, ok := v.([]any)
	l := rawList[T]{null: v == nil, array: ok}
	if ok {
		l.items = make([]T, len(arr))
		for i, e := range arr {
			l.items[i] = one(e)
		}
	}
	return l
}

func identOf(v any) rawIdent {
	s, _ := v.(string)
	h, ok := ParseIdentifier(s)
	return rawIdent{h, ok}
}

func spanOf(v any) span {
	obj, ok := v.(map[string]any)
	if !ok {
		return span{isBad: true}
	}
	var s span
	offset, okOffset := integer(obj["offset"])
	length, okLength := integer(obj["length"])
	s.setRange(offset, okOffset, length, okLength)
	if m, ok := obj["is_embed"]; ok && m != nil {
		s.hasMask = true
		s.mask, s.badMask = maskOf(m)
	}
	return s
}

// maskOf reads a mask; bad if it is anything but an array of booleans.
func maskOf(v any) (mask []bool, bad bool) {
	arr, ok := v.([]any)
	if !ok {
		return nil, true
	}
	mask = make([]bool, len(arr))
	for i, e := range arr {
		b, ok := e.(bool)
		if !ok {
			return nil, true
		}
		mask[i] = b
	}
	return mask, false
}

// setRange keeps a placeholder's range and says what is wrong with it.
func (s *span) setRange(offset int64, okOffset bool, length int64, okLength bool) {
	switch {
	case !okOffset || offset < 0:
		s.isBad, s.bad = true, ".offset"
	case !okLength || length <= 0:
		s.isBad, s.bad = true, ".length"
	default:
		s.offset, s.length = offset, length
	}
}

// integer reads an integer of any width; one beyond an int64 is the nearest.
func integer(v any) (int64, bool) {
	switch n := v.(type) {
	case int:
		return int64(n), true
	case int8:
		return int64(n), true
	case int16:
		return int64(n), true
	case int32:
		return int64(n), true
	case int64:
		return n, true
	case uint:
		return clampUint(uint64(n)), true
	case uint8:
		return int64(n), true
	case uint16:
		return int64(n), true
	case uint32:
		return int64(n), true
	case uint64:
		return clampUint(n), true
	case float32:
		return integralFloat(float64(n))
	case float64:
		return integralFloat(n)
	case json.Number:
		return integerText(string(n))
	}
	return 0, false
}

func clampUint(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// integralFloat reads the float64 that encoding/json makes of an integer.
func integralFloat(f float64) (int64, bool) {
	switch {
	case f != math.Trunc(f): // also NaN
		return 0, false
	case f >= math.MaxInt64:
		return math.MaxInt64, true
	case f <= math.MinInt64:
		return math.MinInt64, true
	}
	return int64(f), true
}

// integerText reads an integer as JSON writes it. An exponent or a fraction
// makes it something else, whatever its value.
func integerText(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err == nil {
		return n, true
	}
	if e, ok := err.(*strconv.NumError); ok && e.Err == strconv.ErrRange {
		return n, true // the nearest, says strconv
	}
	return 0, false
}

// firstOffset returns the place of the first placeholder, at most n. Where one
// placeholder's place cannot be trusted an image may stand anywhere: 0.
func (f *Features) firstOffset(n int) int {
	if f == nil {
		return n
	}
	if f.defect != (refusal{}) {
		return 0
	}
	first := int64(n)
	for i := range f.modalities {
		m := &f.modalities[i]
		if m.defect != (refusal{}) {
			return 0
		}
		for j := range m.items {
			if m.items[j].isBad {
				return 0
			}
			first = min(first, m.items[j].offset)
		}
	}
	return int(first)
}

// byOffset orders ranges by where they begin.
func byOffset(a, b Range) int { return cmp.Compare(a.Offset, b.Offset) }
