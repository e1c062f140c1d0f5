package normalize

import (
	"math/rand/v2"
	"slices"
	"unicode/utf8"

	"github.com/zeebo/xxh3"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// saltTag is what a Dynamo frontend puts before the salt that it was given.
const saltTag = "dynamo-cache-salt:"

// Batch is one zmqwire.Batch as an index sees it: the operations in the order
// of the wire, and what was left out. Its contents borrow from the zmqwire.Batch
// it was made of and are valid as long as that one, and until the next Normalize
// into the same Batch.
type Batch struct {
	Ops   []Op
	Skips SkipCounts
	// Seq is the batch's number in its stream. Normalize leaves it alone: it is
	// the caller's to set, and is only told to people.
	Seq uint64

	blocks []Content // of ops that are not uniform, borrowed
	arena  []uint32  // words that no token memory holds as they are hashed
}

// What is kept from one message to the next, in elements, each about 1 MiB: one
// huge message does not hold its memory for ever. A prompt of 128 Ki tokens with
// an image in every block of 16 stays below.
const (
	keepOps    = 1 << 12
	keepBlocks = 1 << 15
	keepWords  = 1 << 18
	keepKeys   = 1 << 16
)

// emptied returns s without its elements, and without its memory if that is for
// more than most of them.
func emptied[T any](s []T, most int) []T {
	if cap(s) > most {
		return nil
	}
	clear(s)
	return s[:0]
}

func (b *Batch) reset() {
	b.Ops = emptied(b.Ops, keepOps)
	b.blocks = emptied(b.blocks, keepBlocks)
	b.arena = emptied(b.arena, keepWords)
	b.Skips.reset()
}

// Locals appends the local hashes of a store's blocks, one for each of its
// handles, in a chain with this salt. Only a Placed store has any.
func (b *Batch) Locals(dst []LocalHash, op *Op, salt SaltSeed) []LocalHash {
	if op.Kind != OpStore || op.Form != Placed {
		return dst
	}
	if op.first < 0 {
		return appendLocals(dst, op.words, op.stride, op.window, len(op.Hashes), op.seed+uint64(salt))
	}
	for i := range op.Hashes {
		dst = append(dst, b.blocks[op.first+i].Local(salt))
	}
	return dst
}

// appendLocals hashes n blocks of window words, stride words apart.
func appendLocals(dst []LocalHash, words []uint32, stride, window, n int, seed uint64) []LocalHash {
	dst = slices.Grow(dst, n)
	for i := range n {
		dst = append(dst, hashWords(words[i*stride:i*stride+window], seed))
	}
	return dst
}

// Content is what one block's identity is made of, but for the salt, which its
// chain's root tells. The zero Content is that of no block.
type Content struct {
	seed  uint64
	words []uint32
}

// Content returns an owned copy of the content of block i of a Placed store,
// for whoever must wait for its chain's salt.
func (b *Batch) Content(op *Op, i int) Content {
	if op.Kind != OpStore || op.Form != Placed {
		return Content{}
	}
	c := Content{op.seed, nil}
	if op.first < 0 {
		c.words = op.words[i*op.stride : i*op.stride+op.window]
	} else {
		c = b.blocks[op.first+i]
	}
	c.words = slices.Clone(c.words)
	return c
}

// Local returns the block's local hash in a chain with this salt.
func (c Content) Local(salt SaltSeed) LocalHash {
	return hashWords(c.words, c.seed+uint64(salt))
}

// Bytes is the memory that the content holds.
func (c Content) Bytes() int { return 4 * cap(c.words) }

// Normalizer turns one stream's events into operations. It keeps nothing of one
// batch for the next but scratch memory; one caller at a time.
type Normalizer struct {
	view View
	seen hashSet

	// Scratch of one store: what the extra keys say of each block.
	keys []blockKeys
	mm   []MMHash
}

// blockKeys is what one block's extra keys say.
type blockKeys struct {
	opaque uint64 // summed into the seed
	mmEnd  int    // the block's items end here in mm, where the next's begin
}

// NewNormalizer returns a Normalizer for a stream of a worker seen as v.
func NewNormalizer(v View) *Normalizer {
	return &Normalizer{view: v, seen: hashSet{mix: rand.Uint64() | 1}}
}

// View returns the view that decides the identities.
func (n *Normalizer) View() View { return n.view }

// Normalize replaces dst with the operations of b. What nobody indexes is left
// out and counted in dst.Skips; nothing in b makes it fail.
func (n *Normalizer) Normalize(dst *Batch, b *zmqwire.Batch) {
	dst.reset()
	for i := range b.Events {
		ev := &b.Events[i]
		switch ev.Kind {
		case zmqwire.BlockStored:
			n.stored(dst, ev)
		case zmqwire.BlockRemoved:
			n.removed(dst, ev)
		case zmqwire.AllBlocksCleared:
			// It names no medium: every tier of the stream is meant.
			dst.Ops = append(dst.Ops, Op{Kind: OpClear, Group: zmqwire.NoGroup})
		}
	}
}

// residency returns the tier an event speaks of; false where it is none of this
// worker's, which is counted.
func residency(dst *Batch, ev *zmqwire.Event) (Tier, bool) {
	tier := tierOf(ev.Medium)
	if tier == NoTier {
		dst.Skips.unknownMedium(ev.Medium)
		return tier, false
	}
	if !isLocal(ev.Locality) {
		dst.Skips.ByReason[SkipNotLocal]++
		return tier, false
	}
	return tier, true
}

func (n *Normalizer) removed(dst *Batch, ev *zmqwire.Event) {
	tier, ok := residency(dst, ev)
	if !ok {
		return
	}
	op := Op{
		Kind: OpRemove, Tier: tier, Spec: specOf(ev.Spec),
		Group: ev.Group, Window: ev.Window, Hashes: ev.Hashes,
	}
	if len(ev.Remaining) == len(ev.Hashes) {
		op.Remaining = ev.Remaining
	}
	dst.Ops = append(dst.Ops, op)
}

func (n *Normalizer) stored(dst *Batch, ev *zmqwire.Event) {
	tier, ok := residency(dst, ev)
	if !ok {
		return
	}
	if skip, bad := n.dropped(ev); bad {
		dst.Skips.ByReason[skip]++
		return
	}
	op := Op{
		Kind: OpStore, Tier: tier, Spec: specOf(ev.Spec), Form: Unplaced,
		Group: ev.Group, Window: ev.Window, Shape: shapeOf(ev),
		Hashes: ev.Hashes, Parent: ev.Parent, HasParent: ev.HasParent,
		first: -1,
	}
	switch skip, unplaced := unplaced(ev, op.Spec); {
	case len(ev.Tokens) == 0 && ev.BlockSize == 0:
		op.Form = Notice
		if op.Spec == SpecOther {
			op.Form = Unplaced
			dst.Skips.ByReason[SkipOtherSpec]++
		}
	case unplaced:
		if op.Spec != SpecWindow || skip != SkipTokenCount {
			dst.Skips.ByReason[skip]++
		}
	default:
		op.Form = Placed
		n.place(dst, &op, ev)
	}
	dst.Ops = append(dst.Ops, op)
}

// dropped says whether a store is of no use at all, and why.
func (n *Normalizer) dropped(ev *zmqwire.Event) (SkipReason, bool) {
	if specOf(ev.Spec) == SpecOther {
		return 0, false // passed on, so that the stream is known to have it
	}
	if ev.HasParent && slices.Contains(ev.Hashes, ev.Parent) {
		return SkipOwnParent, true
	}
	if n.seen.repeats(ev.Hashes) {
		return SkipRepeatedHash, true
	}
	return SkipZeroBlockSize, ev.BlockSize == 0 && len(ev.Tokens) > 0
}

// unplaced says whether nothing tells which of a store's handles has which
// content, and why.
func unplaced(ev *zmqwire.Event, spec SpecKind) (SkipReason, bool) {
	blocks := len(ev.Hashes)
	tokens := uint64(blocks) * uint64(ev.BlockSize)
	if ev.Pairs && blocks > 0 {
		tokens++
	}
	switch {
	case spec == SpecOther:
		return SkipOtherSpec, true
	case uint64(len(ev.Tokens)) != tokens:
		return SkipTokenCount, true
	case ev.Lookahead < 0, ev.Lookahead > maxLookahead, ev.Lookahead > 0 && ev.Pairs,
		len(ev.LookaheadTokens) != ev.Lookahead*blocks:
		return SkipLookaheadCount, true
	case ev.ExtraEnd != nil && len(ev.ExtraEnd) != blocks:
		return SkipExtraKeysCount, true
	}
	return 0, false
}

// maxLookahead is the longest lookahead a Window can name.
const maxLookahead = 1<<15 - 1

func shapeOf(ev *zmqwire.Event) Shape {
	s := Shape{BlockSize: ev.BlockSize}
	switch {
	case ev.Pairs:
		s.Window = Pairs
	case ev.Lookahead > 0 && ev.Lookahead <= maxLookahead:
		s.Window = Window(ev.Lookahead)
	}
	return s
}

// place gives a store whose handles and tokens go together its contents.
func (n *Normalizer) place(dst *Batch, op *Op, ev *zmqwire.Event) {
	plain := n.readKeys(op, ev)
	op.seed = seedOfBytes(ev.LoraName)
	op.words = ev.Tokens
	op.stride = int(ev.BlockSize)
	op.window = op.stride + op.Shape.Window.Tokens()
	if op.Shape.Window > Plain {
		op.words = dst.interleave(ev)
		op.stride = op.window
	}
	if plain && !n.view.IDs.in(op.words) {
		return // uniform
	}
	op.first = len(dst.blocks)
	mm, from := n.mm, 0
	for i := range op.Hashes {
		k := n.keys[i]
		window := op.words[i*op.stride : i*op.stride+op.window]
		c := Content{seed: op.seed + k.opaque}
		var kind blockKind
		c.words, dst.arena, kind = normalizeBlock(dst.arena, window, mm[from:k.mmEnd], n.view.IDs)
		if kind == unidentifiedBlock {
			c.seed += unidentifiedSeed
		}
		dst.blocks = append(dst.blocks, c)
		from = k.mmEnd
	}
}

// interleave lays every block's tokens and its lookahead side by side, as they
// are hashed.
func (b *Batch) interleave(ev *zmqwire.Event) []uint32 {
	at, bs, la := len(b.arena), int(ev.BlockSize), ev.Lookahead
	b.arena = slices.Grow(b.arena, len(ev.Tokens)+len(ev.LookaheadTokens))
	for i := range ev.Hashes {
		b.arena = append(b.arena, ev.Tokens[i*bs:(i+1)*bs]...)
		b.arena = append(b.arena, ev.LookaheadTokens[i*la:(i+1)*la]...)
	}
	return b.arena[at:]
}

// readKeys reads a store's extra keys into the scratch and its salt into op. It
// says whether no block has anything in them but what is in the seed already.
func (n *Normalizer) readKeys(op *Op, ev *zmqwire.Event) (plain bool) {
	n.keys, n.mm = emptied(n.keys, keepKeys), emptied(n.mm, keepKeys)
	var salt []byte
	plain, from := true, 0
	for i := range ev.Hashes {
		var k blockKeys
		if ev.ExtraEnd != nil {
			root := i == 0 && !ev.HasParent
			k.opaque = n.readBlockKeys(ev.Extra[from:ev.ExtraEnd[i]], ev.LoraName, root, &salt)
			from = ev.ExtraEnd[i]
		}
		k.mmEnd = len(n.mm)
		plain = plain && k.opaque == 0
		n.keys = append(n.keys, k)
	}
	if !ev.HasParent {
		if len(ev.CacheSalt) > 0 {
			salt = ev.CacheSalt
		}
		op.Salt = saltSeedOf(untag(salt))
	}
	return plain && len(n.mm) == 0
}

// readBlockKeys reads one block's extra keys: items go to the scratch, the salt
// to salt where the block is the root of its chain, and the sum of what is
// opaque is returned.
func (n *Normalizer) readBlockKeys(keys []zmqwire.ExtraKey, lora []byte, root bool, salt *[]byte) (opaque uint64) {
	named := false
	for i := range keys {
		k := &keys[i]
		switch {
		case !named && isLora(k, lora):
			named = true
		case k.Form == zmqwire.ExtraString && len(k.Text) == 0:
			// Empty is absent.
		case n.isItem(k):
			n.mm = append(n.mm, parseIdentifier(k.Text))
		case root && *salt == nil && k.Form == zmqwire.ExtraString && n.view.ExtraKeys != None:
			*salt = k.Text
		default:
			opaque += xxh3.HashSeed(k.Raw, opaqueSeed)
		}
	}
	return opaque
}

// isLora says whether k names the event's adapter.
func isLora(k *zmqwire.ExtraKey, lora []byte) bool {
	if len(lora) == 0 || string(k.Text) != string(lora) {
		return false
	}
	return k.Form == zmqwire.ExtraString || k.Form == zmqwire.ExtraBytes && utf8.Valid(k.Text)
}

// isItem says whether k is a multimodal item that identifies something. One
// without an identifier is opaque: it stands for an image nobody can name.
func (n *Normalizer) isItem(k *zmqwire.ExtraKey) bool {
	if n.view.ExtraKeys == None || len(k.Text) == 0 {
		return false
	}
	return k.Form == zmqwire.ExtraItem ||
		k.Form == zmqwire.ExtraString && n.view.ExtraKeys == BareMM && isHexIdentifier(k.Text)
}

// untag strips a frontend's tag from a salt. A tag with nothing behind it is a
// salt of its own: as an absent one it would match requests without any.
func untag(salt []byte) []byte {
	if len(salt) > len(saltTag) && string(salt[:len(saltTag)]) == saltTag {
		return salt[len(saltTag):]
	}
	return salt
}
