package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tree is every file below dir with its content, but for the advisory LOCK.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "LOCK" {
			return err
		}
		b, err := os.ReadFile(path)
		out[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestOfflineChangesNothing, whether the directory was closed or not.
func TestOfflineChangesNothing(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()) // and copies are cleared away
	closed, killed := images(t)
	for dir, clean := range map[string]bool{closed: true, killed: false} {
		before := tree(t, dir)
		r, err := Inspect(dir)
		if err != nil || r.Empty || r.Clean != clean || r.Info.Generation != 2 || len(r.Leftovers) != 0 || r.DiskBytes == 0 {
			t.Errorf("clean %v: %+v, %v", clean, r, err)
		}
		v, err := Verify(dir)
		if d := cmp.Diff(r, v); d != "" || err != nil {
			t.Errorf("clean %v: %s, %v", clean, d, err)
		}
		var out bytes.Buffer
		info, err := Export(dir, &out)
		if d := cmp.Diff(r.Info, info); d != "" || err != nil {
			t.Errorf("clean %v: %s, %v", clean, d, err)
		}
		if !cmp.Equal(before, tree(t, dir)) {
			t.Errorf("clean %v: the directory is not what it was", clean)
		}
	}
	if left, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestOfflineOfNothing(t *testing.T) {
	_, err := Inspect(filepath.Join(t.TempDir(), "none"))
	wantIs(t, err, fs.ErrNotExist)
	empty := t.TempDir()
	r, err := Verify(empty)
	if err != nil || !r.Empty {
		t.Errorf("%+v, %v", r, err)
	}
	_, err = Export(empty, &bytes.Buffer{})
	wantIs(t, err, ErrEmpty)
	s := open(t, small(empty))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := Verify(empty); err != nil || !r.Empty {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestVerifyFindsDamageAndLeavesIt(t *testing.T) {
	closed, _ := images(t)
	f := func(name string, harm func(db string)) {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			copyStore(t, dir, closed)
			harm(filepath.Join(dir, "db"))
			before := tree(t, dir)
			_, err := Verify(dir)
			wantIs(t, err, ErrDamaged)
			_, err = Export(dir, &bytes.Buffer{})
			wantIs(t, err, ErrDamaged)
			if !cmp.Equal(before, tree(t, dir)) {
				t.Error("the directory is not what it was")
			}
		})
	}
	f("value log", func(db string) {
		for _, name := range filesOf(t, db, ".vlog") {
			if n := used(t, name); n > 1000 {
				b, _ := os.ReadFile(name)
				b[n/2] ^= 1
				if err := os.WriteFile(name, b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
	f("table", func(db string) {
		name := filesOf(t, db, ".sst")[0]
		if err := os.Truncate(name, used(t, name)/2); err != nil {
			t.Fatal(err)
		}
	})
	f("no MANIFEST", func(db string) {
		if err := os.Remove(filepath.Join(db, "MANIFEST")); err != nil {
			t.Fatal(err)
		}
	})
	f("all gone", func(db string) {
		if err := os.RemoveAll(db); err != nil {
			t.Fatal(err)
		}
	})
}

func TestExportImport(t *testing.T) {
	closed, _ := images(t)
	var exported bytes.Buffer
	from, err := Export(closed, &exported)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "new")
	to, err := Import(dir, bytes.NewReader(exported.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	from.Generation, from.StoredBytes = to.Generation, to.StoredBytes
	if d := cmp.Diff(from, to); d != "" {
		t.Error(d)
	}
	s := open(t, small(dir))
	wantSeed(t, s, 2, damageShape)
	_, err = Import(dir, bytes.NewReader(exported.Bytes()))
	wantIs(t, err, ErrLocked)
	mustWrite(t, s, 7, damageShape)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	// What does not import leaves what stands.
	f := func(what string, want error, b []byte) {
		t.Helper()
		if _, err := Import(dir, bytes.NewReader(b)); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
		s := open(t, small(dir))
		wantSeed(t, s, 7, damageShape)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	whole := exported.Bytes()
	harm := func(at int, v byte) []byte {
		b := bytes.Clone(whole)
		b[at] ^= v
		return b
	}
	f("nothing", ErrDamaged, nil)
	f("something else", ErrDamaged, []byte(strings.Repeat("not an export ", 10)))
	f("another version", ErrVersion, harm(4, 2))
	f("a manifest of 4 GiB", ErrDamaged, append(whole[:8:8], 0xff, 0xff, 0xff, 0xff))
	f("a flipped manifest", ErrDamaged, harm(40, 1))
	f("a flipped chunk", ErrDamaged, harm(len(whole)/2, 1))
	f("cut in a chunk", ErrDamaged, whole[:len(whole)/2])
	f("cut by one", ErrDamaged, whole[:len(whole)-1])
	f("one more", ErrDamaged, append(bytes.Clone(whole), 0))
}

func TestLoadCancelled(t *testing.T) {
	s := open(t, small(t.TempDir()))
	mustWrite(t, s, 1, damageShape)
	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	_, err := s.Load(ctx, func(ChunkKind, []byte) error { n++; cancel(); return nil })
	wantIs(t, err, context.Canceled)
	if n != 1 {
		t.Errorf("%d chunks after the context ended", n)
	}
	wantSeed(t, s, 1, damageShape)
}

// benchData is like an index: numbers that repeat in their high bytes.
func benchData(n int) []byte {
	noise := testChunk(nil, 1, 1, n)
	for i := 0; i+16 <= len(noise); i += 16 {
		binary.LittleEndian.PutUint64(noise[i+8:], uint64(i))
	}
	return noise[:n]
}

const benchChunks = 128 // 64 MiB

func benchWrite(b *testing.B, s *Store, data []byte) Stats {
	st, err := s.Write(context.Background(), Info{}, func(w *Writer) error {
		for range benchChunks {
			if err := w.Chunk(1, data); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	return st
}

func BenchmarkWrite(b *testing.B) {
	s := open(b, Options{Dir: b.TempDir()})
	data := benchData(TargetChunkBytes)
	b.SetBytes(benchChunks * int64(len(data)))
	b.ReportAllocs()
	var st Stats
	for b.Loop() {
		st = benchWrite(b, s, data)
	}
	b.ReportMetric(float64(st.StoredBytes)/float64(st.RawBytes), "stored/raw")
	b.ReportMetric(float64(st.DiskBytes)/float64(st.StoredBytes), "disk/stored")
	b.ReportMetric(float64(st.Reclaim.Milliseconds()), "reclaim-ms")
}

func BenchmarkLoad(b *testing.B) {
	s := open(b, Options{Dir: b.TempDir()})
	data := benchData(TargetChunkBytes)
	benchWrite(b, s, data)
	b.SetBytes(benchChunks * int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Load(context.Background(), func(ChunkKind, []byte) error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
