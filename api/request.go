package api

import (
	"math"
	"math/bits"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvindexd/kvindexd/normalize"
)

// Include selects what an answer carries beside the rows.
type Include uint8

const (
	// IncludeZero adds the streams that hold nothing of the prompt.
	IncludeZero Include = 1 << iota
	// IncludeProjection adds the prompt as workers with padded placeholders
	// have it, its length, and the marker of each image.
	IncludeProjection
	// IncludeHashes adds the local and sequence hashes of the blocks.
	IncludeHashes
)

// MatchRequest asks who holds how much of a prompt. Exactly one of Tokens,
// BlockHashes and SequenceHashes says what the prompt is.
type MatchRequest struct {
	// Model is a canonical name, an alias or an adapter's name; empty where
	// there is only one.
	Model     string
	LoraName  string
	Namespace string
	Role      string
	// CacheSalt isolates the prompt; it is never shown again.
	CacheSalt string

	Tokens         []uint32
	BlockHashes    []normalize.LocalHash
	SequenceHashes []normalize.SequenceHash
	// HashBlockSize is the block size in tokens that the hashes were made
	// with; required with hashes.
	HashBlockSize uint32

	Features *normalize.Features
	Mode     normalize.Mode

	// Workers are the candidates; nil for all.
	Workers []string
	// TopK bounds the number of rows, MinTokens is the least a row must match
	// on any tier; 0 for no bound.
	TopK      int
	MinTokens int
	Include   Include
	// RequestID is echoed and logged.
	RequestID string

	// seen are the fields that the body has, given those that are not null.
	seen, given fieldSet
	// unknown counts the fields that are not read.
	unknown int
}

// fieldSet is a set of the fields a body gave.
type fieldSet uint32

// The fields of a match request that are read.
const (
	fieldModel fieldSet = 1 << iota
	fieldLora
	fieldNamespace
	fieldRole
	fieldSalt
	fieldTokens
	fieldBlockHashes
	fieldSequenceHashes
	fieldHashBlockSize
	fieldFeatures
	fieldMode
	fieldWorkers
	fieldTopK
	fieldMinTokens
	fieldInclude
	fieldRequestID
)

const fieldsOfPrompt = fieldTokens | fieldBlockHashes | fieldSequenceHashes

// maxUnknown bounds the fields that are passed over: each is compared with the
// isolation fields.
const maxUnknown = 1024

// maxName bounds names and ids: what is longer is no name.
const maxName = 1024

// matchFields are the names, in the order of the bits.
var matchFields = [...]string{
	"model", "lora_name", "namespace", "role", "cache_salt", "token_ids", "block_hashes", "sequence_hashes",
	"hash_block_size", "features", "mm", "workers", "top_k", "min_tokens", "include", "request_id",
}

// matchField is the field of that name, 0 for one that is not read.
func matchField(key []byte) fieldSet {
	for i, name := range matchFields {
		if string(key) == name {
			return 1 << i
		}
	}
	return 0
}

// name is the field's name in a body.
func (f fieldSet) name() string { return matchFields[bits.TrailingZeros32(uint32(f))] }

// reset empties r for the next body and keeps its memory.
func (r *MatchRequest) reset() {
	*r = MatchRequest{
		Tokens:         r.Tokens[:0],
		BlockHashes:    r.BlockHashes[:0],
		SequenceHashes: r.SequenceHashes[:0],
		Workers:        r.Workers[:0],
	}
}

// value reads one value of a body in either encoding, the reader standing
// before it. Implemented by the JSON scanner and the msgpack cursor.
type value interface {
	null() bool
	str() (string, *Error)
	integer(min, max int64) (int64, *Error)
	tokens(dst []uint32) ([]uint32, *Error)
	hashes(dst []uint64, signed bool) ([]uint64, *Error)
	strs(dst []string) ([]string, *Error)
	features() (*normalize.Features, *Error)
	skip() *Error
}

// decodeMatch reads one match request. A body of vLLM's generate route, or an
// answer of its render routes, passes as it is: what is not read is skipped.
func decodeMatch(s *scanner, r *MatchRequest) *Error {
	r.reset()
	err := s.object(func(key []byte) *Error { return r.field(key, s) })
	if err != nil {
		return err
	}
	return r.check()
}

