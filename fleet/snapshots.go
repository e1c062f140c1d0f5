package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/store"
)

// What a caller of Snapshots can decide on.
var (
	// ErrNoStore: there is no directory to write snapshots to.
	ErrNoStore = errors.New("no snapshot directory is configured")
	// ErrSnapshotRunning: one is being written already.
	ErrSnapshotRunning = errors.New("a snapshot is being written already")
	// ErrNothingToKeep: no stream has a position yet, and an empty snapshot
	// would take the place of one that is not.
	ErrNothingToKeep = errors.New("no stream has anything to keep yet")
)

// SnapshotOptions of Snapshots. The zero value neither keeps nor restores.
type SnapshotOptions struct {
	Logger *slog.Logger
	// Dir is the snapshots' directory; "" keeps none.
	Dir string
	// Interval between two snapshots, 5 min; negative: none by the clock.
	Interval time.Duration
	// Keep is how long what was loaded waits for its workers, 1 min: a
	// worker that comes later starts cold.
	Keep time.Duration
	// Producer names the program in the snapshot.
	Producer string

	// Peers are base URLs of replicas to recover from where there is no
	// snapshot, or one that is older than Stale, 10 min.
	Peers []string
	Stale time.Duration
	Peer  PeerOptions

	// Store bounds what the store does; Dir and Logger are set from the above.
	Store store.Options
}

func (o SnapshotOptions) withDefaults() SnapshotOptions {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.Interval, 5*time.Minute)
	def(&o.Keep, time.Minute)
	def(&o.Stale, 10*time.Minute)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	o.Peer = o.Peer.withDefaults()
	o.Store.Dir, o.Store.Logger = o.Dir, o.Logger
	return o
}

// Snapshots keeps what a fleet holds on disk, and brings it back at the next
// start: from there or from a peer. Its methods may be called concurrently.
type Snapshots struct {
	o   SnapshotOptions
	log *slog.Logger

	recovered atomic.Pointer[recovery]

	// writing is held by whoever writes, and guards what follows.
	writing sync.Mutex
	store   *store.Store // nil: not open
	closed  bool

	m snapshotMetrics
}

// contentName is what the store calls our content.
const contentName = "kvindexd worker sets"

// The kinds of chunks in the store.
const (
	kindLine store.ChunkKind = 1 + iota
	kindIndex
)

// OpenSnapshots opens the directory and reads what is to be restored: the
// snapshot in it, or a peer's dump. Damage, an unreadable version, a full disk,
// a peer that is dead or empty are told in the log, and the fleet starts cold;
// an error is only what an operator must mend: another process has the
// directory ([store.ErrLocked]), or it cannot be used.
func OpenSnapshots(ctx context.Context, o SnapshotOptions) (*Snapshots, error) {
	s := &Snapshots{o: o.withDefaults()}
	s.log = s.o.Logger
	s.m.init()
	if s.o.Dir != "" {
		if err := s.open(); err != nil && !errors.Is(err, store.ErrNoSpace) {
			return nil, err
		}
	}
	r := s.load(ctx)
	if len(s.o.Peers) > 0 && (r == nil || time.Since(r.created) > s.o.Stale) {
		if p := s.askPeers(ctx); p != nil {
			r = p
		}
	}
	if r != nil {
		s.m.loaded.Store(int64(r.left))
		s.recovered.Store(r)
	}
	return s, nil
}

// open opens the store: under writing, or before anyone else has s.
func (s *Snapshots) open() error {
	if s.store != nil {
		return nil
	}
	st, err := store.Open(s.o.Store)
	if err != nil {
		s.log.Error("snapshots cannot be kept", "dir", s.o.Dir, "err", err)
		s.m.failed.Add(1)
		return fmt.Errorf("snapshots: %w", err)
	}
	s.store = st
	if info, ok := st.Info(); ok {
		s.m.written(info, st.Stats())
	}
	return nil
}

