package store

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4"
)

// What a caller may want to tell apart with errors.Is.
var (
	// ErrLocked: another process, or another Store of this one, has the
	// directory. Nothing was touched.
	ErrLocked = errors.New("snapshot directory is in use")
	// ErrEmpty: no snapshot was ever written here.
	ErrEmpty = errors.New("no snapshot")
	// ErrDamaged: there was a snapshot, and it cannot be trusted. It has been
	// set aside and logged; the store is usable and empty.
	ErrDamaged = errors.New("snapshot damaged")
	// ErrVersion: the snapshot is whole and of a format this program does not
	// read. It stays until the next Write replaces it.
	ErrVersion = errors.New("snapshot format version not supported")
	// ErrNoSpace: the file system is too full to go on safely.
	ErrNoSpace = errors.New("not enough free disk space")
	// ErrTooLarge: a chunk, or a field of Info, is over its bound.
	ErrTooLarge = errors.New("too large")
	// ErrClosed: the Store was closed.
	ErrClosed = errors.New("snapshot store is closed")
)

// Options of a Store. Dir is the only one that must be set.
type Options struct {
	// Dir is the store's own directory; it is made if it does not exist. It
	// may be a mount point: only names inside it are renamed.
	Dir string
	// Logger gets one line per transition; nil is slog.Default().
	Logger *slog.Logger
	// ValueLogBytes is the size at which Badger begins a new value-log file,
	// 64 MiB if 0, at least 2 MiB, and so more than a chunk. Space comes back file by file, so a store
	// of small generations keeps up to this much garbage.
	ValueLogBytes int64
	// ReserveBytes stay free on the file system while writing, 32 MiB if 0.
	// Badger writes through memory maps, where a full disk is not an error but
	// a fatal fault of the process, so the store stops well before.
	ReserveBytes int64
}

const (
	defaultValueLogBytes = 64 << 20
	minValueLogBytes     = 2 * MaxChunkBytes // Badger refuses a value larger than the file
	defaultReserveBytes  = 32 << 20
)

func (o *Options) setDefaults() error {
	if o.Dir == "" {
		return errors.New("store: Options.Dir is empty")
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.ValueLogBytes == 0 {
		o.ValueLogBytes = defaultValueLogBytes
	}
	o.ValueLogBytes = max(o.ValueLogBytes, minValueLogBytes)
	if o.ReserveBytes == 0 {
		o.ReserveBytes = defaultReserveBytes
	}
	o.ReserveBytes = max(o.ReserveBytes, openReserveBytes)
	return nil
}

// Stats are the figures of one Write, and of what stands on disk after it.
type Stats struct {
	Generation  uint64
	Chunks      int
	RawBytes    int64         // as given to the Writer
	StoredBytes int64         // compressed, with chunk headers
	DiskBytes   int64         // blocks the directory occupies, set-aside included
	Duration    time.Duration // from the first chunk to the synced manifest
	Reclaim     time.Duration // dropping the old generation, after that
}

// Store is an open snapshot directory. Write and Load wait for each other; the
// accessors wait for neither and may be called at any time, by anyone.
type Store struct {
	opt  Options
	path paths
	log  *slog.Logger
	lock *dirLock

	// mu is held by Write, Load and Close for their whole duration.
	mu      sync.Mutex
	closed  bool
	db      *badger.DB // nil: must be opened before the next use
	sick    bool       // Badger failed: must be closed and opened before the next use
	next    uint64     // the next generation's number; never used twice
	sweep   bool       // generations other than the live one may be present
	bloated bool       // the directory is past its ceiling: write a fresh one

	// state is what the accessors read.
	state struct {
		sync.Mutex
		man   *manifest // nil: nothing to load
		lost  error     // why there is nothing to load, if something was set aside
		stats Stats
	}
}

// Open takes the directory and opens what it holds, without reading chunks yet.
//
// A directory that Badger cannot open twice in a row, that killed two starts
// before this one, or that is empty although a snapshot was written, is set
// aside; Open then succeeds with an empty store and Load says ErrDamaged.
// Errors: ErrLocked, ErrNoSpace, and whatever the file system refuses; in none
// of these cases is anything set aside.
func Open(o Options) (*Store, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("snapshot directory: %w", err)
	}
	s := &Store{opt: o, path: paths{o.Dir}, log: o.Logger, next: 1}
	lock, err := lockDir(s.path)
	if err != nil {
		return nil, err
	}
	s.lock = lock
	if err := s.start(); err != nil {
		// Refused is not killed: this start does not count.
		err = errors.Join(err, s.path.endStart())
		s.lock.release()
		return nil, err
	}
	return s, nil
}

// start brings the directory from whatever the last process left to an open
// Badger. Called with the directory locked, before anyone else has s.
func (s *Store) start() error {
	if err := checkSpace(s.opt.Dir, openReserveBytes); err != nil {
		return err
	}
	if err := s.path.finishSwap(); err != nil {
		return err
	}
	starts, err := s.path.countStart()
	if err != nil {
		return err
	}
	if starts >= maxKilledStarts {
		reason := fmt.Errorf("%w: %d starts in a row died while opening or loading it", ErrDamaged, starts)
		if err := s.setAside(reason); err != nil {
			return err
		}
		if _, err := s.path.countStart(); err != nil {
			return err
		}
	}
	return s.openDB()
}

