package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvindexd/kvindexd/normalize"
)

// A worker set travels as chunks: to a snapshot on disk, to another replica.
// [Export] writes them, stream by stream, while the set is in use; [Archive]
// reads them and puts streams into another set. docs/snapshots.md draws the
// bytes.
//
// Left out are the orphans, which are counted: a stream that had some comes
// back knowing less than it did. Everything else comes back as it was.

// ChunkVersion is the version of the chunks written here, and the only one
// read.
const ChunkVersion = 1

// ErrChunk is wrapped by every error about chunks that are damaged, incomplete
// or of another version.
var ErrChunk = errors.New("unusable index chunk")

// ErrSettings: the stream's settings differ from those under which its part was
// exported, so that it means something else.
var ErrSettings = errors.New("stream settings differ from those of the export")

// chunkTarget is where a chunk ends: the first record boundary past it. The
// largest record has some two kilobytes, but for a rivalry of many handles.
const chunkTarget = 500 << 10

// A chunk begins with its version and kind.
const (
	treeChunk   = 'T' // trees and runs, shared by all streams
	streamChunk = 'S' // one stream's part
)

// The records of a tree chunk.
const (
	recTree = iota + 1
	recRun
	recMore
)

// The records of a stream chunk, in this order.
const (
	recBegin = iota + 1
	recMember
	recEntry
	recAlias
	recCopies
	recRival
	recDormant
	recDoomed
	recUnplaced
	recEnd
)

// Flags of a run, a stream's begin and an entry.
const (
	runChild   = 1 << 0 // it hangs at another run
	runSalted  = 1 << 1
	runHandles = 1 << 2

	beginOther = 1 << 0
	beginShape = 1 << 1
	beginDrop  = 1 << 2

	entryOwn    = 1 << 0
	entryPrefix = 1 << 1 // known are the run's first blocks, without a hole
	entrySimple = 1 << 2 // known is what stands in plane 0, and there is no other
)

// appendWords appends words little endian.
func appendWords(dst []byte, words []uint64) []byte {
	n := len(dst)
	dst = slices.Grow(dst, 8*len(words))[:n+8*len(words)]
	for i, w := range words {
		binary.LittleEndian.PutUint64(dst[n+8*i:], w)
	}
	return dst
}

func appendShape(dst []byte, s normalize.Shape) []byte {
	dst = binary.AppendUvarint(dst, uint64(s.BlockSize))
	return binary.AppendVarint(dst, int64(s.Window))
}

// chunkReader reads records. The first thing that does not fit is its error,
// and from then on it reads zeros.
type chunkReader struct {
	b   []byte
	at  int
	err error
}

// fail keeps the first error.
func (c *chunkReader) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("%w: at byte %d: %s", ErrChunk, c.at, fmt.Sprintf(format, args...))
		c.at = len(c.b)
	}
}

func (c *chunkReader) more() bool { return c.err == nil && c.at < len(c.b) }

func (c *chunkReader) byte() byte {
	if c.at >= len(c.b) {
		c.fail("cut short")
		return 0
	}
	c.at++
	return c.b[c.at-1]
}

// uint reads a number of at most most.
func (c *chunkReader) uint(most uint64) uint64 {
	v, n := binary.Uvarint(c.b[c.at:])
	if n <= 0 {
		c.fail("cut short, or a number that is too long")
		return 0
	}
	if v > most {
		c.fail("%d, at most %d", v, most)
		return 0
	}
	c.at += n
	return v
}

func (c *chunkReader) int64() int64 {
	v, n := binary.Varint(c.b[c.at:])
	if n <= 0 {
		c.fail("cut short, or a number that is too long")
		return 0
	}
	c.at += n
	return v
}

func (c *chunkReader) int32() int32 {
	v, n := binary.Varint(c.b[c.at:])
	if n <= 0 || int64(int32(v)) != v {
		c.fail("no 32-bit number")
		return 0
	}
	c.at += n
	return int32(v)
}

func (c *chunkReader) word() uint64 {
	if len(c.b)-c.at < 8 {
		c.fail("cut short")
		return 0
	}
	c.at += 8
	return binary.LittleEndian.Uint64(c.b[c.at-8:])
}

// words appends n words, if there are so many.
func (c *chunkReader) words(dst []uint64, n int) []uint64 {
	if (len(c.b)-c.at)/8 < n {
		c.fail("cut short")
		return dst
	}
	for range n {
		dst = append(dst, binary.LittleEndian.Uint64(c.b[c.at:]))
		c.at += 8
	}
	return dst
}

// mask reads a set of blocks out of those in within.
func (c *chunkReader) mask(within uint64) uint64 {
	m := c.word()
	if m&^within != 0 {
		c.fail("blocks %x of %x", m, within)
		return 0
	}
	return m
}

func (c *chunkReader) shape() normalize.Shape {
	s := normalize.Shape{BlockSize: uint32(c.uint(1<<32 - 1))}
	w := c.int32()
	s.Window = normalize.Window(w)
	if c.err == nil && (s.BlockSize == 0 || int32(s.Window) != w || s.Window < normalize.Pairs) {
		c.fail("shape %d, %d", s.BlockSize, w)
	}
	return s
}

// prefix says whether a mask has no hole, and how many blocks it has.
func prefix(mask uint64) (n int, ok bool) {
	n = bits.Len64(mask)
	return n, n > 0 && mask == lowBits(n)
}