// decodeMatchMsgpack is decodeMatch for a msgpack body.
func decodeMatchMsgpack(c *mcursor, r *MatchRequest) *Error {
	r.reset()
	err := c.object(func(key []byte) *Error { return r.field(key, c) })
	if err != nil {
		return err
	}
	return r.check()
}

// field reads one member of a body into r.
func (r *MatchRequest) field(key []byte, v value) *Error {
	f := matchField(key)
	if f == 0 {
		if r.unknown++; r.unknown > maxUnknown {
			return failf(http.StatusBadRequest, ReasonMalformedBody, "more than %d fields that are not read", maxUnknown)
		}
		return skipUnknown(key, v, nil)
	}
	if r.seen&f != 0 {
		return duplicate(f.name())
	}
	r.seen |= f
	if v.null() {
		if f == fieldTokens {
			return badField("token_ids", "must be an array of token ids, not null")
		}
		return nil
	}
	r.given |= f
	err := r.set(f, v)
	if err != nil && err.Reason != ReasonMalformedBody {
		return err.within(f.name())
	}
	return err
}

func duplicate(name string) *Error {
	e := failf(http.StatusBadRequest, ReasonDuplicateField, "the body has this field twice")
	e.Param = name
	return e
}

// set reads the value of field f.
func (r *MatchRequest) set(f fieldSet, v value) (err *Error) {
	switch f {
	case fieldTokens:
		r.Tokens, err = v.tokens(r.Tokens)
	case fieldModel:
		r.Model, err = name(v)
	case fieldLora:
		r.LoraName, err = name(v)
	case fieldNamespace:
		r.Namespace, err = name(v)
	case fieldRole:
		r.Role, err = name(v)
	case fieldRequestID:
		r.RequestID, err = name(v)
	case fieldSalt:
		r.CacheSalt, err = v.str()
	case fieldBlockHashes:
		r.BlockHashes, err = localHashes(r.BlockHashes, v)
	case fieldSequenceHashes:
		r.SequenceHashes, err = sequenceHashes(r.SequenceHashes, v)
	case fieldFeatures:
		r.Features, err = v.features()
	default:
		return r.setOption(f, v)
	}
	return err
}

// setOption reads the fields that steer the answer.
func (r *MatchRequest) setOption(f fieldSet, v value) (err *Error) {
	switch f {
	case fieldHashBlockSize:
		var n int64
		n, err = v.integer(1, math.MaxUint32)
		r.HashBlockSize = uint32(n)
	case fieldTopK:
		r.TopK, err = count(v)
	case fieldMinTokens:
		r.MinTokens, err = count(v)
	case fieldMode:
		r.Mode, err = mode(v)
	case fieldWorkers:
		r.Workers, err = v.strs(r.Workers)
	case fieldInclude:
		r.Include, err = include(v)
	}
	return err
}

func count(v value) (int, *Error) {
	n, err := v.integer(0, math.MaxInt32)
	return int(n), err
}

func name(v value) (string, *Error) {
	t, err := v.str()
	if err == nil && len(t) > maxName {
		return "", badField("", "must have at most %d bytes, not %d", maxName, len(t))
	}
	return t, err
}

func localHashes(dst []normalize.LocalHash, v value) ([]normalize.LocalHash, *Error) {
	hs, err := v.hashes(nil, false)
	for _, h := range hs {
		dst = append(dst, normalize.LocalHash(h))
	}
	return dst, err
}

func sequenceHashes(dst []normalize.SequenceHash, v value) ([]normalize.SequenceHash, *Error) {
	hs, err := v.hashes(nil, false)
	for _, h := range hs {
		dst = append(dst, normalize.SequenceHash(h))
	}
	return dst, err
}

func mode(v value) (normalize.Mode, *Error) {
	t, err := v.str()
	if err != nil {
		return 0, err
	}
	m, bad := normalize.ParseMode(t)
	if bad != nil {
		return 0, badField("", "must be auto, exact or text_only")
	}
	return m, nil
}

func include(v value) (Include, *Error) {
	words, err := v.strs(nil)
	if err != nil {
		return 0, err
	}
	var in Include
	for i, w := range words {
		switch w {
		case "zero":
			in |= IncludeZero
		case "projection":
			in |= IncludeProjection
		case "hashes":
			in |= IncludeHashes
		default:
			return 0, badIndex("", i, "must be zero, projection or hashes")
		}
	}
	return in, nil
}

