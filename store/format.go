package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"
)

// Bounds. A length read from disk is compared with these before anything is
// allocated.
const (
	// TargetChunkBytes is where a Writer cuts what is appended: values of
	// 256 KiB to 1 MiB are what Badger's value log handles best.
	TargetChunkBytes = 512 << 10
	// MaxChunkBytes is the most one chunk may hold before compression.
	MaxChunkBytes = 1 << 20
	// MaxMetaBytes bounds Info.Meta.
	MaxMetaBytes = 64 << 10
	// MaxNameBytes bounds Info.Content and Info.Producer.
	MaxNameBytes = 256
)

// FormatVersion is the version of manifests, chunks and exports written here,
// and the only one read.
const FormatVersion = 1

// ChunkKind says what a chunk holds; its values are the caller's.
type ChunkKind uint16

// Info describes a generation. The caller gives the first group to Write; the
// store fills in the second.
type Info struct {
	// Content and ContentVersion name what the chunks hold.
	Content        string
	ContentVersion uint32
	// Producer is the program that wrote it, for a person to read.
	Producer string
	// Created is the moment of the picture; zero is the moment of the Write.
	Created time.Time
	// Meta is a small summary of the caller's own, at most MaxMetaBytes.
	Meta []byte

	Generation  uint64
	Chunks      uint32
	RawBytes    uint64 // before compression
	StoredBytes uint64 // chunks as stored, with their headers
}

// Keys, in Badger's order. The sentinel stands before every chunk and the
// manifest after, and both are rewritten with each generation, so that no table
// of the LSM tree ever spans one generation alone: Badger throws such a table
// away without counting the garbage it leaves in the value log, which then
// never shrinks.
//
//	a                                                sentinel
//	g/<generation u64 BE><chunk u32 BE>              chunks
//	manifest                                         names the generation that counts
var (
	sentinelKey = []byte("a")
	chunkPrefix = []byte("g/")
	manifestKey = []byte("manifest")
)

const chunkKeyBytes = 2 + 8 + 4

func generationPrefix(gen uint64) []byte {
	return binary.BigEndian.AppendUint64(bytes.Clone(chunkPrefix), gen)
}

func chunkKey(gen uint64, number uint32) []byte {
	return binary.BigEndian.AppendUint32(generationPrefix(gen), number)
}

// manifest is the record that makes a generation count.
//
// Little endian, and in every version: the magic and the version first, the
// checksum last, so that a version is believed only if it is intact.
//
//	 0  4  magic "KVMF"
//	 4  2  version
//	 6  2  0
//	 8  8  generation
//	16  8  identity, random: the same in every chunk of this generation
//	24  8  created, ns since the Unix epoch
//	32  4  chunks
//	36  4  content version
//	40  8  raw bytes of all chunks
//	48  8  stored bytes of all chunks
//	56  2  C = length of content name
//	58  2  P = length of producer name
//	60  4  M = length of meta
//	64     content name, producer name, meta
//	64+C+P+M  8  XXH3-64 of everything before
type manifest struct {
	Info
	identity uint64
}

const (
	manifestMagic    = "KVMF"
	manifestFixed    = 64
	maxManifestBytes = manifestFixed + 2*MaxNameBytes + MaxMetaBytes + checksumBytes
	checksumBytes    = 8
	prologueBytes    = 8 // magic, version, two zeros
)

func (i *Info) check() error {
	switch {
	case len(i.Content) > MaxNameBytes:
		return fmt.Errorf("%w: Info.Content has %d bytes, at most %d", ErrTooLarge, len(i.Content), MaxNameBytes)
	case len(i.Producer) > MaxNameBytes:
		return fmt.Errorf("%w: Info.Producer has %d bytes, at most %d", ErrTooLarge, len(i.Producer), MaxNameBytes)
	case len(i.Meta) > MaxMetaBytes:
		return fmt.Errorf("%w: Info.Meta has %d bytes, at most %d", ErrTooLarge, len(i.Meta), MaxMetaBytes)
	}
	return nil
}

func (m *manifest) describe() string {
	return fmt.Sprintf("generation %d of %s (%s, %d chunks, %d bytes)",
		m.Generation, m.Created.UTC().Format(time.RFC3339), m.Content, m.Chunks, m.RawBytes)
}

