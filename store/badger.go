package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"github.com/dgraph-io/badger/v4/pb"
	"github.com/dgraph-io/badger/v4/table"
	"github.com/dgraph-io/badger/v4/y"
	"google.golang.org/protobuf/proto"
)

// badgerOptions make Badger small: 12 MB resident and 13 goroutines when idle,
// open in 15 ms. The memory table may never become smaller in a later version:
// reopening a directory with larger ones can end the process.
func badgerOptions(dir string, valueLogBytes int64, log *slog.Logger) badger.Options {
	return badger.DefaultOptions(dir).
		WithMemTableSize(16 << 20).
		WithNumMemtables(2).
		WithValueLogFileSize(valueLogBytes).
		WithValueThreshold(1 << 10).
		WithBlockCacheSize(0).
		WithIndexCacheSize(0).
		WithCompression(options.None).
		WithNumCompactors(2).
		WithMetricsEnabled(false).
		WithDetectConflicts(false).
		WithCompactL0OnClose(true).
		WithChecksumVerificationMode(options.OnTableAndBlockRead).
		WithLogger(badgerLogger{log})
}

// badgerLogger passes Badger's errors and warnings on as warnings: what they
// mean for a snapshot is said by this package, once. Its errors may carry
// values, so the text is cut.
type badgerLogger struct{ log *slog.Logger }

func (l badgerLogger) Errorf(format string, v ...any)   { l.warn(format, v) }
func (l badgerLogger) Warningf(format string, v ...any) { l.warn(format, v) }
func (badgerLogger) Infof(string, ...any)               {}
func (badgerLogger) Debugf(string, ...any)              {}

func (l badgerLogger) warn(format string, v []any) {
	l.log.Warn("badger", "says", cut(fmt.Sprintf(format, v...)))
}

const maxForeignText = 300

// cut bounds text that comes from Badger, whose errors may dump a whole value.
func cut(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > maxForeignText {
		s = s[:maxForeignText] + "…"
	}
	return s
}

// foreignError is an error of Badger's with bounded text.
type foreignError struct{ err error }

func (e foreignError) Error() string { return cut(e.err.Error()) }
func (e foreignError) Unwrap() error { return e.err }

func briefly(err error) error {
	if err == nil {
		return nil
	}
	return foreignError{err}
}

// openBadgerTwice opens a directory. After a kill the first try fails in one
// start of ten, mostly over an empty log file (see tidy); the second works and
// has lost nothing. Errors: ErrDamaged, ErrLocked, or the machine's refusal.
func openBadgerTwice(o badger.Options) (*badger.DB, error) {
	db, err := openBadger(o)
	if err == nil || errors.Is(err, ErrLocked) {
		return db, err
	}
	if db, err = openBadger(o); err == nil || errors.Is(err, ErrLocked) {
		return db, err
	}
	if isEnvironment(err) {
		return nil, briefly(err)
	}
	return nil, fmt.Errorf("%w: Badger does not open it: %w", ErrDamaged, briefly(err))
}

// openBadger turns a panic of Badger's in this goroutine into an error. The
// panics of its own goroutines are what preflight and the start counter are for.
func openBadger(o badger.Options) (db *badger.DB, err error) {
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, fmt.Errorf("panic while opening: %v", r)
		}
	}()
	db, err = badger.Open(o)
	if err != nil && strings.Contains(err.Error(), "Cannot acquire directory lock") {
		return nil, fmt.Errorf("%w: another process has %s open", ErrLocked, o.Dir)
	}
	return db, err
}

// isEnvironment tells an error of the machine from one of the data. Badger
// flattens its errors to text, so the text is all there is to go by.
func isEnvironment(err error) bool {
	for _, e := range []syscall.Errno{
		syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, syscall.EMFILE, syscall.ENFILE,
		syscall.ENOMEM, syscall.EACCES, syscall.EPERM, syscall.EROFS,
	} {
		if strings.Contains(err.Error(), e.Error()) {
			return true
		}
	}
	return false
}

func closeQuietly(db *badger.DB) { _ = db.Close() }

// preflight looks at the files that Badger would panic over, or would silently
// make an empty store of, before it sees them; it changes nothing. A directory
// that Badger never finished making is not damaged, unless wasFull says that it
// held a snapshot. Errors: ErrDamaged, or the machine's refusal.
func preflight(dir string, wasFull bool) error {
	man, err := replayBadgerManifest(filepath.Join(dir, badger.ManifestFilename))
	if errors.Is(err, fs.ErrNotExist) && !wasFull {
		return nil
	}
	if err != nil {
		return damagedUnlessEnvironment(badger.ManifestFilename, err)
	}
	for id, t := range man.Tables {
		if err := checkTable(table.NewFilename(id, dir), id, t.Compression); err != nil {
			return damagedUnlessEnvironment(table.IDToFilename(id), err)
		}
	}
	return nil
}

func damagedUnlessEnvironment(file string, err error) error {
	if isEnvironment(err) {
		return briefly(err)
	}
	return fmt.Errorf("%w: %s: %w", ErrDamaged, file, briefly(err))
}

func replayBadgerManifest(path string) (badger.Manifest, error) {
	f, err := os.Open(path)
	if err != nil {
		return badger.Manifest{}, err
	}
	defer f.Close()
	man, _, err := badger.ReplayManifestFile(f, 0, badger.DefaultOptions("").WithLogger(nil))
	return man, err
}

// checkTable verifies one table of the LSM tree. They hold keys and pointers
// only, a few kilobytes for a generation, so all of it is read.
func checkTable(path string, id uint64, compression options.CompressionType) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic while reading: %v", r)
		}
	}()
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := checkTableFooter(b); err != nil {
		return err
	}
	t, err := table.OpenInMemoryTable(b, id, &table.Options{Compression: compression})
	if err != nil {
		return err
	}
	return t.VerifyChecksum()
}

