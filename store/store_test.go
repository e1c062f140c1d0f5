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
	"time"

	"github.com/google/go-cmp/cmp"
)

type got struct {
	Kind ChunkKind
	Data string
}

func loadAll(t *testing.T, s *Store) (Info, []got) {
	t.Helper()
	var out []got
	info, err := s.Load(context.Background(), func(k ChunkKind, d []byte) error {
		out = append(out, got{k, string(d)})
		return nil
	})
	if err != nil {
		t.Fatalf("Load: %v", err)
	}
	return info, out
}

func TestLoadGivesWhatWriteWasGiven(t *testing.T) {
	text := func(n int) string { return strings.Repeat("a block of a prefix ", n/20+1)[:n] }
	noise := string(testChunk(nil, 1, 1, MaxChunkBytes))
	var many []got
	for i := range 300 {
		many = append(many, got{1, fmt.Sprint("chunk ", i)})
	}
	f := func(name string, chunks []got) {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, small(dir))
			created := time.Unix(1_700_000_000, 5)
			info := Info{Content: "index", ContentVersion: 3, Producer: "kvindexd test", Created: created, Meta: []byte(`{"streams":2}`)}
			st, err := s.Write(context.Background(), info, func(w *Writer) error {
				for _, c := range chunks {
					if err := w.Chunk(c.Kind, []byte(c.Data)); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = open(t, small(dir))
			gotInfo, data := loadAll(t, s)
			if d := cmp.Diff(chunks, data); d != "" {
				t.Error(cut(d))
			}
			info.Generation, info.Chunks = 1, uint32(len(chunks))
			info.RawBytes, info.StoredBytes = uint64(st.RawBytes), uint64(st.StoredBytes)
			if d := cmp.Diff(info, gotInfo); d != "" {
				t.Error(d)
			}
		})
	}
	f("nothing", nil)
	f("an empty chunk", []got{{9, ""}})
	f("one byte", []got{{0, "x"}})
	f("below and above Badger's threshold", []got{{1, text(900)}, {2, noise[:1000]}, {3, noise[:1100]}})
	f("compressible", []got{{1, text(TargetChunkBytes)}, {65535, text(MaxChunkBytes)}})
	f("incompressible", []got{{1, noise}, {1, noise[:TargetChunkBytes]}})
	f("many", many)
}

func TestAppendCutsChunks(t *testing.T) {
	s := open(t, small(t.TempDir()))
	record := bytes.Repeat([]byte("r"), 100<<10)
	_, err := s.Write(context.Background(), Info{}, func(w *Writer) error {
		for range 7 {
			if err := w.Append(1, record); err != nil {
				return err
			}
		}
		if err := w.Append(2, record); err != nil {
			return err
		}
		return w.Chunk(3, record)
	})
	if err != nil {
		t.Fatal(err)
	}
	var sizes []string
	_, all := loadAll(t, s)
	for _, c := range all {
		sizes = append(sizes, fmt.Sprintf("%d:%dK", c.Kind, len(c.Data)>>10))
	}
	if d := cmp.Diff([]string{"1:600K", "1:100K", "2:100K", "3:100K"}, sizes); d != "" {
		t.Error(d)
	}
}

func TestBounds(t *testing.T) {
	s := open(t, small(t.TempDir()))
	f := func(info Info, chunk int) {
		t.Helper()
		_, err := s.Write(context.Background(), info, func(w *Writer) error { return w.Chunk(1, make([]byte, chunk)) })
		wantIs(t, err, ErrTooLarge)
	}
	f(Info{}, MaxChunkBytes+1)
	f(Info{Content: strings.Repeat("x", MaxNameBytes+1)}, 1)
	f(Info{Producer: strings.Repeat("x", MaxNameBytes+1)}, 1)
	f(Info{Meta: make([]byte, MaxMetaBytes+1)}, 1)
	if _, err := s.Write(context.Background(), Info{Meta: make([]byte, MaxMetaBytes)}, func(*Writer) error { return nil }); err != nil {
		t.Fatal(err)
	}
}

