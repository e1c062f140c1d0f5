package fleet

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/store"
	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// logBuffer collects what is logged.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *logBuffer) says(t testing.TB, parts ...string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range parts {
		if !strings.Contains(l.buf.String(), p) {
			t.Errorf("the log does not say %q:\n%s", p, l.buf.String())
		}
	}
}

func snapshotOptions(dir string, log *slog.Logger) SnapshotOptions {
	return SnapshotOptions{Dir: dir, Logger: log, Interval: -1, Producer: "test", Store: store.Options{ValueLogBytes: 2 << 20}}
}

func openSnapshots(t testing.TB, o SnapshotOptions) *Snapshots {
	t.Helper()
	s, err := OpenSnapshots(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background(), nil) })
	return s
}

// kept is a snapshot of what e's stream holds, in dir.
func kept(t testing.TB, dir string, e *engine) {
	t.Helper()
	sn := openSnapshots(t, snapshotOptions(dir, quiet))
	ctx, cancel := context.WithCancel(t.Context())
	f, err := New(Options{Logger: quiet, Timing: quick, Workers: []WorkerSpec{e.spec("w")}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = f.Run(ctx) }()
	e.truth(f, "w/0", Live)
	if err := sn.Close(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-done
}

// TestWarmRestart: what was held is answered again at once, as restored; the
// publisher's word makes it live, and what it did meanwhile is in.
func TestWarmRestart(t *testing.T) {
	noLeaks(t)
	for _, c := range []struct {
		name  string
		while func(e *engine)
	}{
		{"nothing", func(e *engine) {}},
		{"goes on", func(e *engine) { e.churn(300) }},
		{"clears", func(e *engine) { e.clear(); e.store(3) }},
		{"restarts", func(e *engine) { e.restart(); e.store(1, 2) }},
		{"restarts and passes the number", func(e *engine) { e.restart(); e.churn(400) }},
		{"restarts and is silent", func(e *engine) { e.restart() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(t, zmqwire.PublisherConfig{})
			e.store(0, 1, 2)
			e.all()
			e.remove(1)
			e.churn(100)
			dir := t.TempDir()
			kept(t, dir, e)
			c.while(e)

			log := new(logBuffer)
			sn := openSnapshots(t, snapshotOptions(dir, log.logger()))
			f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}, Restore: func(key SetKey, worker string, rank int, view normalize.View, into *index.Stream) (Mark, bool) {
				m, ok := sn.Restore(key, worker, rank, view, into)
				if !ok {
					t.Error("not restored")
				}
				return m, ok
			}})
			e.truth(f, "w/0", Live)
			log.says(t, "snapshot loaded")
		})
	}
}

// all stores every block of the churn, parents first, so that no block of it
// ever waits for its parent.
func (e *engine) all() {
	for n := range 64 {
		e.store(chained + n)
	}
}

// TestOrphansStayBehind: a stream with blocks that waited for their parents
// comes back without them, and says so.
func TestOrphansStayBehind(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.store(1000, 1002) // without 1001
	dir := t.TempDir()
	kept(t, dir, e)
	sn := openSnapshots(t, snapshotOptions(dir, quiet))
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}, Restore: sn.Restore})
	e.truth(f, "w/0", Partial)
	if st := statusOf(f, "w/0"); st.LastError != "1 blocks that waited for their parents are not in the snapshot" {
		t.Errorf("it does not say why: %+v", st)
	}
}