// load reads the standing generation; nil if there is none that can be used.
func (s *Snapshots) load(ctx context.Context) *recovery {
	if s.store == nil {
		return nil
	}
	start := time.Now()
	r := newRecovery("snapshot")
	info, ok := s.store.Info()
	foreign := ok && (info.Content != contentName || info.ContentVersion != linesVersion)
	info, err := s.store.Load(ctx, func(kind store.ChunkKind, data []byte) error {
		if foreign {
			return errForeign // it is whole, and stays
		}
		return damaged(r.storedChunk(kind, data))
	})
	if foreign && (err == nil || errors.Is(err, errForeign)) {
		s.logForeign()
		return nil
	}
	if err == nil {
		err = r.closeSet()
	}
	switch {
	case errors.Is(err, store.ErrEmpty):
		s.log.Info("no snapshot yet", "dir", s.o.Dir)
		return nil
	case errors.Is(err, store.ErrDamaged):
		s.m.failed.Add(1)
		return nil // the store has said what and what was lost
	case err != nil:
		s.m.failed.Add(1)
		s.log.Error("snapshot not restored", "dir", s.o.Dir, "reason", err)
		return nil
	}
	r.created = info.Created
	s.log.Info("snapshot loaded", "dir", s.o.Dir, "generation", info.Generation, "age", time.Since(info.Created).Round(time.Second),
		"streams", r.left, "blocks", r.blocks(), "took", time.Since(start).Round(time.Millisecond))
	return r
}

// errForeign: the content is another program's, or of another version.
var errForeign = errors.New("content of another kind or version")

func (s *Snapshots) logForeign() {
	s.m.failed.Add(1)
	info, _ := s.store.Info()
	s.log.Error("snapshot not restored", "dir", s.o.Dir, "generation", info.Generation, "reason",
		fmt.Sprintf("it holds %q version %d, written by %s; this program reads %q version %d",
			info.Content, info.ContentVersion, info.Producer, contentName, linesVersion))
}

// damaged makes content that cannot be read damage, which the store sets aside.
func damaged(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", store.ErrDamaged, err)
}

func (r *recovery) storedChunk(kind store.ChunkKind, data []byte) error {
	switch kind {
	case kindLine:
		var l line
		if err := json.Unmarshal(data, &l); err != nil {
			return badContent("%w", err)
		}
		return r.line(&l)
	case kindIndex:
		return r.chunk(data)
	}
	return badContent("chunk of kind %d", kind)
}

// Restore is for [Options.Restore].
func (s *Snapshots) Restore(key SetKey, worker string, rank int, view normalize.View, into *index.Stream) (Mark, bool) {
	r := s.recovered.Load()
	if r == nil {
		return Mark{}, false
	}
	mk, ok, err := r.restore(key, worker, rank, view, into)
	if err != nil {
		s.m.refused.Add(1)
		s.log.Warn("stream not restored, it starts cold", "worker", worker, "rank", rank, "from", r.from, "reason", err)
	}
	if ok {
		s.m.restored.Add(1)
	}
	return mk, ok
}

// Run writes snapshots by the clock until ctx ends, and lets go of what was
// loaded once its time is over.
func (s *Snapshots) Run(ctx context.Context, f *Fleet) {
	keep := time.NewTimer(s.o.Keep)
	defer keep.Stop()
	var tick <-chan time.Time
	if s.o.Dir != "" && s.o.Interval > 0 {
		t := time.NewTicker(s.o.Interval)
		defer t.Stop()
		tick = t.C
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-keep.C:
			s.forget()
		case <-tick:
			if s.writing.TryLock() {
				s.keep(ctx, f, "interval")
				s.writing.Unlock()
			}
		}
	}
}

func (s *Snapshots) forget() {
	r := s.recovered.Swap(nil)
	if n := r.pending(); n > 0 {
		s.log.Warn("streams of the snapshot have no worker", "from", r.from, "streams", n)
	}
}

// keep writes a snapshot unless that would lose what waits to be restored:
// under writing.
func (s *Snapshots) keep(ctx context.Context, f *Fleet, why string) {
	if n := s.recovered.Load().pending(); n > 0 {
		s.log.Info("no snapshot now: streams of the last one still wait for their workers", "streams", n)
		return
	}
	_, _ = s.write(ctx, f, why) // it says how it went
}