// openDB opens Badger and reads the manifest; what is damaged is set aside and
// an empty directory opened instead. Caller has mu, or nobody else has s.
func (s *Store) openDB() error {
	db, man, err := s.tryOpen()
	if errors.Is(err, ErrDamaged) {
		if err := s.setAside(err); err != nil {
			return err
		}
		db, man, err = s.tryOpen()
	}
	if err != nil && !errors.Is(err, ErrVersion) {
		return fmt.Errorf("open snapshot store: %w", err)
	}
	s.db = db
	s.setManifest(man)
	if err != nil { // ErrVersion
		s.setLost(err)
	}
	newest, leftovers, err := scanGenerations(db, man)
	if err != nil {
		return fmt.Errorf("open snapshot store: %w", err)
	}
	s.next = max(s.next, newest+1)
	s.sweep = leftovers
	s.refreshDisk()
	return nil
}

// tryOpen opens what stands in the directory. An ErrDamaged leaves it closed;
// an ErrVersion comes with an open db and the manifest's readable part.
func (s *Store) tryOpen() (*badger.DB, *manifest, error) {
	recorded, has, err := s.path.hasSnapshot()
	if err != nil {
		return nil, nil, err
	}
	if err := preflight(s.path.db(), has); err != nil {
		return nil, nil, err
	}
	if err := tidy(s.path.db()); err != nil {
		return nil, nil, err
	}
	db, err := openBadgerTwice(badgerOptions(s.path.db(), s.opt.ValueLogBytes, s.log))
	if err != nil {
		return nil, nil, err
	}
	man, err := readManifest(db)
	switch {
	case errors.Is(err, ErrVersion):
		return db, man, err
	case err == nil && man == nil && has:
		err = fmt.Errorf("%w: generation %d was written here, and the directory holds none", ErrDamaged, recorded)
	case err == nil && man != nil && man.Generation < recorded:
		err = fmt.Errorf("%w: generation %d was written here, and the directory goes back to %d",
			ErrDamaged, recorded, man.Generation)
	}
	if err != nil {
		closeQuietly(db)
		return nil, nil, err
	}
	return db, man, nil
}

// setAside renames the damaged directory and says so, once. Badger is closed.
func (s *Store) setAside(reason error) error {
	lost := "nothing that could be named"
	if n, ok, _ := s.path.hasSnapshot(); ok {
		lost = fmt.Sprintf("generation %d", n)
	}
	s.state.Lock()
	if m := s.state.man; m != nil {
		lost = m.describe()
	}
	s.state.man, s.state.lost = nil, reason
	s.state.Unlock()

	kept, err := s.path.setAside(reason, lost)
	if err != nil {
		return fmt.Errorf("setting a damaged snapshot aside: %w (it was: %w)", err, reason)
	}
	s.log.Warn("snapshot set aside, starting without one",
		"dir", s.opt.Dir, "reason", reason.Error(), "lost", lost, "kept_in", kept)
	return nil
}

func (s *Store) setManifest(m *manifest) {
	s.state.Lock()
	defer s.state.Unlock()
	s.state.man = m
	if m == nil {
		s.state.stats = Stats{}
		return
	}
	s.state.lost = nil
	s.state.stats = Stats{
		Generation:  m.Generation,
		Chunks:      int(m.Chunks),
		RawBytes:    int64(m.RawBytes),
		StoredBytes: int64(m.StoredBytes),
	}
}

func (s *Store) setLost(err error) {
	s.state.Lock()
	defer s.state.Unlock()
	s.state.lost = err
}

func (s *Store) refreshDisk() int64 {
	n := diskUse(s.opt.Dir)
	s.state.Lock()
	defer s.state.Unlock()
	s.state.stats.DiskBytes = n
	return n
}

// ensureOpen opens Badger again where an earlier failure closed it. Caller has mu.
func (s *Store) ensureOpen() error {
	if s.closed {
		return ErrClosed
	}
	if s.db != nil && !s.sick {
		return nil
	}
	if err := checkSpace(s.opt.Dir, openReserveBytes); err != nil {
		return err
	}
	if err := s.closeDB(); err != nil {
		s.log.Warn("snapshot store did not close well after a failure", "dir", s.opt.Dir, "err", err)
	}
	return s.openDB()
}

// Info describes the generation that stands; false if there is none.
func (s *Store) Info() (Info, bool) {
	s.state.Lock()
	defer s.state.Unlock()
	if s.state.man == nil {
		return Info{}, false
	}
	return s.state.man.Info, true
}

// Stats are those of the last Write, or what Open found.
func (s *Store) Stats() Stats {
	s.state.Lock()
	defer s.state.Unlock()
	return s.state.stats
}

// Age is the time since the standing generation was created; false if none.
func (s *Store) Age() (time.Duration, bool) {
	info, ok := s.Info()
	if !ok {
		return 0, false
	}
	return time.Since(info.Created), true
}

// Dir is the store's directory.
func (s *Store) Dir() string { return filepath.Clean(s.opt.Dir) }

// Close waits for a running Write or Load, closes Badger and gives the
// directory free. It may be called more than once.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	defer s.lock.release()
	err := s.closeDB()
	return errors.Join(err, s.path.endStart())
}

// closeDB closes Badger if it is open. On a full disk it is abandoned instead,
// as a kill would leave it: closing writes tables through memory maps, which
// would fault, and the next Open recovers the same. Caller has mu.
func (s *Store) closeDB() error {
	db := s.db
	s.db, s.sick = nil, false
	if db == nil {
		return nil
	}
	if err := checkSpace(s.opt.Dir, openReserveBytes); err != nil {
		s.log.Warn("snapshot store left open, as there is no space to close it", "dir", s.opt.Dir, "err", err)
		return nil
	}
	if err := db.Close(); err != nil {
		return fmt.Errorf("close snapshot store: %w", briefly(err))
	}
	return nil
}