// TestRestoredAnswers: before the publisher has been heard, the answers are the
// snapshot's and say so; and where it never is, they go.
func TestRestoredAnswers(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.store(0, 2, 1000, 1001, 1002)
	e.remove(1001)
	dir := t.TempDir()
	kept(t, dir, e)
	sn := openSnapshots(t, snapshotOptions(dir, quiet))
	timing := quick
	timing.RestoreGrace = 300 * time.Millisecond
	o := Options{Logger: quiet, Timing: timing, Workers: []WorkerSpec{e.spec("w")}, Restore: sn.Restore}
	e.events.Refuse(true) // the worker has gone
	e.replay.Refuse(true)
	e.events.Cut()
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if s := e.short(f, "w/0", Restored); s != "" {
		t.Error(s)
	}
	if r := f.Ready(); r.Settled != 0 || len(r.Waiting) != 1 || r.Waiting[0] != "w/0: restored" {
		t.Errorf("ready: %+v", r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = f.Run(ctx) }()
	defer func() { cancel(); <-done }()
	clear(e.held)
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); st.State == Restored {
			return "still restored"
		}
		return e.short(f, "w/0", statusOf(f, "w/0").State)
	})
	if st := statusOf(f, "w/0"); st.LastError == "" {
		t.Errorf("it does not say why: %+v", st)
	}
}

// TestRingPassedTheSnapshot: what cannot be confirmed begins again, and says
// what is missing.
func TestRingPassedTheSnapshot(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{RingSize: 20})
	e.store(0, 1, 2)
	dir := t.TempDir()
	kept(t, dir, e)
	e.churn(100)
	sn := openSnapshots(t, snapshotOptions(dir, quiet))
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}, Restore: sn.Restore})
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); st.State != Partial || st.Seq != e.seq-1 || st.Lost != e.seq-20 {
			return fmt.Sprintf("%+v, want partial at %d with %d lost", st, e.seq-1, e.seq-20)
		}
		return ""
	})
	e.clear()
	e.store(5)
	e.truth(f, "w/0", Live)
}

// TestOtherSettings: a stream comes back only where its blocks mean the same.
func TestOtherSettings(t *testing.T) {
	noLeaks(t)
	for name, change := range map[string]func(*WorkerSpec){
		"view":       func(w *WorkerSpec) { w.ExtraKeys = "bare_mm" },
		"eagle_drop": func(w *WorkerSpec) { w.EagleDrop = true },
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, zmqwire.PublisherConfig{})
			e.store(0, 1)
			dir := t.TempDir()
			kept(t, dir, e)
			log := new(logBuffer)
			sn := openSnapshots(t, snapshotOptions(dir, log.logger()))
			spec := e.spec("w")
			change(&spec)
			f := running(t, Options{Workers: []WorkerSpec{spec}, Restore: sn.Restore})
			log.says(t, "stream not restored, it starts cold")
			e.truth(f, "w/0", Live)
		})
	}
}

// TestDamagedSnapshot: the daemon comes up cold and says what was lost.
func TestDamagedSnapshot(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.churn(200)
	dir := t.TempDir()
	kept(t, dir, e)
	flipped := 0
	files, err := filepath.Glob(filepath.Join(dir, "db", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil || !(strings.HasSuffix(name, ".vlog") || strings.HasSuffix(name, ".sst")) {
			continue
		}
		for i := range min(len(b), 4<<10) {
			b[i] ^= 0x55
		}
		flipped++
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if flipped == 0 {
		t.Fatalf("nothing to damage among %v", files)
	}
	log := new(logBuffer)
	sn := openSnapshots(t, snapshotOptions(dir, log.logger()))
	log.says(t, "snapshot set aside, starting without one", "lost=\"generation 1")
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}, Restore: sn.Restore})
	e.truth(f, "w/0", Live)
	if w, err := sn.Write(t.Context(), f); err != nil || w.Streams != 1 {
		t.Errorf("the next snapshot: %+v, %v", w, err)
	}
}

