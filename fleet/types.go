package fleet

import (
	"errors"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// What a caller can decide on.
var (
	// ErrUnknownModel: no model, alias or served adapter has the name (in the
	// namespace and role asked for).
	ErrUnknownModel = errors.New("unknown model")
	// ErrAmbiguousModel: no model is named and there are several, or the name
	// stands for several.
	ErrAmbiguousModel = errors.New("ambiguous model")
	// ErrLoraContradiction: the model's name is an adapter's, and the adapter
	// asked for is another.
	ErrLoraContradiction = errors.New("lora_name contradicts model")
	// ErrUnknownWorker: no source has a worker of that id.
	ErrUnknownWorker = errors.New("unknown worker")
	// ErrInvalid is wrapped by every error about a worker's or model's
	// settings.
	ErrInvalid = errors.New("invalid settings")
	// ErrConflict: two entries would subscribe to one publisher, or an id is
	// another source's.
	ErrConflict = errors.New("conflicting registration")
	// ErrCapture: the fleet is a capture's, which nobody changes.
	ErrCapture = errors.New("this daemon serves a capture, not a fleet")
	// ErrDenied: the endpoint is outside of what a registration may make the
	// daemon dial.
	ErrDenied = errors.New("endpoint not allowed")
)

// Role is what a worker does for a request.
type Role string

// The roles. The empty role of a spec means Aggregated.
const (
	Aggregated Role = "aggregated"
	Prefill    Role = "prefill"
	Decode     Role = "decode"
	Encode     Role = "encode"
)

// DefaultNamespace is a spec's namespace where it names none.
const DefaultNamespace = "default"

// SetKey names a worker set: the workers that can answer one kind of request.
type SetKey struct {
	Namespace string
	Model     string
	Role      string
}

// State says how far a stream's entries can be trusted.
type State uint8

// The states of a stream.
const (
	// Connecting: no message yet and no replay answer.
	Connecting State = iota
	// Replaying: filling a gap, or making sure after a reconnect; the old
	// entries answer meanwhile.
	Replaying
	// Live: contiguous since the start, a restart or a clear.
	Live
	// Partial: the start of the history is lost. What is held is true, more
	// may exist.
	Partial
	// Suspect: a gap that no replay filled; removals may be missing.
	Suspect
	// Disconnected: the transport is down for longer than
	// Timing.DisconnectGrace.
	Disconnected
	// Restored from a snapshot and not yet confirmed by the publisher.
	Restored

	numStates
)

var stateNames = [numStates]string{"connecting", "replaying", "live", "partial", "suspect", "disconnected", "restored"}

// String returns the state's name as the answers carry it.
func (s State) String() string {
	if s < numStates {
		return stateNames[s]
	}
	return "unknown"
}

// Status is one stream's state at one moment.
type Status struct {
	State State
	// Seq is the last applied sequence number, where HasSeq.
	Seq    uint64
	HasSeq bool
	// Age is the time since the last message, -1 where there was none.
	Age time.Duration
	// Lost counts batches known lost and not recovered since the last start,
	// restart, clear or reset.
	Lost uint64
	// LastError is the last fault of the connection, a replay or the stream's
	// content, for people. It stays until something good takes its place.
	LastError string
	// Connected says that the subscription's transport is up.
	Connected bool
	// Settled says that the stream has been live, partial or suspect before:
	// what is being replayed is a gap, not all there is.
	Settled bool
}

// Picture is one worker set at one moment. It is immutable; a query takes it
// once. Members, Streams and ViewOf are parallel.
type Picture struct {
	Key   SetKey
	Index *index.Set
	// Members are sorted by worker, then rank.
	Members []*Member
	Streams []*index.Stream
	// Views are the distinct ways in which the members identify blocks.
	Views []normalize.View
	// ViewOf says which of Views is a member's.
	ViewOf []int
	// Roster lists Streams and ViewOf for the queries that ask all of them.
	Roster *index.Roster
	// Adapters maps each adapter name and alias that an admitted member
	// serves to the adapter's own name.
	Adapters map[string]string
	// Aliases are the model's other names, sorted.
	Aliases []string
	// Config is what the incumbents agree on.
	Config SetConfig
	// Rejected are the workers that wait because they differ from Config,
	// oldest first.
	Rejected []Rejection
}

// SetConfig is what the members of a worker set must not disagree about. A
// field that is nil or empty was stated by no member.
type SetConfig struct {
	ImageTokenID, VideoTokenID *uint32
	TowerConnectorLora         *bool
	// Fingerprint is of the model directory's config.json.
	Fingerprint string
}

// Rejection is a worker that is not admitted.
type Rejection struct {
	Worker string
	// Fields differ, each as "image_token_id: 151655 here, 9 in the set".
	Fields []string
	Since  time.Time
}

// Member is one stream of a worker set: one rank of one admitted worker. Its
// exported fields are immutable; Status is live.
type Member struct {
	Worker string
	Rank   int
	// Undeclared: nobody declared the rank, a batch named it.
	Undeclared bool
	// Generation is the worker's life: a worker removed and added again has
	// another.
	Generation uint64
	Key        SetKey
	View       normalize.View
	// ExactMM says that exact answers about images can come from it.
	ExactMM bool
	// BlockSize as configured, 0 where it is learned.
	BlockSize uint32

	stream *index.Stream
	pub    *publisher
}

// Stream is the member's index stream.
func (m *Member) Stream() *index.Stream { return m.stream }

// Skipped counts the events of the member's publisher that do not count as they
// stand, since the worker's life began.
func (m *Member) Skipped() normalize.SkipCounts { return m.pub.n.skipCounts() }

// Status returns the stream's state now. It costs a few atomic loads.
func (m *Member) Status() Status { return m.pub.currentStatus() }

// Mark is a stream's position: what a snapshot keeps beside its entries and
// what a restored stream is confirmed by.
type Mark struct {
	Seq    uint64
	HasSeq bool
	// Digest is XXH3_64 of the payload of batch Seq.
	Digest uint64
	State  State
	Lost   uint64
	// Why, of a restored stream that knows less than its publisher said, is
	// why.
	Why string
}

// Freeze calls f with the stream's position while no batch of its publisher is
// applied, so that what f copies of the index stream belongs to exactly that
// position. f must be short: the subscription waits.
func (m *Member) Freeze(f func(Mark)) { m.pub.freeze(f) }

// Selector is what a request says about whom it asks. Empty fields are open.
type Selector struct {
	// Model is a canonical name, an alias, or the name of a LoRA adapter.
	Model     string
	LoraName  string
	Namespace string
	Role      string
}

// Resolved is who answers a Selector.
type Resolved struct {
	// Pictures are sorted by key. There is none where the model is configured
	// but has no worker at the moment.
	Pictures []*Picture
	// Model is the base model's canonical name, LoraName the adapter's own
	// name, "" for none.
	Model    string
	LoraName string
}