func (m *manifest) append(dst []byte) []byte {
	le := binary.LittleEndian
	dst = append(dst, manifestMagic...)
	dst = le.AppendUint16(dst, FormatVersion)
	dst = le.AppendUint16(dst, 0)
	dst = le.AppendUint64(dst, m.Generation)
	dst = le.AppendUint64(dst, m.identity)
	dst = le.AppendUint64(dst, uint64(m.Created.UnixNano()))
	dst = le.AppendUint32(dst, m.Chunks)
	dst = le.AppendUint32(dst, m.ContentVersion)
	dst = le.AppendUint64(dst, m.RawBytes)
	dst = le.AppendUint64(dst, m.StoredBytes)
	dst = le.AppendUint16(dst, uint16(len(m.Content)))
	dst = le.AppendUint16(dst, uint16(len(m.Producer)))
	dst = le.AppendUint32(dst, uint32(len(m.Meta)))
	dst = append(dst, m.Content...)
	dst = append(dst, m.Producer...)
	dst = append(dst, m.Meta...)
	return le.AppendUint64(dst, xxh3.Hash(dst))
}

// parseManifest reads a manifest. Errors: ErrDamaged, ErrVersion.
func parseManifest(b []byte) (*manifest, error) {
	if len(b) > maxManifestBytes {
		return nil, fmt.Errorf("%w: manifest of %d bytes, at most %d", ErrDamaged, len(b), maxManifestBytes)
	}
	if err := checkSealed("manifest", manifestMagic, b); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	if v := le.Uint16(b[4:]); v != FormatVersion {
		return nil, versionError("manifest", v)
	}
	if len(b) < manifestFixed+checksumBytes {
		return nil, fmt.Errorf("%w: manifest of %d bytes", ErrDamaged, len(b))
	}
	c, p, n := int(le.Uint16(b[56:])), int(le.Uint16(b[58:])), int(le.Uint32(b[60:]))
	rest := b[manifestFixed : len(b)-checksumBytes]
	if c > MaxNameBytes || p > MaxNameBytes || n > MaxMetaBytes || c+p+n != len(rest) {
		return nil, fmt.Errorf("%w: manifest fields of %d+%d+%d bytes in %d", ErrDamaged, c, p, n, len(rest))
	}
	return &manifest{
		Info: Info{
			Content:        string(rest[:c]),
			ContentVersion: le.Uint32(b[36:]),
			Producer:       string(rest[c : c+p]),
			Created:        time.Unix(0, int64(le.Uint64(b[24:]))),
			Meta:           bytes.Clone(rest[c+p:]),
			Generation:     le.Uint64(b[8:]),
			Chunks:         le.Uint32(b[32:]),
			RawBytes:       le.Uint64(b[40:]),
			StoredBytes:    le.Uint64(b[48:]),
		},
		identity: le.Uint64(b[16:]),
	}, nil
}

// checkSealed verifies the magic in front of b and the checksum behind it.
func checkSealed(what, magic string, b []byte) error {
	if len(b) < prologueBytes+checksumBytes {
		return fmt.Errorf("%w: %s of %d bytes", ErrDamaged, what, len(b))
	}
	if string(b[:4]) != magic {
		return fmt.Errorf("%w: %s begins with %x, not %q", ErrDamaged, what, b[:4], magic)
	}
	body := b[:len(b)-checksumBytes]
	want := binary.LittleEndian.Uint64(b[len(body):])
	if got := xxh3.Hash(body); got != want {
		return fmt.Errorf("%w: %s has checksum %016x, its content %016x", ErrDamaged, what, want, got)
	}
	return nil
}

func versionError(what string, v uint16) error {
	age := "older"
	if v > FormatVersion {
		age = "newer"
	}
	return fmt.Errorf("%w: %s has version %d, from an %s kvindexd; this one reads version %d",
		ErrVersion, what, v, age, FormatVersion)
}

// place is where a chunk belongs. It stands in the chunk itself, so that a
// value that Badger returns for another key, or from an earlier try, is seen.
type place struct {
	generation, identity uint64
	number               uint32
}

// A chunk, as a value in Badger and in an export. Little endian.
//
//	 0  4  magic "KVCK"
//	 4  2  version
//	 6  2  0
//	 8  8  generation
//	16  8  identity of the generation
//	24  4  number, from 0
//	28  2  kind
//	30  2  encoding: 0 as it is, 1 one zstd frame
//	32  4  R = raw length, at most 1 MiB
//	36  4  S = stored length, at most R
//	40  S  payload
//	40+S  8  XXH3-64 of everything before
const (
	chunkMagic      = "KVCK"
	chunkHeader     = 40
	chunkOverhead   = chunkHeader + checksumBytes
	maxStoredChunk  = MaxChunkBytes + chunkOverhead
	encodingRaw     = 0
	encodingZstd    = 1
	zstdWindowBytes = TargetChunkBytes
)

// codec compresses and decompresses chunks; one goroutine at a time.
type codec struct {
	enc *zstd.Encoder
	dec *zstd.Decoder
}