// TestUnreadableContent: chunks that the store vouches for and nobody can read
// are damage too; those of another version are refused by name, and stay until
// the next snapshot.
func TestUnreadableContent(t *testing.T) {
	noLeaks(t)
	for _, c := range []struct {
		name    string
		version uint32
		chunks  map[store.ChunkKind][]byte
		says    []string
	}{
		{"a newer version", linesVersion + 1, nil, []string{"snapshot not restored", `\"kvindexd worker sets\" version 2`, "reads", "version 1"}},
		{"another kind", linesVersion, map[store.ChunkKind][]byte{99: {1}}, []string{"set aside", "chunk of kind 99"}},
		{"no JSON", linesVersion, map[store.ChunkKind][]byte{kindLine: []byte("{")}, []string{"set aside"}},
		{"no set", linesVersion, map[store.ChunkKind][]byte{kindIndex: {1, 'T', 1, 16, 0, 0}}, []string{"set aside", "a chunk before any worker set"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			st, err := store.Open(store.Options{Dir: dir, Logger: quiet})
			if err != nil {
				t.Fatal(err)
			}
			_, err = st.Write(t.Context(), store.Info{Content: contentName, ContentVersion: c.version, Producer: "kvindexd of tomorrow"}, func(w *store.Writer) error {
				for kind, b := range c.chunks {
					if err := w.Chunk(kind, b); err != nil {
						return err
					}
				}
				return nil
			})
			if err := errors.Join(err, st.Close()); err != nil {
				t.Fatal(err)
			}
			log := new(logBuffer)
			sn := openSnapshots(t, snapshotOptions(dir, log.logger()))
			log.says(t, c.says...)
			e := newEngine(t, zmqwire.PublisherConfig{})
			e.store(0)
			f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}, Restore: sn.Restore})
			e.truth(f, "w/0", Live)
			if _, err := sn.Write(t.Context(), f); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestFullDisk: a snapshot that finds no room fails aloud, answers go on, the
// old one stands, and the next one works once there is room.
func TestFullDisk(t *testing.T) {
	noLeaks(t)
	mnt := t.TempDir()
	if err := unix.Mount("tmpfs", mnt, "tmpfs", 0, "size=64m"); err != nil {
		t.Skipf("mounting a tmpfs needs root and the permission to mount: %v", err)
	}
	defer unix.Unmount(mnt, unix.MNT_DETACH)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.churn(100)
	log := new(logBuffer)
	o := snapshotOptions(filepath.Join(mnt, "snapshots"), log.logger())
	o.Store.ReserveBytes = 4 << 20
	sn := openSnapshots(t, o)
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.truth(f, "w/0", Live)
	first, err := sn.Write(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(mnt, "ballast")
	fill(t, ballast)
	for range 2 {
		if _, err := sn.Write(t.Context(), f); !errors.Is(err, store.ErrNoSpace) {
			t.Fatalf("on a full disk: %v", err)
		}
		e.churn(20)
		e.truth(f, "w/0", Live)
	}
	log.says(t, "snapshot failed", "not enough free disk space")
	if n := sn.m.failed.Load(); n != 2 {
		t.Errorf("%d failures counted", n)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	w, err := sn.Write(t.Context(), f)
	if err != nil || w.Generation <= first.Generation {
		t.Errorf("with room again: %+v, %v", w, err)
	}
	// A daemon that starts on a full disk comes up, and keeps trying.
	if err := sn.Close(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	fill(t, ballast)
	sn = openSnapshots(t, o)
	if _, err := sn.Write(t.Context(), f); !errors.Is(err, store.ErrNoSpace) {
		t.Errorf("started on a full disk: %v", err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if _, err := sn.Write(t.Context(), f); err != nil {
		t.Errorf("with room again: %v", err)
	}
	if err := sn.Close(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

func fill(t *testing.T, name string) {
	t.Helper()
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for page := make([]byte, 64<<10); ; {
		if _, err := file.Write(page); errors.Is(err, syscall.ENOSPC) {
			if page = page[:len(page)/2]; len(page) < 1024 {
				return
			}
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func TestSecondDaemon(t *testing.T) {
	noLeaks(t)
	dir := t.TempDir()
	openSnapshots(t, snapshotOptions(dir, quiet))
	if _, err := OpenSnapshots(t.Context(), snapshotOptions(dir, quiet)); !errors.Is(err, store.ErrLocked) {
		t.Errorf("a second daemon: %v", err)
	}
}

// TestForeignContentIsLeftAlone: content of another version outlives starts
// that end in a kill.
func TestForeignContentIsLeftAlone(t *testing.T) {
	noLeaks(t)
	dir := t.TempDir()
	st, err := store.Open(store.Options{Dir: dir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	_, err = st.Write(t.Context(), store.Info{Content: contentName, ContentVersion: linesVersion + 1}, func(w *store.Writer) error {
		return w.Chunk(kindLine, []byte("{}"))
	})
	if err := errors.Join(err, st.Close()); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		killed(t, dir, nil, 100*time.Millisecond, func() {})
	}
	log := new(logBuffer)
	openSnapshots(t, snapshotOptions(dir, log.logger()))
	log.says(t, "snapshot not restored", "version 2")
}

// TestNothingToKeep: a start that has heard nobody yet does not replace what an
// earlier one kept.
func TestNothingToKeep(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.store(0)
	dir := t.TempDir()
	kept(t, dir, e)
	for range 2 {
		log := new(logBuffer)
		sn := openSnapshots(t, snapshotOptions(dir, log.logger()))
		f := running(t, Options{})
		if _, err := sn.Write(t.Context(), f); !errors.Is(err, ErrNothingToKeep) {
			t.Errorf("an empty fleet: %v", err)
		}
		if err := sn.Close(t.Context(), f); err != nil {
			t.Error(err)
		}
		log.says(t, "snapshot loaded", "still wait for their workers")
	}
}

func TestNoStore(t *testing.T) {
	sn := openSnapshots(t, SnapshotOptions{Logger: quiet})
	if _, err := sn.Write(t.Context(), running(t, Options{})); !errors.Is(err, ErrNoStore) {
		t.Error(err)
	}
}

// TestClock: snapshots are written by the clock, with load on, and the metrics
// tell of them.
func TestClock(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	o := snapshotOptions(t.TempDir(), quiet)
	o.Interval = 5 * time.Millisecond
	sn := openSnapshots(t, o)
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); sn.Run(ctx, f) }()
	eventually(t, func() string {
		e.churn(10)
		if n := sn.m.snapshots.Load(); n < 5 {
			return fmt.Sprintf("%d snapshots", n)
		}
		return ""
	})
	cancel()
	<-done
	for _, name := range []string{"kvindexd_snapshot_age_seconds", "kvindexd_snapshot_written_total", "kvindexd_snapshot_duration_seconds", "kvindexd_snapshot_bytes"} {
		if metricOf(t, sn, name) <= 0 {
			t.Errorf("%s is 0", name)
		}
	}
}

// replica serves a fleet's dump over HTTP.
func replica(t testing.TB, f *Fleet) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/dump" || r.Header.Get("Authorization") != "Bearer t0ken" {
			http.Error(w, "no", http.StatusUnauthorized)
			return
		}
		if err := f.Dump(r.Context(), w, nil); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// TestPeer: a replica that joins has at once what its peer has, and confirms it
// by itself.
func TestPeer(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.all()
	e.churn(200)
	a := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.truth(a, "w/0", Live)
	log := new(logBuffer)
	o := SnapshotOptions{Logger: log.logger(), Peers: []string{deadPeer(t), silentPeer(t), emptyPeer(t), replica(t, a)},
		Peer: PeerOptions{Token: "t0ken", Connect: 50 * time.Millisecond}}
	sn := openSnapshots(t, o)
	b, err := New(Options{Logger: quiet, Timing: quick, Workers: []WorkerSpec{e.spec("w")}, Restore: sn.Restore})
	if err != nil {
		t.Fatal(err)
	}
	if s := e.short(b, "w/0", Restored); s != "" {
		t.Error(s)
	}
	log.says(t, "peer gives nothing", "refused", "the peer holds nothing", "peer's dump loaded")
	e.churn(50)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = b.Run(ctx) }()
	defer func() { cancel(); <-done }()
	e.truth(b, "w/0", Live)
}

func deadPeer(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "http://" + l.Addr().String()
}

// silentPeer takes connections and says nothing.
func silentPeer(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return "http://" + l.Addr().String()
}

func emptyPeer(t testing.TB) string {
	f, err := New(Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return replica(t, f)
}

// TestBadPeers: whatever a peer does, the start goes on.
func TestBadPeers(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.churn(100)
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.truth(f, "w/0", Live)
	var dump bytes.Buffer
	if err := f.Dump(t.Context(), &dump, nil); err != nil {
		t.Fatal(err)
	}
	whole := dump.String()
	if _, err := readDump("", strings.NewReader(whole), func() {}); err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(whole, "\n")
	for name, c := range map[string]struct {
		body  string
		stall bool
		says  string
	}{
		"cut short":     {body: strings.Join(lines[:len(lines)-2], ""), says: "cut short"},
		"cut in a line": {body: whole[:len(whole)/2], says: "unusable snapshot content"},
		"no format":     {body: strings.Join(lines[1:], ""), says: "does not begin with its format"},
		"newer":         {body: strings.Replace(whole, `"version":1`, `"version":7`, 1), says: "version 7, this program reads"},
		"a stream less": {body: strings.Replace(whole, `"streams":1`, `"streams":2`, 1), says: "should be 2 in 1"},
		"html":          {body: "<html>", says: "unusable snapshot content"},
		"endless line":  {body: lines[0] + `{"chunk":"` + strings.Repeat("A", 3<<20), says: "token too long"},
		"stalls":        {body: whole[:len(whole)/2], stall: true, says: "over"},
		"a bad chunk":   {body: lines[0] + lines[1] + `{"chunk":"AVQJ"}` + "\n", says: "unusable index chunk"},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.WriteString(w, c.body)
				_ = http.NewResponseController(w).Flush()
				if c.stall {
					<-r.Context().Done()
				}
			}))
			defer s.Close()
			log := new(logBuffer)
			sn := openSnapshots(t, SnapshotOptions{Logger: log.logger(), Peers: []string{s.URL}, Peer: PeerOptions{Budget: 500 * time.Millisecond}})
			log.says(t, "peer gives nothing", c.says)
			if sn.recovered.Load() != nil {
				t.Error("something was recovered")
			}
		})
	}
}

// TestNewerThanItsPeer: a fresh snapshot of one's own is used, an old one only
// where no peer has anything.
func TestNewerThanItsPeer(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	e.store(0, 1)
	dir := t.TempDir()
	kept(t, dir, e)
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.truth(f, "w/0", Live)
	from := func(stale time.Duration, peer string) string {
		o := snapshotOptions(dir, quiet)
		o.Stale, o.Peers = stale, []string{peer}
		o.Peer.Token = "t0ken"
		sn := openSnapshots(t, o)
		defer sn.Close(t.Context(), nil)
		return sn.recovered.Load().from
	}
	peer := replica(t, f)
	if got := from(time.Hour, peer); got != "snapshot" {
		t.Errorf("a fresh snapshot: from %s", got)
	}
	if got := from(time.Nanosecond, peer); got != peer {
		t.Errorf("an old snapshot: from %s", got)
	}
	if got := from(time.Nanosecond, deadPeer(t)); got != "snapshot" {
		t.Errorf("an old snapshot and a dead peer: from %s", got)
	}
}

// TestDumpHasNoSalt: nor tokens.
func TestDumpHasNoSalt(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	ev := e.storeEvent(0)
	ev.CacheSalt, ev.LoraName = []byte("s3cret-salt"), []byte("adapter-name")
	e.send(e.encode(ev))
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	eventually(t, func() string {
		if statusOf(f, "w/0").State != Live {
			return "not live"
		}
		return ""
	})
	var dump bytes.Buffer
	if err := f.Dump(t.Context(), &dump, nil); err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(dump.String()) {
		var in line
		if err := json.Unmarshal([]byte(l), &in); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(l, "s3cret") || bytes.Contains(in.Chunk, []byte("s3cret")) || bytes.Contains(in.Chunk, []byte("adapter")) {
			t.Errorf("in the dump: %s", l)
		}
	}
}

// TestCapturesTravel: a fleet that took another's dump answers every recorded
// question as that one does.
func TestCapturesTravel(t *testing.T) {
	paths, err := filepath.Glob("../testdata/captures/*.kvcap.zst")
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		path = strings.TrimSuffix(path, ".kvcap.zst")
		t.Run(filepath.Base(path), func(t *testing.T) { captureTravels(t, path) })
	}
}

func captureTravels(t *testing.T, path string) {
	r := openCapture(t, path)
	replies, err := ScanReplies(r)
	if err != nil {
		t.Fatal(err)
	}
	r = openCapture(t, path)
	off, err := NewOffline(r.Header(), replies, Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	var rec zmqwire.Record
	for {
		var cut *zmqwire.TruncatedError
		if err := r.Next(&rec); err == io.EOF || errors.As(err, &cut) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if err := off.Feed(&rec); err != nil {
			t.Fatal(err)
		}
	}
	var dump bytes.Buffer
	if err := off.Dump(t.Context(), &dump, nil); err != nil {
		t.Fatal(err)
	}
	got, err := readDump("", &dump, func() {})
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewOffline(r.Header(), Replies{}, Options{Logger: quiet, Restore: func(key SetKey, worker string, rank int, view normalize.View, into *index.Stream) (Mark, bool) {
		m, ok, err := got.restore(key, worker, rank, view, into)
		if err != nil {
			t.Error(err)
		}
		return m, ok
	}})
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	for _, q := range readQuestions(t, path) {
		one, two := match(t, off.Fleet, &q.Request), match(t, b.Fleet, &q.Request)
		for name, a := range one {
			if st := statusOf(off.Fleet, name); !st.HasSeq {
				continue
			}
			if diff := cmp.Diff(a.row, two[name].row); diff != "" {
				t.Fatalf("%s (-there +here):\n%s", name, diff)
			}
			asked++
		}
	}
	if asked == 0 {
		t.Error("nothing was asked")
	}
}

// The child of TestKillAtAnyInstant is a daemon's inside: it restores, follows
// its workers and writes snapshots one after the other until it is killed.
const snapshotChild = "KVINDEXD_TEST_SNAPSHOTS"

func init() {
	dir := os.Getenv(snapshotChild)
	if dir == "" {
		return
	}
	err := snapshotEndlessly(dir, os.Args[1])
	fmt.Fprintln(os.Stderr, err)
	os.Exit(3)
}

func snapshotEndlessly(dir, workers string) error {
	var specs []WorkerSpec
	if err := json.Unmarshal([]byte(workers), &specs); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	sn, err := OpenSnapshots(context.Background(), snapshotOptions(dir, log))
	if err != nil {
		return err
	}
	f, err := New(Options{Logger: quiet, Timing: quick, Workers: specs, Restore: sn.Restore})
	if err != nil {
		return err
	}
	go func() { _ = f.Run(context.Background()) }()
	fmt.Println("up")
	for {
		w, err := sn.Write(context.Background(), f)
		switch {
		case errors.Is(err, ErrNothingToKeep):
		case err != nil:
			return err
		default:
			fmt.Println("done", w.Generation)
		}
	}
}

// chronicle is what an engine held after each batch: block chained+i is bit i.
type chronicle map[uint64]uint64

func (c chronicle) churn(e *engine, n int) {
	for range n {
		b := chained + rand.IntN(64)
		if e.held[b] {
			e.remove(b)
		} else {
			e.store(b)
		}
		mask := uint64(0)
		for n := range e.held {
			mask |= 1 << (n - chained)
		}
		c[e.seq-1] = mask
	}
}

// TestKillAtAnyInstant: whatever the moment of a kill -9 under load, the next
// start restores the newest whole snapshot, and each stream in it is exactly
// what its worker held at the number that it names.
func TestKillAtAnyInstant(t *testing.T) {
	noLeaks(t)
	kills := 10
	if os.Getenv("KVINDEXD_LONG") == "1" {
		kills = 220
	}
	dir := t.TempDir()
	engines := []*engine{newEngine(t, zmqwire.PublisherConfig{RingSize: 1 << 20}), newEngine(t, zmqwire.PublisherConfig{RingSize: 1 << 20})}
	told := []chronicle{{}, {}}
	var specs []WorkerSpec
	for i, e := range engines {
		e.all()
		told[i].churn(e, 200)
		specs = append(specs, e.spec(fmt.Sprint("w", i)))
	}
	last, restored := uint64(0), 0
	for k := range kills {
		done := killed(t, dir, specs, time.Duration(rand.Int64N(int64(400*time.Millisecond))), func() {
			for i, e := range engines {
				told[i].churn(e, 2)
			}
		})
		last = max(last, done)
		log := new(logBuffer)
		sn, err := OpenSnapshots(t.Context(), snapshotOptions(dir, log.logger()))
		if err != nil {
			t.Fatalf("kill %d: %v", k, err)
		}
		info, ok := sn.store.Info()
		if ok != (info.Generation > 0) || info.Generation < last {
			t.Fatalf("kill %d: generation %d, and %d was written", k, info.Generation, last)
		}
		last = max(last, info.Generation)
		for _, bad := range []string{"set aside", "not restored", "level=ERROR"} {
			if strings.Contains(log.buf.String(), bad) {
				t.Fatalf("kill %d:\n%s", k, log.buf.String())
			}
		}
		if ok {
			f, err := New(Options{Logger: quiet, Timing: quick, Workers: specs, Restore: sn.Restore})
			if err != nil {
				t.Fatal(err)
			}
			for i := range engines {
				if told[i].check(t, f, fmt.Sprintf("w%d/0", i)) {
					restored++
				}
			}
		}
		if err := sn.Close(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d kills, %d generations, %d streams restored", kills, last, restored)
	if restored == 0 {
		t.Error("nothing was ever restored")
	}
}

// check holds a restored stream against the chronicle; false: the snapshot was
// taken before its first batch.
func (c chronicle) check(t *testing.T, f *Fleet, stream string) bool {
	t.Helper()
	st := statusOf(f, stream)
	if !st.HasSeq {
		return false
	}
	mask, ok := c[st.Seq]
	if st.State != Restored || !ok {
		t.Fatalf("%s: %+v, which never was", stream, st)
	}
	for n := range 64 {
		var tokens []uint32
		want, unbroken := 0, true
		for _, p := range (block{0, chained + n}).path() {
			tokens = append(tokens, p.tokens()...)
			if unbroken = unbroken && mask>>(p.n-chained)&1 == 1; unbroken {
				want += 4
			}
		}
		if got := device(t, f, "m", stream, tokens...); got != want {
			t.Fatalf("%s at %d: block %d: %d tokens, want %d", stream, st.Seq, n, got, want)
		}
	}
	return true
}

// killed runs the child with load on and kills it; it returns the newest
// generation that it said was written.
func killed(t *testing.T, dir string, specs []WorkerSpec, after time.Duration, load func()) (done uint64) {
	t.Helper()
	raw, err := json.Marshal(specs)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], string(raw))
	cmd.Env = append(os.Environ(), snapshotChild+"="+dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for in := bufio.NewScanner(out); in.Scan(); {
			_, _ = fmt.Sscanf(in.Text(), "done %d", &done)
		}
	}()
	timer := time.NewTimer(after)
	defer timer.Stop()
	pause := time.NewTicker(2 * time.Millisecond)
	defer pause.Stop()
	for loaded := true; loaded; {
		select {
		case <-timer.C:
			_ = cmd.Process.Kill()
			loaded = false
		case <-ended:
			loaded = false
		case <-time.After(wiretest.Patience):
			t.Fatal("nothing happens")
		case <-pause.C:
			load()
		}
	}
	<-ended
	_ = cmd.Wait()
	if cmd.ProcessState.Exited() {
		t.Fatalf("the child ended by itself: %s", &stderr)
	}
	return done
}

// metricOf returns a metric without labels.
func metricOf(t testing.TB, c prometheus.Collector, name string) float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	if err := reg.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, fam := range families {
		if m := fam.GetMetric()[0]; fam.GetName() == name {
			return m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return 0
}
