package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dgraph-io/badger/v4"
)

func filesOf(t testing.TB, dir, ext string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*"+ext))
	if err != nil || len(names) == 0 {
		t.Fatalf("no %s file in %s: %v", ext, dir, err)
	}
	return names
}

var damageShape = shape{8, 300 << 10}

// images returns two directories that hold generation 2: one that was closed,
// and one as a kill leaves it, with a memory table.
func images(t *testing.T) (closed, killed string) {
	t.Helper()
	closed, killed = t.TempDir(), t.TempDir()
	s := open(t, small(closed))
	mustWrite(t, s, 1, damageShape)
	mustWrite(t, s, 2, damageShape)
	// What a memory table of a running store holds beside this is little:
	// the sentinel again gives it something.
	if err := put(s.db, sentinelKey, []byte("12345678")); err != nil {
		t.Fatal(err)
	}
	copyStore(t, killed, closed)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return closed, killed
}

func copyStore(t testing.TB, dst, src string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(src, "*"))
	if err != nil {
		t.Fatal(err)
	}
	inner, err := filepath.Glob(filepath.Join(src, "db", "*"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dst, "db"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range append(names, inner...) {
		rel, _ := filepath.Rel(src, name)
		if fi, err := os.Stat(name); err != nil || fi.IsDir() {
			continue
		}
		if err := copySparse(filepath.Join(dst, rel), name); err != nil {
			t.Fatal(err)
		}
	}
}

// A wound is one way to damage a file whose used part has n bytes.
type wound struct {
	name string
	do   func(path string, n int64) error
}

func wounds() []wound {
	flip := func(at func(n int64) int64) func(string, int64) error {
		return func(path string, n int64) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			var b [1]byte
			off := min(at(n), max(n-1, 0))
			if _, err := f.ReadAt(b[:], off); err != nil {
				return errors.Join(err, f.Close())
			}
			b[0] ^= 0x10
			_, err = f.WriteAt(b[:], off)
			return errors.Join(err, f.Close())
		}
	}
	cutTo := func(at func(n int64) int64) func(string, int64) error {
		return func(path string, n int64) error { return os.Truncate(path, at(n)) }
	}
	ws := []wound{
		{"missing", func(path string, _ int64) error { return os.Remove(path) }},
		{"cut to 0", cutTo(func(int64) int64 { return 0 })},
		{"cut to 7", cutTo(func(int64) int64 { return 7 })},
		{"cut in half", cutTo(func(n int64) int64 { return n / 2 })},
		{"cut by 1", cutTo(func(n int64) int64 { return max(n-1, 0) })},
		{"last byte flipped", flip(func(n int64) int64 { return n - 1 })},
	}
	flips := int64(3)
	if long() {
		flips = 60
	}
	for i := range flips {
		ws = append(ws, wound{fmt.Sprintf("flipped at %d/%d", i, flips), flip(func(n int64) int64 { return n * i / flips })})
	}
	for _, at := range []int64{4, 21} {
		ws = append(ws, wound{fmt.Sprintf("flipped at byte %d", at), flip(func(int64) int64 { return at })})
	}
	return ws
}

// used is the length of a file without the zeros at its end.
func used(t *testing.T, path string) int64 {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := len(b)
	for n > 0 && b[n-1] == 0 {
		n--
	}
	return int64(n)
}

// TestDamage wounds every kind of Badger's files. What comes after is always
// the same: the daemon starts, within three tries; what it serves is the whole
// generation or none; if none, one log line says so and the damaged directory
// is kept; and the next Write works.
func TestDamage(t *testing.T) {
	closed, killed := images(t)
	kinds := map[string][]string{
		closed: {".sst", ".vlog", "MANIFEST", "KEYREGISTRY", "DISCARD"},
		killed: {".sst", ".vlog", "MANIFEST", "KEYREGISTRY", "DISCARD", ".mem"},
	}
	for image, files := range kinds {
		state := "closed"
		if image == killed {
			state = "killed"
		}
		for _, kind := range files {
			victims := filesOf(t, filepath.Join(image, "db"), kind)
			if !long() && len(victims) > 1 {
				victims = []string{victims[0], victims[len(victims)-1]}
			}
			for _, victim := range victims {
				name := filepath.Base(victim)
				for _, w := range wounds() {
					t.Run(state+"/"+name+"/"+w.name, func(t *testing.T) {
						t.Parallel()
						dir := t.TempDir()
						copyStore(t, dir, image)
						path := filepath.Join(dir, "db", name)
						if err := w.do(path, used(t, path)); err != nil {
							t.Skip(err) // nothing there to damage
						}
						afterDamage(t, dir)
					})
				}
			}
		}
	}
}

