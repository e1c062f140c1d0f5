package normalize

import "github.com/kvindexd/kvindexd/zmqwire"

// LocalHash is the identity of one block without what stands before it: XXH3 of
// its (substituted) tokens under a seed of adapter, salt and opaque keys.
type LocalHash uint64

// SequenceHash is the identity of a whole prefix: the chain of the local hashes
// up to and including one block.
type SequenceHash uint64

// MMHash is the u64 that stands for a multimodal identifier.
type MMHash uint64

// SaltSeed is what a cache salt adds to the seed of every block of its chain:
// XXH3_64(salt, seed 1), 0 without a salt. The salt itself is never kept.
type SaltSeed uint64

// Tier is where a block is resident.
type Tier uint8

// The tiers, nearest first. NoTier is what nobody indexes.
const (
	Device Tier = iota
	Host
	Disk
	External
	NoTier
)

// Window says how many tokens beside its own a block's identity covers.
type Window int16

const (
	// Plain blocks cover their own tokens.
	Plain Window = 0
	// Pairs are EAGLE bigrams: one token more, items of the block's own tokens.
	Pairs Window = -1
	// A positive Window is a lookahead of so many tokens, items of the whole
	// window.
)

// Tokens returns how many tokens past the block's end belong to its window.
func (w Window) Tokens() int {
	if w == Pairs {
		return 1
	}
	return int(w)
}

// Shape names a tree: blocks of different shapes never have one identity.
type Shape struct {
	BlockSize uint32
	Window    Window
}

// TokenIDs are a worker's resolved placeholder token ids.
type TokenIDs struct {
	Image, Video       uint32
	HasImage, HasVideo bool
}

// SpecKind is the class of a cache group.
type SpecKind uint8

const (
	// SpecAbsent: the event does not say; the group's earlier events do.
	SpecAbsent SpecKind = iota
	// SpecFull attention: the prefix tree.
	SpecFull
	// SpecWindow: a sliding window.
	SpecWindow
	// SpecOther is counted, not indexed.
	SpecOther
)

// OpKind is what an Op does.
type OpKind uint8

// What events do to an index.
const (
	OpStore OpKind = iota + 1
	OpRemove
	OpClear
)

// Form says what a store tells about its blocks' content.
type Form uint8

const (
	// Placed: block i of the op is Hashes[i] and its content is known.
	Placed Form = iota
	// Notice: no content, only that the handles are held.
	Notice
	// Unplaced: there is content, but nothing says which handle has which.
	Unplaced
)

// Op is one event as the index sees it. Its slices belong to the Batch.
type Op struct {
	Kind   OpKind
	Tier   Tier
	Form   Form
	Spec   SpecKind
	Group  int32 // zmqwire.NoGroup where absent
	Window uint32
	Shape  Shape

	Hashes []zmqwire.EngineHash
	// Remaining copies after a removal, parallel to Hashes, nil if not told.
	Remaining []uint32

	Parent    zmqwire.EngineHash
	HasParent bool
	// Salt of the chain that begins with this op; meaningless with a parent,
	// whose chain's salt holds.
	Salt SaltSeed

	// The contents, of a Placed store. If first is negative, every block has
	// the op's seed and block i is window words from words[i*stride]; else the
	// blocks stand in the Batch from first on.
	seed           uint64
	words          []uint32
	stride, window int
	first          int
}
