package store

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/dgraph-io/badger/v4"
)

// Report is what a directory holds, read without a daemon.
type Report struct {
	// Info of the standing generation; meaningless where Empty.
	Info  Info
	Empty bool
	// DiskBytes is what the whole directory occupies.
	DiskBytes int64
	// Leftovers are generations that do not count: half written, or replaced
	// and not dropped yet.
	Leftovers []uint64
	// Clean says that the last process closed the directory.
	Clean bool
	// KilledStarts is how many starts in a row have not finished loading.
	KilledStarts int
	// SetAside explains the damaged directory that is kept, "" if none is.
	SetAside string
}

// Inspect reports on a store directory from its manifest, without reading the
// chunks. It changes nothing: a directory that was not closed cleanly is opened
// as a temporary copy. Errors: ErrLocked if a daemon has it, ErrDamaged,
// ErrVersion; the Report says what could be found out.
func Inspect(dir string) (Report, error) {
	r, _, err := inspect(dir, func(*badger.DB, *manifest) error { return nil })
	return r, err
}

// Verify is Inspect, and checks every chunk's checksum, place and compression.
func Verify(dir string) (Report, error) {
	r, _, err := inspect(dir, func(db *badger.DB, man *manifest) error {
		return loadGeneration(context.Background(), db, man, func(ChunkKind, []byte) error { return nil })
	})
	return r, err
}

// inspect opens the directory and shows its standing generation to use.
func inspect(dir string, use func(*badger.DB, *manifest) error) (r Report, man *manifest, err error) {
	r.Empty = true
	if _, err := os.Stat(dir); err != nil {
		return r, nil, fmt.Errorf("snapshot directory: %w", err)
	}
	p := paths{dir}
	lock, err := lockDir(p)
	if err != nil {
		return r, nil, err
	}
	defer lock.release()

	r.DiskBytes = diskUse(dir)
	starts, _, _ := readNumber(p.starting())
	r.KilledStarts = int(starts)
	if why, err := os.ReadFile(p.why()); err == nil {
		r.SetAside = strings.TrimSpace(string(why))
	}
	db, done, clean, err := openOffline(p)
	r.Clean = clean
	if err != nil || db == nil {
		return r, nil, err
	}
	defer done()
	if man, err = readManifest(db); err != nil {
		return r, nil, err
	}
	if r.Leftovers, err = leftovers(db, man); err != nil {
		return r, nil, err
	}
	if man == nil {
		return r, nil, missing(p)
	}
	r.Info, r.Empty = man.Info, false
	return r, man, use(db, man)
}

// missing says whether a directory without a manifest should have one.
func missing(p paths) error {
	if gen, has, _ := p.hasSnapshot(); has {
		return fmt.Errorf("%w: generation %d was written here, and the directory holds none", ErrDamaged, gen)
	}
	return nil
}

func leftovers(db *badger.DB, man *manifest) ([]uint64, error) {
	gens, err := generations(db)
	var out []uint64
	for _, g := range gens {
		if man == nil || g != man.Generation {
			out = append(out, g)
		}
	}
	return out, err
}

// openOffline opens the newest complete Badger directory read-only, or a copy
// of it where it was not closed cleanly. Without one, db is nil.
func openOffline(p paths) (db *badger.DB, done func(), clean bool, err error) {
	dir := p.db()
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		dir = p.next() // a swap that a kill interrupted
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil, true, missing(p)
	}
	_, has, err := p.hasSnapshot()
	if err != nil {
		return nil, nil, false, err
	}
	if err := preflight(dir, has); err != nil {
		return nil, nil, false, err
	}
	opt := badgerOptions(dir, defaultValueLogBytes, slog.New(slog.DiscardHandler))
	// A clean close leaves no memory table behind.
	if mem, err := withSuffix(dir, ".mem"); err == nil && len(mem) == 0 {
		if db, err := openBadger(opt.WithReadOnly(true)); err == nil {
			return db, func() { closeQuietly(db) }, true, nil
		}
	}
	tmp, err := copyDir(dir)
	if err != nil {
		return nil, nil, false, err
	}
	if err = tidy(tmp); err == nil {
		db, err = openBadgerTwice(opt.WithDir(tmp).WithValueDir(tmp))
	}
	if err != nil {
		return nil, nil, false, errors.Join(err, os.RemoveAll(tmp))
	}
	return db, func() { closeQuietly(db); _ = os.RemoveAll(tmp) }, false, nil
}

// copyDir copies the files of a Badger directory to a new temporary one, tidied.
func copyDir(dir string) (string, error) {
	tmp, err := os.MkdirTemp("", "kvindexd-snapshot-")
	if err != nil {
		return "", err
	}
	if err := copyFiles(tmp, dir); err != nil {
		return "", errors.Join(fmt.Errorf("copy of a snapshot that was not closed: %w", err), os.RemoveAll(tmp))
	}
	return tmp, nil
}