// afterDamage starts the store as a daemon would, in a child, as often as it
// takes: a start that dies is what the start counter is for.
func afterDamage(t *testing.T, dir string) {
	t.Helper()
	for start := 1; ; start++ {
		out, err := child(t, "daemon", dir).CombinedOutput()
		if err == nil {
			t.Logf("start %d: %s", start, strings.TrimSpace(string(out)))
			return
		}
		if strings.Contains(string(out), "WRONG") || start == 3 {
			t.Fatalf("start %d: %v\n%s", start, err, out)
		}
		t.Logf("start %d died: %v: %s", start, err, cut(string(out)))
	}
}

func init() {
	children["daemon"] = func(args []string) error {
		lines := &logLines{}
		o := small(args[0])
		o.Logger = lines.logger()
		s, err := Open(o)
		if err != nil {
			return fmt.Errorf("WRONG: Open: %w", err)
		}
		seed, err := loadSeed(s, damageShape)
		said := lines.with(setAsideLine)
		switch {
		case err == nil && seed == 2 && len(said) == 0:
			fmt.Println("the whole generation is served")
		case errors.Is(err, ErrDamaged) && len(said) == 1 && exists(o.Dir, "db.damaged"):
			fmt.Println(said[0])
		default:
			return fmt.Errorf("WRONG: generation %d, %w; log %q", seed, err, said)
		}
		if _, err := writeSeed(context.Background(), s, 3, damageShape); err != nil {
			return fmt.Errorf("WRONG: Write: %w", err)
		}
		if seed, err := loadSeed(s, damageShape); err != nil || seed != 3 {
			return fmt.Errorf("WRONG: after the next write: generation %d, %w", seed, err)
		}
		if err := s.Close(); err != nil {
			return fmt.Errorf("WRONG: Close: %w", err)
		}
		return nil
	}
	// Badger itself, without what this package does before it.
	children["badger"] = func(args []string) error {
		db, err := badger.Open(badgerOptions(args[0], minValueLogBytes, small("").Logger))
		if err != nil {
			return err
		}
		return db.Close()
	}
}

// TestTableThatEndsTheProcess: a table cut short ends a process that lets
// Badger open it. The store sees it first and loses no start over it.
func TestTableThatEndsTheProcess(t *testing.T) {
	closed, _ := images(t)
	dir := t.TempDir()
	copyStore(t, dir, closed)
	cut := filesOf(t, filepath.Join(dir, "db"), ".sst")[0]
	if err := os.Truncate(cut, used(t, cut)/2); err != nil {
		t.Fatal(err)
	}
	out, err := child(t, "badger", filepath.Join(dir, "db")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "goroutine ") {
		t.Errorf("Badger opened it, or refused it in words; then the check is not needed: %v, %s", err, out)
	}
	o := small(dir)
	lines := &logLines{}
	o.Logger = lines.logger()
	s := open(t, o)
	_, err = s.Load(context.Background(), nil)
	wantIs(t, err, ErrDamaged)
	n := lines.with(setAsideLine)
	if len(n) != 1 || !strings.Contains(n[0], filepath.Base(cut)) || !strings.Contains(n[0], "generation 2") {
		t.Errorf("log: %q", n)
	}
}

// TestNothingOfADamagedGenerationIsHandedOut, not even what stands before the
// damage.
func TestNothingOfADamagedGenerationIsHandedOut(t *testing.T) {
	o := small(t.TempDir())
	s := open(t, o)
	mustWrite(t, s, 1, damageShape)
	last := chunkKey(1, uint32(damageShape.chunks-1))
	err := view(s.db, last, func(v []byte) error {
		v = bytes.Clone(v)
		v[len(v)/2] ^= 1
		return put(s.db, last, v)
	})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	_, err = s.Load(context.Background(), func(ChunkKind, []byte) error { n++; return nil })
	wantIs(t, err, ErrDamaged)
	if n != 0 {
		t.Errorf("%d chunks were handed out", n)
	}
}

// TestOneDamagedDirectoryIsKept: the newest.
func TestOneDamagedDirectoryIsKept(t *testing.T) {
	o := small(t.TempDir())
	for i := uint64(1); i <= 3; i++ {
		s := open(t, o)
		mustWrite(t, s, i, damageShape)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(o.Dir, "db", "MANIFEST")); err != nil {
			t.Fatal(err)
		}
		s = open(t, o)
		_, err := s.Load(context.Background(), nil)
		wantIs(t, err, ErrDamaged)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, e.Name())
		}
	}
	if got := strings.Join(dirs, " "); got != "db db.damaged" {
		t.Errorf("directories: %s", got)
	}
}

// TestRefusalIsNotDamage: what the machine refuses costs no snapshot.
func TestRefusalIsNotDamage(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Log("as root permissions refuse nothing; the texts of the errors are checked alone")
	}
	for _, text := range []string{
		"while opening memtables err: open /x: too many open files",
		"no space left on device", "permission denied", "read-only file system",
	} {
		if !isEnvironment(errors.New(text)) {
			t.Errorf("%q counts as damage", text)
		}
	}
	if isEnvironment(errors.New("file does not exist for table 3")) {
		t.Error("a missing table counts as the machine's")
	}
}