func TestEmptyAndAccessors(t *testing.T) {
	s := open(t, small(t.TempDir()))
	if _, err := s.Load(context.Background(), nil); !errors.Is(err, ErrEmpty) {
		t.Fatalf("Load of a new store: %v", err)
	}
	if _, ok := s.Age(); ok {
		t.Fatal("a new store has an age")
	}
	st := mustWrite(t, s, 1, shape{3, 1000})
	if d := cmp.Diff(st, s.Stats()); d != "" {
		t.Error(d)
	}
	if st.Chunks != 3 || st.RawBytes < 3000 || st.DiskBytes == 0 || st.Duration == 0 {
		t.Errorf("stats %+v", st)
	}
	if age, ok := s.Age(); !ok || age > time.Minute {
		t.Errorf("age %v, %v", age, ok)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := s.Load(context.Background(), nil)
	wantIs(t, err, ErrClosed)
	_, err = writeSeed(context.Background(), s, 2, shape{1, 1})
	wantIs(t, err, ErrClosed)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestFailedWriteLeavesTheOldGeneration(t *testing.T) {
	sh := shape{6, 200 << 10}
	boom := errors.New("boom")
	f := func(name string, want error, fail func(cancel func()) error) {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, small(dir))
			mustWrite(t, s, 1, sh)
			for range 5 {
				ctx, cancel := context.WithCancel(context.Background())
				_, err := s.Write(ctx, Info{}, func(w *Writer) error {
					var buf []byte
					for n := range sh.chunks {
						if n == 3 {
							if err := fail(cancel); err != nil {
								return err
							}
						}
						buf = testChunk(buf, 99, n, sh.size)
						if err := w.Chunk(1, buf); err != nil {
							return err
						}
					}
					return nil
				})
				cancel()
				wantIs(t, err, want)
				wantSeed(t, s, 1, sh)
			}
			mustWrite(t, s, 2, sh)
			wantSeed(t, s, 2, sh)
			if disk, one := s.Stats().DiskBytes, int64(sh.chunks*sh.size); disk > 4*one {
				t.Errorf("after failed writes %d bytes on disk for a generation of %d", disk, one)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			wantSeed(t, open(t, small(dir)), 2, sh)
		})
	}
	f("cancelled", context.Canceled, func(cancel func()) error { cancel(); return nil })
	f("produce fails", boom, func(func()) error { return boom })
}

func TestConsumeErrors(t *testing.T) {
	lines := &logLines{}
	o := small(t.TempDir())
	o.Logger = lines.logger()
	s := open(t, o)
	sh := shape{3, 5000}
	mustWrite(t, s, 1, sh)
	boom := errors.New("boom")
	_, err := s.Load(context.Background(), func(ChunkKind, []byte) error { return boom })
	wantIs(t, err, boom)
	wantSeed(t, s, 1, sh)
	_, err = s.Load(context.Background(), func(ChunkKind, []byte) error { return fmt.Errorf("%w: unreadable content", ErrDamaged) })
	wantIs(t, err, ErrDamaged)
	if n := lines.with(setAsideLine); len(n) != 1 || !strings.Contains(n[0], "unreadable content") || !strings.Contains(n[0], "generation 1") {
		t.Errorf("log: %q", n)
	}
	_, err = s.Load(context.Background(), nil)
	wantIs(t, err, ErrDamaged)
	mustWrite(t, s, 2, sh)
	wantSeed(t, s, 2, sh)
}

func TestSecondOpenIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := open(t, small(dir))
	sh := shape{2, 5000}
	mustWrite(t, s, 1, sh)
	clear := func(text string) {
		t.Helper()
		for _, part := range []string{dir, "held by another kvindexd", fmt.Sprint(os.Getpid())} {
			if !strings.Contains(text, part) {
				t.Errorf("%q does not say %q", text, part)
			}
		}
	}
	_, err := Open(small(dir))
	wantIs(t, err, ErrLocked)
	clear(err.Error())
	for _, f := range []func() error{
		func() error { _, err := Inspect(dir); return err },
		func() error { _, err := Verify(dir); return err },
		func() error { _, err := Export(dir, &bytes.Buffer{}); return err },
	} {
		wantIs(t, f(), ErrLocked)
	}
	out, err := child(t, "open", dir).CombinedOutput()
	if err == nil {
		t.Fatalf("another process opened it: %s", out)
	}
	clear(string(out))
	mustWrite(t, s, 2, sh)
	wantSeed(t, s, 2, sh)
}

func init() {
	children["open"] = func(args []string) error {
		s, err := Open(small(args[0]))
		if err != nil {
			return err
		}
		return s.Close()
	}
}

// TestRewritesStayBounded writes over and over, closing now and then, and holds
// the directory below three generations.
func TestRewritesStayBounded(t *testing.T) {
	rewrites := 24
	if long() {
		rewrites = 50
	}
	o := small(t.TempDir())
	sh := shape{16, TargetChunkBytes}
	one := int64(sh.chunks * sh.size)
	s := open(t, o)
	var most int64
	for i := 1; i <= rewrites; i++ {
		st := mustWrite(t, s, uint64(i), sh)
		most = max(most, st.DiskBytes)
		if st.DiskBytes > 3*one {
			t.Fatalf("rewrite %d: %d bytes on disk, generation %d", i, st.DiskBytes, one)
		}
		if i%4 == 0 {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = open(t, o)
			wantSeed(t, s, uint64(i), sh)
		}
	}
	t.Logf("%d rewrites of %d bytes: at most %d on disk (%.2f generations)", rewrites, one, most, float64(most)/float64(one))
}