func newCodec() (*codec, error) {
	enc, err := zstd.NewWriter(nil,
		zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithWindowSize(zstdWindowBytes),
		zstd.WithEncoderCRC(false), // the chunk's own checksum covers the frame
		zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("zstd: %w", err)
	}
	dec, err := zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(MaxChunkBytes))
	if err != nil {
		return nil, fmt.Errorf("zstd: %w", err)
	}
	return &codec{enc: enc, dec: dec}, nil
}

func (c *codec) close() {
	_ = c.enc.Close()
	c.dec.Close()
}

// appendChunk appends the stored form of raw, which is at most MaxChunkBytes.
func (c *codec) appendChunk(dst []byte, p place, kind ChunkKind, raw []byte) []byte {
	start := len(dst)
	dst = appendChunkHeader(dst, p, kind, encodingZstd, len(raw))
	dst = c.enc.EncodeAll(raw, dst)
	if len(dst)-start-chunkHeader >= len(raw) {
		dst = appendChunkHeader(dst[:start], p, kind, encodingRaw, len(raw))
		dst = append(dst, raw...)
	}
	binary.LittleEndian.PutUint32(dst[start+36:], uint32(len(dst)-start-chunkHeader))
	return binary.LittleEndian.AppendUint64(dst, xxh3.Hash(dst[start:]))
}

func appendChunkHeader(dst []byte, p place, kind ChunkKind, encoding uint16, raw int) []byte {
	le := binary.LittleEndian
	dst = append(dst, chunkMagic...)
	dst = le.AppendUint16(dst, FormatVersion)
	dst = le.AppendUint16(dst, 0)
	dst = le.AppendUint64(dst, p.generation)
	dst = le.AppendUint64(dst, p.identity)
	dst = le.AppendUint32(dst, p.number)
	dst = le.AppendUint16(dst, uint16(kind))
	dst = le.AppendUint16(dst, encoding)
	dst = le.AppendUint32(dst, uint32(raw))
	return le.AppendUint32(dst, 0)
}

// chunk is a verified view into a stored chunk.
type chunk struct {
	kind     ChunkKind
	encoding uint16
	raw      int // length after decoding
	payload  []byte
}

// parseChunk verifies everything about a stored chunk but its compression.
// Errors: ErrDamaged.
func parseChunk(b []byte, want place) (chunk, error) {
	what := fmt.Sprintf("chunk %d of generation %d", want.number, want.generation)
	if len(b) < chunkOverhead || len(b) > maxStoredChunk {
		return chunk{}, fmt.Errorf("%w: %s has %d bytes", ErrDamaged, what, len(b))
	}
	if err := checkSealed(what, chunkMagic, b); err != nil {
		return chunk{}, err
	}
	le := binary.LittleEndian
	got := place{le.Uint64(b[8:]), le.Uint64(b[16:]), le.Uint32(b[24:])}
	if v := le.Uint16(b[4:]); v != FormatVersion {
		return chunk{}, fmt.Errorf("%w: %s has version %d under a manifest of version %d", ErrDamaged, what, v, FormatVersion)
	}
	if got != want {
		return chunk{}, fmt.Errorf("%w: in the place of %s (identity %016x) stands chunk %d of generation %d (identity %016x)",
			ErrDamaged, what, want.identity, got.number, got.generation, got.identity)
	}
	c := chunk{
		kind:     ChunkKind(le.Uint16(b[28:])),
		encoding: le.Uint16(b[30:]),
		raw:      int(le.Uint32(b[32:])),
		payload:  b[chunkHeader : len(b)-checksumBytes],
	}
	stored := int(le.Uint32(b[36:]))
	if stored != len(c.payload) || c.raw > MaxChunkBytes || stored > c.raw || c.encoding > encodingZstd ||
		(c.encoding == encodingRaw && stored != c.raw) {
		return chunk{}, fmt.Errorf("%w: %s says %d bytes stored as %d (encoding %d) and has %d",
			ErrDamaged, what, c.raw, stored, c.encoding, len(c.payload))
	}
	return c, nil
}

// decode returns the chunk's data in dst's memory, which grows to at most
// MaxChunkBytes. Errors: ErrDamaged.
func (c *codec) decode(dst []byte, ch chunk) ([]byte, error) {
	if cap(dst) < ch.raw {
		dst = make([]byte, 0, max(ch.raw, TargetChunkBytes))
	}
	if ch.encoding == encodingRaw {
		return append(dst[:0], ch.payload...), nil
	}
	out, err := c.dec.DecodeAll(ch.payload, dst[:0])
	if err != nil {
		return dst, fmt.Errorf("%w: a chunk does not decompress: %w", ErrDamaged, err)
	}
	if len(out) != ch.raw {
		return dst, fmt.Errorf("%w: a chunk decompresses to %d bytes, not %d", ErrDamaged, len(out), ch.raw)
	}
	return out, nil
}
