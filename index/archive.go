package index

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/kvindexd/kvindexd/normalize"
)

// An Archive is an export that was read back: Add its chunks, then Import the
// streams that are wanted, in any order. Of an export of distinct blocks it
// keeps 16 bytes a block. It belongs to one goroutine.
//
// Chunks may come from anywhere. What does not fit is an error, and costs
// memory in proportion to what was read.
type Archive struct {
	trees   []archivedTree
	runs    []archivedRun
	streams [][][]byte // the chunks of each
	bytes   int64
}

type archivedTree struct {
	shape normalize.Shape
	tick  uint32
}

// archivedRun is a run as an export names it. No run hangs at a later one.
type archivedRun struct {
	first, last normalize.SequenceHash
	salt        normalize.SaltSeed
	parent      uint32 // + 1, 0: a root
	off         uint8  // the parent's block
	tree        uint32
	stamp       uint32
	locals      []uint64
	handles     []uint64 // shared ones, parallel to locals, nil: none yet
	have        uint64   // those that are there
}

// The most that an Archive takes.
const (
	maxArchivedTrees   = 256
	maxArchivedRuns    = 1 << (32 - runBits)
	maxArchivedStreams = 1 << 16
)

// Add takes the next chunk in. It copies what it keeps. Errors: ErrChunk.
func (a *Archive) Add(chunk []byte) error {
	c := chunkReader{b: chunk}
	if v := c.byte(); c.err == nil && v != ChunkVersion {
		return fmt.Errorf("%w: version %d, this program reads version %d", ErrChunk, v, ChunkVersion)
	}
	switch kind := c.byte(); {
	case c.err != nil:
	case kind == treeChunk:
		for c.more() {
			a.addRecord(&c)
		}
	case kind == streamChunk:
		a.addStream(&c)
	default:
		c.fail("kind %d", kind)
	}
	return c.err
}

// Streams is how many there are: 0 to Streams-1.
func (a *Archive) Streams() int { return len(a.streams) }

// Bytes is about what the archive keeps.
func (a *Archive) Bytes() int64 { return a.bytes + int64(cap(a.runs))*128 }

// Drop lets go of a stream that is not wanted any more.
func (a *Archive) Drop(stream int) {
	if stream < len(a.streams) {
		a.streams[stream] = nil
	}
}

func (a *Archive) addStream(c *chunkReader) {
	n := int(c.uint(maxArchivedStreams))
	switch {
	case c.err != nil:
		return
	case n == len(a.streams):
		a.streams = append(a.streams, nil)
	case n != len(a.streams)-1:
		c.fail("stream %d after stream %d", n, len(a.streams)-1)
		return
	}
	a.streams[n] = append(a.streams[n], bytes.Clone(c.b[c.at:]))
	a.bytes += int64(len(c.b))
}

func (a *Archive) addRecord(c *chunkReader) {
	switch kind := c.byte(); kind {
	case recTree:
		a.addTree(c)
	case recRun:
		a.addRun(c)
	case recMore:
		a.addMore(c)
	default:
		c.fail("record %d among trees", kind)
	}
}

func (a *Archive) addTree(c *chunkReader) {
	t := archivedTree{shape: c.shape(), tick: uint32(c.uint(1<<32 - 1))}
	if len(a.trees) >= maxArchivedTrees {
		c.fail("more than %d trees", maxArchivedTrees)
	}
	if c.err == nil {
		a.trees = append(a.trees, t)
	}
}

func (a *Archive) addRun(c *chunkReader) {
	var r archivedRun
	flags := c.byte()
	if flags&runChild != 0 {
		number := a.back(c)
		r.off = c.byte()
		if c.err != nil {
			return
		}
		parent := &a.runs[number]
		if int(r.off) >= len(parent.locals) {
			c.fail("a run at block %d of %d", r.off, len(parent.locals))
			return
		}
		r.parent = uint32(number) + 1
		r.tree, r.salt = parent.tree, parent.salt
	} else {
		r.tree = uint32(c.uint(uint64(max(len(a.trees), 1) - 1)))
		if flags&runSalted != 0 {
			r.salt = normalize.SaltSeed(c.word())
		}
	}
	age := c.uint(1<<32 - 1)
	n := int(c.byte())
	if c.err == nil && (n == 0 || n > runMax || len(a.trees) == 0 || len(a.runs) >= maxArchivedRuns) {
		c.fail("a run of %d blocks, after %d runs in %d trees", n, len(a.runs), len(a.trees))
	}
	if c.err != nil {
		return
	}
	r.stamp = a.trees[r.tree].tick - min(uint32(age), a.trees[r.tree].tick)
	r.locals = c.words(nil, n)
	if flags&runHandles != 0 {
		a.addHandles(c, &r)
	}
	if c.err == nil {
		a.finish(&r)
		a.runs = append(a.runs, r)
	}
}

// back reads which run is meant: so many before the next one.
func (a *Archive) back(c *chunkReader) (number int) {
	d := c.uint(uint64(len(a.runs)))
	if c.err == nil && d == 0 {
		c.fail("a run that refers to itself")
	}
	return len(a.runs) - int(d)
}

// addMore lengthens a run, or gives it handles.
func (a *Archive) addMore(c *chunkReader) {
	number := a.back(c)
	n := int(c.byte())
	if c.err != nil {
		return
	}
	r := &a.runs[number]
	if len(r.locals)+n > runMax {
		c.fail("a run of %d blocks and %d", len(r.locals), n)
		return
	}
	r.locals = c.words(r.locals, n)
	if c.err == nil {
		a.addHandles(c, r)
	}
	if c.err == nil {
		a.finish(r)
	}
}

func (a *Archive) addHandles(c *chunkReader, r *archivedRun) {
	mask := c.mask(lowBits(len(r.locals)) &^ r.have)
	if c.err != nil || mask == 0 {
		return
	}
	if len(r.handles) < len(r.locals) {
		r.handles = append(make([]uint64, 0, len(r.locals)), r.handles...)[:len(r.locals)]
	}
	for off := range r.locals {
		if mask>>off&1 != 0 {
			r.handles[off] = c.word()
		}
	}
	r.have |= mask
}

// finish computes the run's sequence hashes.
func (a *Archive) finish(r *archivedRun) {
	seq := normalize.SequenceHash(r.locals[0])
	if r.parent != 0 {
		seq = normalize.NextSequence(a.runs[r.parent-1].sequenceAt(int(r.off)), normalize.LocalHash(r.locals[0]))
	}
	r.first = seq
	for _, l := range r.locals[1:] {
		seq = normalize.NextSequence(seq, normalize.LocalHash(l))
	}
	r.last = seq
	a.bytes += 16 * int64(len(r.locals))
}

// sequenceAt returns the sequence hash of block off.
func (r *archivedRun) sequenceAt(off int) normalize.SequenceHash {
	if off == len(r.locals)-1 {
		return r.last
	}
	seq := r.first
	for _, l := range r.locals[1 : off+1] {
		seq = normalize.NextSequence(seq, normalize.LocalHash(l))
	}
	return seq
}

// errUnknownStream is a caller's mistake.
var errUnknownStream = errors.New("index: BUG: the archive has no such stream, or it was dropped")