// TestLeftoversStayBounded is what the sentinel is for. A first generation that
// was never finished has no manifest beside it; after a close it would be alone
// in its table, and dropping it would not count what it leaves in the value log.
func TestLeftoversStayBounded(t *testing.T) {
	sh := shape{8, TargetChunkBytes}
	one := int64(sh.chunks * sh.size)
	unfinished := errors.New("unfinished")
	f := func(name string, standing uint64) {
		t.Run(name, func(t *testing.T) {
			o := small(t.TempDir())
			s := open(t, o)
			if standing > 0 {
				mustWrite(t, s, standing, sh)
			}
			for i := range 6 {
				_, err := s.writeInto(context.Background(), s.db, Info{}, func(w *Writer) error {
					for n := range sh.chunks {
						if err := w.Chunk(1, testChunk(nil, 99, n, sh.size)); err != nil {
							return err
						}
					}
					return unfinished
				})
				wantIs(t, err, unfinished)
				if err := s.Close(); err != nil { // as it is, without what Write does after a failure
					t.Fatal(err)
				}
				if r, err := Inspect(o.Dir); err != nil || len(r.Leftovers) != 1 || r.Info.Generation != standing {
					t.Fatalf("%+v, %v", r, err)
				}
				s = open(t, o)
				s.reclaim() // what the first Load or Write does
				if disk := s.refreshDisk(); disk > 3*one {
					t.Fatalf("unfinished write %d: %d bytes on disk, generation %d", i, disk, one)
				}
			}
			mustWrite(t, s, 2, sh)
			wantSeed(t, s, 2, sh)
		})
	}
	f("after a whole one", 1)
	f("in an empty store", 0)
}

// TestCeilingGivesAFreshDirectory fills the value log with what no collection
// gives back.
func TestCeilingGivesAFreshDirectory(t *testing.T) {
	lines := &logLines{}
	o := small(t.TempDir())
	o.Logger = lines.logger()
	sh := shape{4, TargetChunkBytes}
	one := int64(sh.chunks * sh.size)
	s := open(t, o)
	for n := range 40 {
		if err := put(s.db, fmt.Appendf(nil, "foreign %d", n), testChunk(nil, 9, n, TargetChunkBytes)); err != nil {
			t.Fatal(err)
		}
	}
	if disk := mustWrite(t, s, 1, sh).DiskBytes; disk < 8*one {
		t.Fatalf("%d bytes on disk", disk)
	}
	// A fresh directory that fails to be written leaves the old one.
	_, err := s.Write(context.Background(), Info{}, func(*Writer) error { return context.Canceled })
	wantIs(t, err, context.Canceled)
	wantSeed(t, s, 1, sh)
	if disk := mustWrite(t, s, 2, sh).DiskBytes; disk > 2*one {
		t.Errorf("still %d bytes on disk", disk)
	}
	if n := lines.with("replaced by a fresh one"); len(n) != 1 {
		t.Errorf("log: %q", n)
	}
	wantSeed(t, s, 2, sh)
	mustWrite(t, s, 3, sh)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	wantSeed(t, open(t, o), 3, sh)
}

func TestInterruptedSwap(t *testing.T) {
	sh := shape{3, 5000}
	make1 := func(dir string, seed uint64) {
		s := open(t, small(dir))
		mustWrite(t, s, seed, sh)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	f := func(name string, want uint64, arrange func(dir, other string)) {
		t.Run(name, func(t *testing.T) {
			dir, other := t.TempDir(), t.TempDir()
			make1(dir, 1)
			make1(other, 2)
			arrange(dir, other)
			s := open(t, small(dir))
			wantSeed(t, s, want, sh)
			for _, name := range []string{"db.next", "db.old"} {
				if exists(dir, name) {
					t.Errorf("%s is still there", name)
				}
			}
		})
	}
	rename := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	f("while the fresh one was written", 1, func(dir, other string) {
		rename(filepath.Join(other, "db"), filepath.Join(dir, "db.next"))
	})
	f("between the renames", 2, func(dir, other string) {
		rename(filepath.Join(dir, "db"), filepath.Join(dir, "db.old"))
		rename(filepath.Join(other, "db"), filepath.Join(dir, "db.next"))
	})
	f("before the old one was removed", 2, func(dir, other string) {
		rename(filepath.Join(dir, "db"), filepath.Join(dir, "db.old"))
		rename(filepath.Join(other, "db"), filepath.Join(dir, "db"))
	})
}

func TestOtherVersionIsRefusedByName(t *testing.T) {
	f := func(version byte, age string) {
		t.Run(age, func(t *testing.T) {
			o := small(t.TempDir())
			s := open(t, o)
			sh := shape{3, 5000}
			mustWrite(t, s, 1, sh)
			if err := put(s.db, manifestKey, withVersion(s.state.man.append(nil), version)); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = open(t, o)
			_, err := s.Load(context.Background(), nil)
			wantIs(t, err, ErrVersion)
			for _, part := range []string{fmt.Sprint("version ", version), age, "reads version 1"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
			// A failed write keeps it, a whole one replaces it.
			_, err = s.Write(context.Background(), Info{}, func(*Writer) error { return context.Canceled })
			wantIs(t, err, context.Canceled)
			if n, _ := generations(s.db); len(n) == 0 || n[0] != 1 {
				t.Errorf("generations %v", n)
			}
			_, err = s.Load(context.Background(), nil)
			wantIs(t, err, ErrVersion)
			mustWrite(t, s, 2, sh)
			wantSeed(t, s, 2, sh)
			if exists(o.Dir, "db.damaged") {
				t.Error("set aside")
			}
		})
	}
	f(0, "older")
	f(2, "newer")
}