func copyFiles(dst, src string) error {
	if err := checkSpace(dst, diskUse(src)+openReserveBytes); err != nil {
		return err
	}
	entries, err := os.ReadDir(src)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		if err := copySparse(filepath.Join(dst, e.Name()), filepath.Join(src, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// copySparse copies a file and leaves holes where it has zeros: Badger's
// current log files are mostly that.
func copySparse(dst, src string) error {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(dst)
	if err != nil {
		return err
	}
	size, err := copyNonZero(out, in)
	return errors.Join(err, out.Truncate(size), out.Close())
}

func copyNonZero(out *os.File, in io.Reader) (int64, error) {
	buf, zeros := make([]byte, 64<<10), make([]byte, 64<<10)
	var at int64
	for {
		n, err := io.ReadFull(in, buf)
		if !bytes.Equal(buf[:n], zeros[:n]) {
			if _, err := out.WriteAt(buf[:n], at); err != nil {
				return at, err
			}
		}
		at += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return at, nil
		}
		if err != nil {
			return at, err
		}
	}
}

// An export is one generation as a stream, the same bytes as in Badger:
//
//	 0  4  magic "KVSX"
//	 4  2  version
//	 6  2  0
//	 8  4  M = length of the manifest
//	12  M  manifest
//	then the manifest's number of chunks, in order, each telling its own length;
//	then the end.
const exportMagic = "KVSX"

// Export writes the standing generation to w, verified first. Errors: as
// Verify's, ErrEmpty, w's.
func Export(dir string, w io.Writer) (Info, error) {
	_, man, err := inspect(dir, func(db *badger.DB, man *manifest) error {
		if err := verifyGeneration(context.Background(), db, man); err != nil {
			return err
		}
		return export(db, man, w)
	})
	if err != nil {
		return Info{}, err
	}
	if man == nil {
		return Info{}, ErrEmpty
	}
	return man.Info, nil
}

func export(db *badger.DB, man *manifest, w io.Writer) error {
	out := bufio.NewWriterSize(w, 64<<10)
	head := append([]byte(exportMagic), FormatVersion, 0, 0, 0)
	body := man.append(nil)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(body)))
	if _, err := out.Write(append(head, body...)); err != nil {
		return err
	}
	var copied []byte
	for n := range man.Chunks {
		err := readChunk(db, man, n, func(stored []byte, at place) error {
			copied = append(copied[:0], stored...)
			_, err := parseChunk(copied, at)
			return err
		})
		if err != nil {
			return err
		}
		if _, err := out.Write(copied); err != nil {
			return err
		}
	}
	return out.Flush()
}

// Import makes the exported generation in r the standing one of the store in
// dir, which is made if it does not exist. If r turns out to be damaged, what
// stood there stands. Errors: ErrLocked, ErrDamaged and ErrVersion about r,
// ErrNoSpace, r's.
func Import(dir string, r io.Reader) (Info, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	man, err := readExportHead(in)
	if err != nil {
		return Info{}, fmt.Errorf("import: %w", err)
	}
	s, err := Open(Options{Dir: dir})
	if err != nil {
		return Info{}, err
	}
	_, err = s.Write(context.Background(), man.Info, func(w *Writer) error {
		return eachExported(in, man, w.Chunk)
	})
	info, _ := s.Info()
	if err := errors.Join(err, s.Close()); err != nil {
		return Info{}, fmt.Errorf("import: %w", err)
	}
	return info, nil
}

func readExportHead(r io.Reader) (*manifest, error) {
	var head [12]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, cutShort(err, "header")
	}
	le := binary.LittleEndian
	if string(head[:4]) != exportMagic {
		return nil, fmt.Errorf("%w: an export begins with %q, this with %q", ErrDamaged, exportMagic, head[:4])
	}
	if v := le.Uint16(head[4:]); v != FormatVersion {
		return nil, versionError("export", v)
	}
	n := le.Uint32(head[8:])
	if n > maxManifestBytes {
		return nil, fmt.Errorf("%w: manifest of %d bytes, at most %d", ErrDamaged, n, maxManifestBytes)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, cutShort(err, "manifest")
	}
	return parseManifest(body)
}

// eachExported reads, verifies and decodes the chunks behind an export's head.
func eachExported(r io.Reader, man *manifest, fn func(kind ChunkKind, data []byte) error) error {
	codec, err := newCodec()
	if err != nil {
		return err
	}
	defer codec.close()
	var stored, data []byte
	for n := range man.Chunks {
		if stored, err = readStored(r, stored, n); err != nil {
			return err
		}
		ch, err := parseChunk(stored, place{man.Generation, man.identity, n})
		if err != nil {
			return err
		}
		if data, err = codec.decode(data, ch); err != nil {
			return err
		}
		if err := fn(ch.kind, data); err != nil {
			return err
		}
	}
	if n, err := io.ReadFull(r, make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: the export goes on after its %d chunks", ErrDamaged, man.Chunks)
	}
	return nil
}

// readStored reads one chunk's stored form into buf's memory, which grows to at
// most maxStoredChunk.
func readStored(r io.Reader, buf []byte, n uint32) ([]byte, error) {
	what := fmt.Sprintf("chunk %d", n)
	buf = append(buf[:0], make([]byte, chunkHeader)...)
	if _, err := io.ReadFull(r, buf); err != nil {
		return buf, cutShort(err, what)
	}
	size := binary.LittleEndian.Uint32(buf[36:])
	if size > MaxChunkBytes {
		return buf, fmt.Errorf("%w: %s of %d bytes, at most %d", ErrDamaged, what, size, MaxChunkBytes)
	}
	buf = append(buf, make([]byte, int(size)+checksumBytes)...)
	if _, err := io.ReadFull(r, buf[chunkHeader:]); err != nil {
		return buf, cutShort(err, what)
	}
	return buf, nil
}

func cutShort(err error, where string) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: the export ends in its %s", ErrDamaged, where)
	}
	return err
}
