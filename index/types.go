package index

import "github.com/kvindexd/kvindexd/normalize"

// Options of a Set.
type Options struct {
	// MaxBytes bounds what the set keeps, in bytes; 0 is no bound. Past it
	// the oldest, deepest leaves go first and their streams are marked
	// trimmed.
	MaxBytes int64
	// Budget, where given, is a bound that several sets share; MaxBytes is
	// ignored then. Past it the set that grows is trimmed.
	Budget *Budget
	// MaxOrphans bounds how many blocks of unknown parentage one stream keeps
	// (default 4096).
	MaxOrphans int
}

// StreamConfig says what the events do not.
type StreamConfig struct {
	// Name is for people, such as "vllm-0/0".
	Name string
	// EagleDrop: drafting without lookahead hashes; vLLM gives up the last
	// matched block.
	EagleDrop bool
	// BlockSize of the full-attention groups in tokens, 0 to learn it.
	BlockSize uint32
}

// Applied says what a batch brought that an operator wants to count.
type Applied struct {
	// Stored and Removed count block operations that changed or confirmed a
	// block's residency.
	Stored, Removed int
	// Orphaned blocks have a parent that is not known.
	Orphaned int
	// Conflicts are known blocks that came again with another parent or
	// content; they kept their first place.
	Conflicts int
	// ContentConflicts are blocks that a stream stored again under another
	// engine hash.
	ContentConflicts int
	// Cleared says that the batch held an AllBlocksCleared.
	Cleared bool
	// SuspectRestart: so many content conflicts in a row that the publisher
	// must have restarted unnoticed.
	SuspectRestart bool
}

// StreamStats of one stream; sizes in blocks unless said.
type StreamStats struct {
	// Resident blocks by tier. A block counts once however many copies of it
	// there are.
	Resident [normalize.NoTier]int64
	Orphans  int64
	// Conflicts and ContentConflicts since the stream's life began.
	Conflicts, ContentConflicts int64
	// Trimmed blocks were dropped to keep the byte budget.
	Trimmed int64
	// Stored and Removed block operations since the stream's life began.
	Stored, Removed int64
}

// SetStats of one worker set.
type SetStats struct {
	Streams int
	// Blocks are distinct blocks, Runs the tree nodes that hold them,
	// Memberships the (block, stream) pairs that are known.
	Blocks, Runs, Memberships int64
	// Bytes is what the set keeps, retained capacity included.
	Bytes int64
	// Trimmed memberships since the set began.
	Trimmed int64
}

// Query is one prompt, hashed once per shape for each view its streams have.
type Query struct {
	// PromptTokens is the prompt's length.
	PromptTokens int
	Views        []QueryView
	// Of gives, for each stream that Set.Match asks, the view that answers it;
	// nil: all 0. A Roster knows its own.
	Of []int
}

// QueryView is the prompt as one kind of worker identifies it.
type QueryView struct {
	// Chains has one chain per shape.
	Chains []normalize.Chain
	// Limits is parallel to Chains: the end of the part that is identified in
	// blocks of that shape, in tokens.
	Limits []int
}

// UsableReason says why a Row's Usable is not known.
type UsableReason string

// Why usable tokens are not known.
const (
	UsableKnown UsableReason = ""
	// UnindexedGroup: the stream has a cache group whose rules nobody wrote
	// down here (mamba, chunked local attention, ...), or full-attention groups
	// whose blocks differ in size: what only some of them have counts for nothing.
	UnindexedGroup UsableReason = "unindexed_group"
	// UnplacedWindow: window blocks are held whose place nobody told.
	UnplacedWindow UsableReason = "unplaced_window_blocks"
)

// Row is one stream's answer, in tokens. Device <= Host <= Disk.
type Row struct {
	Shape              normalize.Shape
	Device, Host, Disk int
	// Usable is what vLLM would take from its device cache, where
	// UsableReason is UsableKnown.
	Usable       int
	UsableReason UsableReason
}
