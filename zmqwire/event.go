package zmqwire

// EngineHash is a publisher's own handle of a block: the value it names parents
// and removals by. Integers are taken as two's complement u64, byte strings by
// their last 8 bytes, big endian. It is opaque and local to one stream: equal
// handles of two publishers say nothing about the content behind them.
type EngineHash uint64

// EventKind is the tag of an event.
type EventKind uint8

// The events that vLLM publishes.
const (
	BlockStored EventKind = iota + 1
	BlockRemoved
	AllBlocksCleared
)

// String returns the tag as it stands on the wire.
func (k EventKind) String() string {
	switch k {
	case BlockStored:
		return "BlockStored"
	case BlockRemoved:
		return "BlockRemoved"
	case AllBlocksCleared:
		return "AllBlocksCleared"
	}
	return "unknown"
}

// NoGroup is an Event's Group where the event names none.
const NoGroup int32 = -1

// Event is one decoded event. Every slice is a view into the payload or into
// the Decoder's buffers and is valid until the next Decode. A string that is
// nil on the wire, or absent, is a nil slice.
type Event struct {
	Kind EventKind

	// Hashes are the engine hashes of the blocks stored or removed, in order.
	Hashes []EngineHash
	// Remaining, where the removal tells it, is how many copies of each hash
	// are left (parallel to Hashes); nil otherwise.
	Remaining []uint32

	// Parent is the engine hash of the block before Hashes[0].
	Parent    EngineHash
	HasParent bool

	// Tokens are the token ids as the event gives them; EAGLE pairs are
	// flattened to n+1 tokens for n pairs. May be longer than
	// len(Hashes)*BlockSize: then nothing says which chunk a hash belongs to.
	Tokens []uint32
	// Pairs says that Tokens came as EAGLE bigrams.
	Pairs bool
	// Lookahead is the number of tokens after each block that its identity
	// covers, 0 for none; LookaheadTokens has Lookahead tokens per block,
	// block after block.
	Lookahead       int
	LookaheadTokens []uint32

	// BlockSize is in tokens. 0 with no tokens: a placement-only notice.
	BlockSize uint32

	Medium   []byte
	LoraName []byte
	// HasLoraID says that the deprecated lora_id is there and not 0: with no
	// LoraName beside it, the blocks belong to an adapter that nobody named.
	HasLoraID bool
	Locality  []byte
	Ownership []byte
	SessionID []byte
	CacheSalt []byte

	// Extra are the extra keys of all blocks, block after block; block i has
	// Extra[ExtraEnd[i-1]:ExtraEnd[i]] (from 0 for i = 0). ExtraEnd is nil
	// where the event has no extra_keys; otherwise its length is the number
	// of entries the event gives, which a hostile or odd producer need not
	// keep equal to len(Hashes).
	Extra    []ExtraKey
	ExtraEnd []int

	// Group is the cache group's index, NoGroup where absent.
	Group int32
	// Spec is the group's kind ("full_attention", "sliding_window", ...).
	Spec []byte
	// Window is the sliding window in tokens, 0 where absent or unreadable.
	Window uint32
}

// ExtraForm says how one extra key stands on the wire.
type ExtraForm uint8

const (
	// ExtraString is a msgpack str.
	ExtraString ExtraForm = iota + 1
	// ExtraBytes is a msgpack bin.
	ExtraBytes
	// ExtraItem is an array [str, integer]: a multimodal item.
	ExtraItem
	// ExtraOther is any other value.
	ExtraOther
)

// ExtraKey is one item of a block's extra keys.
type ExtraKey struct {
	Form ExtraForm
	// Raw is the item's msgpack encoding as received.
	Raw []byte
	// Text is the body of a str or bin, or an item's identifier.
	Text []byte
}

// Batch is one decoded payload, valid until the Decoder's next Decode.
type Batch struct {
	// Timestamp is the publisher's, in seconds since the Unix epoch.
	Timestamp float64
	// Rank is the data-parallel rank, -1 where the batch names none.
	Rank int32
	// Events in the order of the wire, without those that were skipped.
	Events []Event
	// Malformed and Unknown count the events that were skipped because they
	// could not be read, and because nobody knows their tag.
	Malformed, Unknown int
	// LostRemovals is how many of Malformed were removals: blocks may be gone
	// that still seem held.
	LostRemovals int
	// Odd counts the values that were left out of an event or batch because
	// their type is not the promised one, where that takes nothing from
	// anybody's identity; the rest of the event stands.
	Odd int
}