// checkTableFooter verifies a table's index by its checksum, and so says in
// words what Badger panics over. From the file's end: length of a checksum
// record (u32 BE), the record, length of the index (u32 BE), the index.
func checkTableFooter(b []byte) error {
	size := len(b)
	sum, b, ok := cutTail(b)
	if !ok {
		return fmt.Errorf("no checksum at the end of its %d bytes", size)
	}
	index, _, ok := cutTail(b)
	if !ok {
		return fmt.Errorf("no index at the end of its %d bytes", size)
	}
	var want pb.Checksum
	if err := proto.Unmarshal(sum, &want); err != nil {
		return fmt.Errorf("checksum record: %w", err)
	}
	return y.VerifyChecksum(index, &want)
}

// cutTail splits b = rest | tail | len(tail) u32 BE.
func cutTail(b []byte) (tail, rest []byte, ok bool) {
	if len(b) < 4 {
		return nil, b, false
	}
	n := uint64(binary.BigEndian.Uint32(b[len(b)-4:]))
	b = b[:len(b)-4]
	if n == 0 || n > uint64(len(b)) {
		return nil, b, false
	}
	at := len(b) - int(n)
	return b[at:], b[:at], true
}

const (
	discardSlot     = 16 // file id, bytes of garbage; u64 BE each
	minDiscardBytes = 1 << 20
)

// tidy removes what holds nothing and keeps Badger from opening a directory, or
// from working in it: empty log files and senseless garbage counts.
func tidy(dir string) error {
	for _, ext := range []string{".vlog", ".mem"} {
		names, err := withSuffix(dir, ext)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := removeIfEmpty(filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	return dropBadDiscard(filepath.Join(dir, "DISCARD"))
}

// withSuffix lists the names in dir that end so; none where there is no dir.
func withSuffix(dir, suffix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), suffix) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// removeIfEmpty: a kill, or a start that was refused, can leave a log file that
// was never given its length. Each one fails an Open, and each failed Open can
// leave one more.
func removeIfEmpty(path string) error {
	fi, err := os.Stat(path)
	if err != nil || fi.Size() > 0 {
		return err
	}
	return os.Remove(path)
}

// dropBadDiscard removes Badger's garbage counts where they make no sense. They
// are advice for its collector and carry no checksum, but a short file is a
// panic in it and a file id that stands twice an endless loop.
func dropBadDiscard(path string) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if discardMakesSense(b) {
		return nil
	}
	return os.Remove(path)
}

func discardMakesSense(b []byte) bool {
	if len(b) < minDiscardBytes || len(b)%discardSlot != 0 {
		return false
	}
	seen := make(map[uint64]bool)
	for ; len(b) > 0; b = b[discardSlot:] {
		id, garbage := binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])
		if id == 0 {
			return true
		}
		if seen[id] || id > 1<<32 || garbage > 1<<40 {
			return false
		}
		seen[id] = true
	}
	return true
}

// put writes one key in a transaction of its own.
func put(db *badger.DB, key, value []byte) error {
	return briefly(db.Update(func(txn *badger.Txn) error { return txn.Set(key, value) }))
}

// view reads one key's value where it lies; ErrKeyNotFound is badger's.
func view(db *badger.DB, key []byte, fn func(value []byte) error) error {
	return db.View(func(txn *badger.Txn) error {
		item, err := txn.Get(key)
		if err != nil {
			return err
		}
		return item.Value(fn)
	})
}

// readManifest returns nil without an error where there is none. Errors:
// ErrDamaged, ErrVersion.
func readManifest(db *badger.DB) (*manifest, error) {
	var man *manifest
	var parseErr error
	err := guardReads(func() error {
		return view(db, manifestKey, func(v []byte) error {
			man, parseErr = parseManifest(v)
			return nil
		})
	})
	switch {
	case errors.Is(err, badger.ErrKeyNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%w: manifest does not read: %w", ErrDamaged, briefly(err))
	}
	return man, parseErr
}

// generations lists the generations of which any chunk is present, in order.
func generations(db *badger.DB) ([]uint64, error) {
	var gens []uint64
	err := db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: chunkPrefix})
		defer it.Close()
		for it.Rewind(); it.Valid(); {
			key := it.Item().Key()
			if len(key) != chunkKeyBytes {
				it.Next()
				continue
			}
			gen := binary.BigEndian.Uint64(key[len(chunkPrefix):])
			gens = append(gens, gen)
			if gen == ^uint64(0) {
				return nil
			}
			it.Seek(generationPrefix(gen + 1))
		}
		return nil
	})
	return gens, briefly(err)
}

// scanGenerations returns the highest number in use, and whether any
// generation but man's has chunks.
func scanGenerations(db *badger.DB, man *manifest) (newest uint64, leftovers bool, err error) {
	gens, err := generations(db)
	if err != nil {
		return 0, false, err
	}
	for _, g := range gens {
		newest = max(newest, g)
		leftovers = leftovers || man == nil || g != man.Generation
	}
	if man != nil {
		newest = max(newest, man.Generation)
	}
	var sentinel uint64
	err = view(db, sentinelKey, func(v []byte) error {
		if len(v) == 8 {
			sentinel = binary.BigEndian.Uint64(v)
		}
		return nil
	})
	if err != nil && !errors.Is(err, badger.ErrKeyNotFound) {
		return 0, false, briefly(err)
	}
	return max(newest, sentinel), leftovers, nil
}
