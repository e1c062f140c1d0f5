package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// A daemon that was told to stop comes back with what it held, although the
// worker's replay ring has long forgotten it.
func TestWarmRestart(t *testing.T) {
	pub, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*", RingSize: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	e := newSimEngine(pub, 16, 4096, zmqwire.EncodeOptions{Maps: true})
	worker := flagOf(fleet.WorkerSpec{ID: "w", Model: "m", Endpoint: pub.Addr(), ReplayEndpoint: pub.ReplayAddr()})
	load := newSimWorkload(1, 2, 64, 128, 0, 0)
	state := t.TempDir()

	s := serveProcess(t, "--state-dir", state, "--worker", worker)
	if err := pub.WaitSubscribers(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var prompts []*simPrompt
	for range 5 {
		p := load.next()
		if _, err := e.serve(p); err != nil {
			t.Fatal(err)
		}
		prompts = append(prompts, p)
		s.holds(p, 128) // one by one: the ring holds one batch only
	}

	snapshots := filepath.Join(state, "snapshots")
	code, _, errs := runs(t, "snapshot", "verify", snapshots)
	if code != exitFailed || !strings.Contains(errs, "stop that first") {
		t.Errorf("while a daemon has it: exit code %d, %s", code, errs)
	}
	code, _, errs = runs(t, "serve", "--listen", "127.0.0.1:0", "--state-dir", state)
	if code != exitFailed || !strings.Contains(errs, "in use") {
		t.Errorf("a second daemon: exit code %d, %s", code, errs)
	}
	s.stop()
	if code := s.exit(); code != exitOK {
		t.Fatalf("exit code %d\n%s", code, s.log)
	}

	out := mustRun(t, "snapshot", "verify", snapshots)
	if !strings.Contains(out, "kvindexd worker sets") || !strings.Contains(out, "closed cleanly  true") {
		t.Error(out)
	}
	exported, imported := filepath.Join(t.TempDir(), "picture.kvsnap"), filepath.Join(t.TempDir(), "snapshots")
	mustRun(t, "snapshot", "export", snapshots, "-o", exported)
	mustRun(t, "snapshot", "import", imported, exported)
	if out := mustRun(t, "snapshot", "inspect", imported, "--json"); !strings.Contains(out, `"Empty": false`) {
		t.Error(out)
	}

	for _, dir := range []string{snapshots, imported} {
		again := serveProcess(t, "--snapshot-dir", dir, "--worker", worker)
		for _, p := range prompts {
			again.holds(p, 128)
		}
		again.stop()
		if code := again.exit(); code != exitOK {
			t.Errorf("exit code %d\n%s", code, again.log)
		}
	}

	cold := serveProcess(t, "--snapshot-dir", "none", "--state-dir", state, "--worker", worker)
	cold.holds(prompts[4], 0)
}

// A wounded directory is set aside, and the daemon is up.
func TestDamagedSnapshot(t *testing.T) {
	state := t.TempDir()
	e, spec := testWorker(t)
	load := newSimWorkload(1, 2, 64, 640, 0, 0) // enough for the value log
	var p *simPrompt
	for range 50 {
		p = load.next()
		if _, err := e.serve(p); err != nil {
			t.Fatal(err)
		}
	}
	s := serveProcess(t, "--state-dir", state, "--worker", flagOf(spec))
	s.holds(p, 640)
	s.stop()
	s.exit()
	logs, err := filepath.Glob(filepath.Join(state, "snapshots", "db", "*.vlog"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("no value logs: %v", err)
	}
	for _, f := range logs {
		if err := os.Truncate(f, 100); err != nil {
			t.Fatal(err)
		}
	}
	code, _, errs := runs(t, "snapshot", "verify", filepath.Join(state, "snapshots"))
	if code != exitFailed || !strings.Contains(errs, "damaged") {
		t.Errorf("verify: exit code %d, %s", code, errs)
	}
	again := serveProcess(t, "--state-dir", state, "--worker", flagOf(spec))
	again.holds(p, 640)
}
