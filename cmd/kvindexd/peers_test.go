package main

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// A peer that was registered over HTTP is asked at the next start, by a replica
// that has no snapshot; what it gives is confirmed by the worker.
func TestRegisteredPeerIsAskedAtTheNextStart(t *testing.T) {
	pub, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*", RingSize: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	e := newSimEngine(pub, 16, 4096, zmqwire.EncodeOptions{Maps: true})
	worker := flagOf(fleet.WorkerSpec{ID: "w", Model: "m", Endpoint: pub.Addr(), ReplayEndpoint: pub.ReplayAddr()})
	load := newSimWorkload(1, 2, 64, 128, 0, 0)

	one := serveHere(t, "--worker", worker)
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
		one.holds(p, 128) // one by one: the ring holds one batch only
	}

	state := t.TempDir()
	two := serveProcess(t, "--state-dir", state)
	r, err := http.Post(two.address+"/register_peer", "application/json", strings.NewReader(`{"url":"`+one.address+`"}`))
	if err != nil || r.StatusCode != http.StatusCreated {
		t.Fatalf("%+v, %v", r, err)
	}
	r.Body.Close()
	two.stop()
	if code := two.exit(); code != exitOK {
		t.Fatalf("exit code %d\n%s", code, two.log)
	}

	two = serveProcess(t, "--state-dir", state, "--worker", worker)
	two.log.wait(t, "peer's dump loaded")
	for _, p := range prompts {
		two.holds(p, 128)
	}
}

func TestDamagedPeersFile(t *testing.T) {
	state := t.TempDir()
	if err := os.WriteFile(filepath.Join(state, peersFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serveHere(t, "--state-dir", state)
	s.log.wait(t, "registered peers lost")
}
