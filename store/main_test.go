package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

// What can only be seen from outside a process (kill -9, a fatal fault, a lock)
// runs in a child: this test binary again, with the child's name in childEnv
// and its arguments in os.Args.
const childEnv = "KVINDEXD_STORE_CHILD"

var children = map[string]func(args []string) error{}

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		if err := children[name](os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	// An Open of Badger that fails leaves these behind; this package tries
	// twice a start and no more.
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("github.com/dgraph-io/badger/v4.(*DB).monitorCache"),
		goleak.IgnoreTopFunction("github.com/dgraph-io/badger/v4.(*DB).updateSize"),
		goleak.IgnoreTopFunction("github.com/dgraph-io/badger/v4.(*DB).flushMemtable"),
		goleak.IgnoreTopFunction("github.com/dgraph-io/badger/v4.(*levelsController).runCompactor"),
		goleak.IgnoreTopFunction("github.com/dgraph-io/badger/v4.(*vlogThreshold).listenForValueThresholdUpdate"),
		goleak.IgnoreTopFunction("github.com/dgraph-io/badger/v4/y.(*WaterMark).process"),
		goleak.IgnoreTopFunction("github.com/dgraph-io/ristretto/v2/z.(*AllocatorPool).freeupAllocators"),
	)
}

// long says whether the slow variants run.
func long() bool { return os.Getenv("KVINDEXD_LONG") == "1" }

func child(t testing.TB, name string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	return cmd
}

// logLines collects what a store logs.
type logLines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *logLines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *logLines) with(part string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for line := range strings.Lines(l.buf.String()) {
		if strings.Contains(line, part) {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

const setAsideLine = "snapshot set aside"

func small(dir string) Options {
	return Options{Dir: dir, ValueLogBytes: minValueLogBytes, Logger: slog.New(slog.DiscardHandler)}
}

func open(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// A test generation is told by one number: every byte of every chunk follows
// from it, so that a chunk of another generation is seen.
func testChunk(dst []byte, seed uint64, n, size int) []byte {
	dst = binary.LittleEndian.AppendUint64(dst[:0], seed)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(n))
	r := rand.NewPCG(seed, uint64(n))
	for len(dst) < size {
		dst = binary.LittleEndian.AppendUint64(dst, r.Uint64())
	}
	return dst
}

type shape struct{ chunks, size int }

func writeSeed(ctx context.Context, s *Store, seed uint64, sh shape) (Stats, error) {
	info := Info{Content: "test", ContentVersion: 1, Producer: "store test", Meta: binary.LittleEndian.AppendUint64(nil, seed)}
	return s.Write(ctx, info, func(w *Writer) error {
		var buf []byte
		for n := range sh.chunks {
			buf = testChunk(buf, seed, n, sh.size)
			if err := w.Chunk(ChunkKind(n%7), buf); err != nil {
				return err
			}
		}
		return nil
	})
}

// loadSeed loads and checks every byte; the error is Load's, or says what was
// handed out that was never written.
func loadSeed(s *Store, sh shape) (uint64, error) {
	var seed uint64
	var want []byte
	n := 0
	info, err := s.Load(context.Background(), func(kind ChunkKind, data []byte) error {
		if n == 0 {
			seed = binary.LittleEndian.Uint64(data)
		}
		want = testChunk(want, seed, n, sh.size)
		if kind != ChunkKind(n%7) || !bytes.Equal(data, want) {
			return fmt.Errorf("MIXTURE: chunk %d (kind %d) is not generation %d's", n, kind, seed)
		}
		n++
		return nil
	})
	switch {
	case err != nil:
		return 0, err
	case n != sh.chunks:
		return 0, fmt.Errorf("MIXTURE: %d chunks of %d", n, sh.chunks)
	case !bytes.Equal(info.Meta, binary.LittleEndian.AppendUint64(nil, seed)):
		return 0, fmt.Errorf("MIXTURE: manifest of %x over generation %d", info.Meta, seed)
	}
	return seed, nil
}

func mustWrite(t testing.TB, s *Store, seed uint64, sh shape) Stats {
	t.Helper()
	st, err := writeSeed(context.Background(), s, seed, sh)
	if err != nil {
		t.Fatalf("write of generation %d: %v", seed, err)
	}
	return st
}

func wantSeed(t testing.TB, s *Store, seed uint64, sh shape) {
	t.Helper()
	got, err := loadSeed(s, sh)
	if err != nil || got != seed {
		t.Fatalf("loaded %d, %v; want generation %d", got, err, seed)
	}
}

func wantIs(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("error %v, want one that is %q", err, target)
	}
}

func exists(elem ...string) bool {
	_, err := os.Stat(filepath.Join(elem...))
	return err == nil
}