// Close writes a last snapshot, unless ctx ends before or f is nil, and closes
// the directory. The fleet must still be running.
func (s *Snapshots) Close(ctx context.Context, f *Fleet) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.o.Dir != "" && f != nil && !s.closed {
		s.keep(ctx, f, "shutdown")
	}
	s.closed = true
	if s.store == nil {
		return nil
	}
	err := s.store.Close()
	s.store = nil
	return err
}

// Written says what Write made.
type Written struct {
	Generation uint64 `json:"generation"`
	// Sets, Streams and Blocks are what it holds; Skipped streams have no
	// position yet, or feed several ranks.
	Sets    int `json:"sets"`
	Streams int `json:"streams"`
	Skipped int `json:"skipped"`
	Blocks  int `json:"blocks"`
	// Bytes of the generation, and DiskBytes of the directory.
	Bytes     int64 `json:"bytes"`
	DiskBytes int64 `json:"disk_bytes"`
	// Took is the whole, Freeze the longest that one stream's messages waited.
	Took   time.Duration `json:"-"`
	Freeze time.Duration `json:"-"`
}

// Write writes a snapshot now. Errors: ErrNoStore, ErrSnapshotRunning,
// ErrNothingToKeep, the store's, the context's; the last good one stands then.
func (s *Snapshots) Write(ctx context.Context, f *Fleet) (Written, error) {
	if !s.writing.TryLock() {
		return Written{}, ErrSnapshotRunning
	}
	defer s.writing.Unlock()
	return s.write(ctx, f, "request")
}

// write is Write under writing.
func (s *Snapshots) write(ctx context.Context, f *Fleet, why string) (Written, error) {
	switch {
	case s.o.Dir == "":
		return Written{}, ErrNoStore
	case s.closed:
		return Written{}, store.ErrClosed
	}
	w, err := s.writeNow(ctx, f)
	switch {
	case errors.Is(err, ErrNothingToKeep):
		s.log.Info("no snapshot written", "why", why, "reason", err)
	case err != nil:
		s.m.failed.Add(1)
		s.log.Error("snapshot failed", "why", why, "dir", s.o.Dir, "err", err)
	default:
		s.log.Info("snapshot written", "why", why, "generation", w.Generation, "streams", w.Streams, "skipped", w.Skipped,
			"blocks", w.Blocks, "bytes", w.Bytes, "disk_bytes", w.DiskBytes,
			"took", w.Took.Round(time.Millisecond), "longest_freeze", w.Freeze.Round(time.Microsecond))
	}
	return w, err
}

func (s *Snapshots) writeNow(ctx context.Context, f *Fleet) (Written, error) {
	if err := s.open(); err != nil {
		return Written{}, err
	}
	sets := f.Sets()
	total := 0
	for _, p := range sets {
		total += len(p.Members)
	}
	s.m.begin(total)
	defer s.m.end()
	start := time.Now()
	var c copied
	info := store.Info{Content: contentName, ContentVersion: linesVersion, Producer: s.o.Producer, Created: start}
	stats, err := s.store.Write(ctx, info, func(w *store.Writer) error {
		var err error
		c, err = copyOut(ctx, sets, storeLines{w}, s.m.done)
		if err == nil && c.Streams == 0 {
			err = ErrNothingToKeep
		}
		return err
	})
	if err != nil {
		return Written{}, err
	}
	out := Written{
		Generation: stats.Generation, Sets: c.Sets, Streams: c.Streams, Skipped: c.Skipped, Blocks: c.Blocks,
		Bytes: stats.StoredBytes, DiskBytes: stats.DiskBytes, Took: time.Since(start), Freeze: c.Freeze,
	}
	info.Generation = stats.Generation
	s.m.written(info, stats)
	s.m.took(out.Took, out.Freeze)
	return out, nil
}

type storeLines struct{ w *store.Writer }

func (s storeLines) line(l *line) error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	return s.w.Chunk(kindLine, b)
}

func (s storeLines) chunk(b []byte) error { return s.w.Chunk(kindIndex, b) }
