package normalize

import "slices"

// Chain is a prompt in the blocks of one shape: the identities of those that are
// known, from position 0 on. A Chain may be used again for another prompt; its
// memory is kept.
type Chain struct {
	Shape  Shape
	Locals []LocalHash
	// Seqs is parallel to Locals, or alone where a request gave sequence
	// hashes.
	Seqs []SequenceHash

	arena []uint32 // scratch
	win   windows
}

// windows walks over a prompt's blocks and tells which images touch each.
type windows struct {
	size, window, reach int // of a block; reach: how far its items may begin
	ranges              []Range
	mm                  []MMHash
}

func newWindows(ranges []Range, s Shape) windows {
	w := windows{ranges: ranges}
	w.shape(s)
	return w
}

func (w *windows) shape(s Shape) {
	w.size = int(s.BlockSize)
	w.window = w.size + s.Window.Tokens()
	w.reach = w.window
	if s.Window == Pairs {
		w.reach = w.size
	}
}

// items returns the images that touch the block at token a, and their hashes in
// prompt order. Blocks must be asked for in order; both results are valid until
// the next call.
func (w *windows) items(a int) ([]MMHash, []Range) {
	for len(w.ranges) > 0 && w.ranges[0].End <= a {
		w.ranges = w.ranges[1:]
	}
	w.mm = w.mm[:0]
	for i := range w.ranges {
		if w.ranges[i].Offset >= a+w.reach {
			break
		}
		w.mm = append(w.mm, w.ranges[i].Hash)
	}
	return w.mm, w.ranges[:len(w.mm)]
}

// Chain replaces dst with the prompt's chain for blocks of shape s on a worker
// seen as v, of which pr is the projection. It ends before the first block that
// is not complete, reaches beyond the projection's limit, or is unidentified. 0
// allocations once dst has grown.
func (p *Prompt) Chain(dst *Chain, pr *Projection, v View, s Shape) {
	dst.Shape = s
	dst.Locals, dst.Seqs = dst.Locals[:0], dst.Seqs[:0]
	limit := min(pr.Limit, len(p.Tokens))
	if s.BlockSize == 0 {
		return
	}
	w := &dst.win
	w.shape(s)
	w.ranges = pr.Ranges
	seed := seedOf(p.LoraName) + uint64(SaltSeedOf(p.CacheSalt))
	// What stands before the first image holds no placeholder token: the
	// projection has looked, or its limit is there.
	text := limit
	if len(w.ranges) > 0 {
		text = min(limit, w.ranges[0].Offset)
	}
	n := blocksIn(text, w)
	dst.text(p.Tokens, w, n, seed)
	for a := n * w.size; a+w.window <= limit; a += w.size {
		mm, _ := w.items(a)
		words, grown, kind := normalizeBlock(dst.arena[:0], p.Tokens[a:a+w.window], mm, v.IDs)
		dst.arena = grown
		if kind == unidentifiedBlock {
			break
		}
		dst.push(hashWords(words, seed))
	}
	w.ranges = nil
}

// text fills an empty chain with n blocks of plain text. It hashes blocks and
// chain in one pass, so that a block need not wait for the chain before it: that
// costs less than one pass for each.
func (c *Chain) text(tokens []uint32, w *windows, n int, seed uint64) {
	c.Locals = slices.Grow(c.Locals, n)[:n]
	c.Seqs = slices.Grow(c.Seqs, n)[:n]
	locals, seqs := c.Locals, c.Seqs
	var prev SequenceHash
	for i := range locals {
		l := hashWords(tokens[i*w.size:i*w.size+w.window], seed)
		if i == 0 {
			prev = SequenceHash(l)
		} else {
			prev = NextSequence(prev, l)
		}
		locals[i], seqs[i] = l, prev
	}
}

// push appends one block.
func (c *Chain) push(l LocalHash) {
	seq := SequenceHash(l)
	if n := len(c.Seqs); n > 0 {
		seq = NextSequence(c.Seqs[n-1], l)
	}
	c.Locals, c.Seqs = append(c.Locals, l), append(c.Seqs, seq)
}

// blocksIn is the number of complete windows in the first n tokens.
func blocksIn(n int, w *windows) int {
	if n < w.window {
		return 0
	}
	return (n-w.window)/w.size + 1
}

// ChainFromLocals replaces dst with the chain of these local hashes, which begin
// at position 0.
func ChainFromLocals(dst *Chain, s Shape, locals []LocalHash) {
	dst.Shape = s
	dst.Locals = append(dst.Locals[:0], locals...)
	dst.Seqs = SequenceHashes(slices.Grow(dst.Seqs[:0], len(locals)), locals)
}

// ChainFromSequences replaces dst with the chain of these sequence hashes, which
// begin at position 0. It has no local hashes.
func ChainFromSequences(dst *Chain, s Shape, seqs []SequenceHash) {
	dst.Shape = s
	dst.Locals = dst.Locals[:0]
	dst.Seqs = append(dst.Seqs[:0], seqs...)
}

// RoutingTokens appends to dst the prompt's tokens with every placeholder token
// replaced by its image's pad, and zeros up to a whole number of blocks of bs
// tokens: the routing_token_ids of the KV-event RFCs. pr must be exact.
func (p *Prompt) RoutingTokens(dst []uint32, pr *Projection, bs uint32) []uint32 {
	at := len(dst)
	dst = append(dst, p.Tokens...)
	out := dst[at:]
	for i := range pr.Ranges {
		r := &pr.Ranges[i]
		for j := r.Offset; j < r.End; j++ {
			if r.embeds(j) {
				out[j] = Pad(r.Hash)
			}
		}
	}
	for bs > 0 && uint64(len(dst)-at)%uint64(bs) != 0 {
		dst = append(dst, 0)
	}
	return dst
}

// ExpandedLen is the expanded_prompt_len of the KV-event RFCs: the number of the
// prompt's tokens, placeholder tokens included, padding not.
func (p *Prompt) ExpandedLen() int { return len(p.Tokens) }

// Markers returns the marker of every image, in prompt order.
func (pr *Projection) Markers() []string {
	m := make([]string, len(pr.Ranges))
	for i := range pr.Ranges {
		m[i] = Marker(pr.Ranges[i].Hash)
	}
	return m
}