// check is what a body must have as a whole.
func (r *MatchRequest) check() *Error {
	switch r.given & fieldsOfPrompt {
	case 0:
		e := failf(http.StatusBadRequest, ReasonMissingField, "give the prompt as token_ids, or as block_hashes or sequence_hashes")
		e.Param = "token_ids"
		return e
	case fieldTokens:
		return nil
	case fieldBlockHashes, fieldSequenceHashes:
		return r.checkHashes()
	}
	return failf(http.StatusBadRequest, ReasonConflictingFields, "give only one of token_ids, block_hashes and sequence_hashes")
}

// checkHashes: hashes carry adapter, salt and images already. Local hashes
// that were made without the salt a body names would match the unsalted
// blocks, hence the refusal.
func (r *MatchRequest) checkHashes() *Error {
	if r.HashBlockSize == 0 {
		e := failf(http.StatusBadRequest, ReasonMissingField, "say with which block size the hashes were made")
		e.Param = "hash_block_size"
		return e
	}
	if r.CacheSalt != "" {
		e := failf(http.StatusBadRequest, ReasonSaltWithHashes, "hashes are made with the salt already; leave cache_salt out")
		e.Param = "cache_salt"
		return e
	}
	if r.Features != nil {
		e := failf(http.StatusBadRequest, ReasonConflictingFields, "hashes are made with the images already; leave features out, or give token_ids")
		e.Param = "features"
		return e
	}
	return nil
}

// isolation are the names, stripped to letters and digits, by which other
// indexers and engines separate tenants, adapters or salts. Native routes know
// namespace, cache_salt and lora_name.
var isolation = []string{
	"tenantid", "tenant", "tenantname", "routinggroup", "group", "partition", "workspace",
	"isolationkey", "isolationid", "namespaceid", "ns", "salt", "cachesaltid",
	"additionalsalt", "loraid", "lora", "adapter", "adaptername", "adapterid",
	"lorarequest", "loraadapter", "lorapath",
}

// guarded are the isolation fields of which a misspelling is refused too.
var guarded = []string{"namespace", "cachesalt", "loraname", "tenantid", "routinggroup"}

// skipUnknown passes over a field that nobody reads, except one that was meant
// to separate: to ignore it would merge what the caller keeps apart. A null
// separates nothing. known are isolation fields that this route reads.
func skipUnknown(key []byte, v value, known []string) *Error {
	name, ok := isolationName(key, known)
	if !ok {
		return v.skip()
	}
	if v.null() {
		return nil
	}
	e := failf(http.StatusBadRequest, ReasonUnknownIsolation,
		"this route does not know the field and will not ignore it, because it may separate tenants, adapters or prompts; use namespace, cache_salt, lora_name")
	e.Param = name
	return e
}

// isolationName says whether key is, or looks like, an isolation field.
func isolationName(key []byte, known []string) (string, bool) {
	if len(key) == 0 || len(key) > 40 {
		return "", false
	}
	var buf [40]byte
	bare := buf[:0]
	for _, c := range key {
		switch {
		case 'A' <= c && c <= 'Z':
			bare = append(bare, c|0x20)
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9':
			bare = append(bare, c)
		}
	}
	for _, k := range known {
		if string(key) == k {
			return "", false
		}
	}
	for _, w := range isolation {
		if string(bare) == w {
			return string(key), true
		}
	}
	for _, w := range guarded {
		if near(bare, w) {
			return string(key), true
		}
	}
	return "", false
}

// near says whether a and w differ by at most two edits (insert, delete,
// replace; exchanged neighbours are two).
func near(a []byte, w string) bool {
	if d := len(a) - len(w); d < -2 || d > 2 {
		return false
	}
	var row [64]int
	for j := range len(w) + 1 {
		row[j] = j
	}
	for i := range a {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(w) {
			cost := diagonal
			if a[i] != w[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(w)] <= 2
}

func itoa(n int) string { return strconv.Itoa(n) }

// safe shortens text of a caller for a log line or a message.
func safe(t string) string {
	const most = 128
	if len(t) > most {
		t = t[:most]
	}
	return strings.ToValidUTF8(t, "?")
}
