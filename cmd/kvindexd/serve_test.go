package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// testWorker is a simulated engine that a daemon can follow.
func testWorker(t *testing.T) (*simEngine, fleet.WorkerSpec) {
	t.Helper()
	pub, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pub.Close() })
	spec := fleet.WorkerSpec{ID: "w", Model: "m", Endpoint: pub.Addr(), ReplayEndpoint: pub.ReplayAddr()}
	return newSimEngine(pub, 16, 4096, zmqwire.EncodeOptions{Maps: true}), spec
}

func flagOf(s fleet.WorkerSpec) string {
	return fmt.Sprintf("id=%s,model=%s,endpoint=%s,replay_endpoint=%s", s.ID, s.Model, s.Endpoint, s.ReplayEndpoint)
}

// holds waits until the daemon says that the worker holds so much of a prompt.
func (s *served) holds(p *simPrompt, tokens int) {
	s.t.Helper()
	eventually(s.t, func() error {
		a, err := s.client.Match(s.t.Context(), requestOf(p, "m"))
		if err != nil {
			return err
		}
		held := 0
		if len(a.Workers) > 0 {
			held = a.Workers[0].Device
		}
		if held != tokens {
			return fmt.Errorf("%+v, want %d tokens", a.Workers, tokens)
		}
		return nil
	})
}

// SIGTERM: what is being answered is answered, then the process ends with 0.
func TestSIGTERM(t *testing.T) {
	e, spec := testWorker(t)
	p := &simPrompt{Tokens: make([]uint32, 64)}
	if _, err := e.serve(p); err != nil {
		t.Fatal(err)
	}
	s := serveProcess(t, "--worker", flagOf(spec))
	s.holds(p, 64)

	// A request whose body is still coming when the signal does.
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.address, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := `{"model":"m","token_ids":[0,0,0,0]}`
	fmt.Fprintf(conn, "POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\nExpect: 100-continue\r\n\r\n", len(body))
	first := make([]byte, 25)
	if _, err := io.ReadFull(conn, first); err != nil || !strings.Contains(string(first), "100 Continue") {
		t.Fatalf("%q %v", first, err) // its handler is reading now
	}
	s.stop()
	eventually(t, func() error { // nobody else gets in any more
		c, err := net.DialTimeout("tcp", strings.TrimPrefix(s.address, "http://"), time.Second)
		if err == nil {
			c.Close()
			return errNotYet
		}
		return nil
	})
	if _, err := io.WriteString(conn, body); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.Contains(string(answer), "200 OK") {
		t.Errorf("the request in flight: %q %v", answer, err)
	}
	if code := s.exit(); code != exitOK {
		t.Errorf("exit code %d\n%s", code, s.log)
	}
	s.log.wait(t, "stopped")
}

// kill -9: registrations survive, and the index heals from the replay ring.
func TestKill9(t *testing.T) {
	dir := t.TempDir()
	e, spec := testWorker(t)
	s := serveProcess(t, "--state-dir", dir)
	if err := s.client.PutWorker(t.Context(), spec.ID, spec); err != nil {
		t.Fatal(err)
	}
	p := &simPrompt{Tokens: make([]uint32, 64)}
	if _, err := e.serve(p); err != nil {
		t.Fatal(err)
	}
	s.holds(p, 64)
	if err := s.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.exit()
	more := &simPrompt{Tokens: append(make([]uint32, 64), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)}
	if _, err := e.serve(more); err != nil { // while the daemon is away
		t.Fatal(err)
	}
	again := serveProcess(t, "--state-dir", dir)
	again.holds(more, 80)
}

// A changed file is in force without anyone's help.
func TestConfigReload(t *testing.T) {
	e, spec := testWorker(t)
	p := &simPrompt{Tokens: make([]uint32, 32)}
	if _, err := e.serve(p); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "workers.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(config+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(config+".new", config); err != nil {
			t.Fatal(err)
		}
	}
	write("workers: []\n")
	s := serveHere(t, "--config", config)
	write(fmt.Sprintf("workers:\n  - {id: w, model: m, endpoint: %q, replay_endpoint: %q}\n", spec.Endpoint, spec.ReplayEndpoint))
	s.holds(p, 32)
	write("workers: []\n")
	eventually(t, func() error {
		l, err := s.fleetView()
		if err == nil && len(l.Workers) > 0 {
			err = errNotYet
		}
		return err
	})
}

// Readiness waits for workers, the listener does not; tokens guard.
func TestReadinessAndTokens(t *testing.T) {
	e, spec := testWorker(t)
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("# ours\nsesame\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serveHere(t, "--min-workers", "1", "--auth-token-file", tokens, "--listen", "0.0.0.0:0")
	address := strings.Replace(s.address, "[::]", "127.0.0.1", 1)
	status := func(path string) int {
		t.Helper()
		r, err := http.Get(address + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		return r.StatusCode
	}
	if a, b, c := status("/healthz"), status("/readyz"), status("/v1/workers"); a != 200 || b != 503 || c != 401 {
		t.Errorf("healthz %d readyz %d workers %d, want 200 503 401", a, b, c)
	}
	code, _, errs := runs(t, "workers", "--server", address)
	if code != exitFailed || !strings.Contains(errs, "401") {
		t.Errorf("without a token: %d %s", code, errs)
	}
	if out := mustRun(t, "workers", "--server", address, "--token-file", tokens); out != "no workers\n" {
		t.Errorf("with the token: %q", out)
	}
	c, err := (&askOptions{server: address, tokenFile: tokens}).connect()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.PutWorker(t.Context(), spec.ID, spec); err != nil {
		t.Fatal(err)
	}
	if _, err := e.serve(&simPrompt{Tokens: make([]uint32, 16)}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if status("/readyz") != 200 {
			return errNotYet
		}
		return nil
	})
	out := mustRun(t, "workers", "--server", address, "--token-file", tokens)
	if !strings.Contains(out, spec.Endpoint) || !strings.Contains(out, "live") {
		t.Error(out)
	}
	if out := mustRun(t, "models", "--server", address, "--token-file", tokens); !strings.Contains(out, "text only") {
		t.Error(out)
	}
}

// Two daemons on one address: the second says so.
func TestAddressInUse(t *testing.T) {
	s := serveHere(t)
	code, _, errs := runs(t, "serve", "--listen", strings.TrimPrefix(s.address, "http://"))
	if code != exitFailed || !strings.Contains(errs, "is in use") {
		t.Errorf("exit code %d: %s", code, errs)
	}
}

// Batches that are written by hand, odd ones among them.
func TestPublishFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events.jsonl")
	events := `{"events":[{"type":"BlockStored","block_hashes":[1,2],"parent_block_hash":null,"token_ids":[1,2,3,4,5,6,7,8],"block_size":4,"lora_id":null,"medium":"GPU"},{"type":"Odd"}]}
[1.5,[["BlockStored",[18446744073709551615],2,[9,10,11,12],4,null,"GPU"],["BlockRemoved",[1],"GPU"]],null]
`
	if err := os.WriteFile(file, []byte(events), 0o600); err != nil {
		t.Fatal(err)
	}
	b := startInBackground(t, "publish", file, "--endpoint", "tcp://127.0.0.1:*", "--replay-endpoint", "tcp://127.0.0.1:*")
	var endpoint, replay string
	eventually(t, func() error {
		_, err := fmt.Sscanf(b.out.String(), "rank 0: events %s replays %s", &endpoint, &replay)
		return err
	})
	s := serveHere(t, "--worker", fmt.Sprintf("id=w,model=m,endpoint=%s,replay_endpoint=%s", strings.TrimSuffix(endpoint, ","), replay))
	eventually(t, func() error {
		l, err := s.fleetView()
		if err != nil || len(l.Workers) == 0 || len(l.Workers[0].Ranks) == 0 {
			return errors.Join(err, errNotYet)
		}
		if r := l.Workers[0].Ranks[0]; r.Seq == nil || *r.Seq != 1 || r.Resident.Device != 2 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	out := mustRun(t, "explain", "--server", s.address, "--tokens", "1,2,3,4,5,6,7,8")
	if !strings.Contains(out, "device 0") || !strings.Contains(out, "ends at block 0") {
		t.Error(out)
	}
}

// Prompts that a simulated engine wrote are questions that match takes.
func TestPublishWorkload(t *testing.T) {
	prompts := filepath.Join(t.TempDir(), "prompts.jsonl")
	for _, form := range [][]string{{"--format", "map"}, {"--format", "array", "--hashes", "bytes"}} {
		args := append([]string{"publish", "--endpoint", "tcp://127.0.0.1:*", "--replay-endpoint", "tcp://127.0.0.1:*", "--rate", "0", "--count", "20",
			"--images", "0.5", "--model", "m", "--prompts-out", prompts}, form...)
		b := startInBackground(t, args...)
		var endpoint, replay string
		eventually(t, func() error {
			if !strings.Contains(b.out.String(), "prompts served") {
				return errNotYet
			}
			_, err := fmt.Sscanf(b.out.String(), "rank 0: events %s replays %s", &endpoint, &replay)
			return err
		})
		s := serveHere(t, "--worker", fmt.Sprintf("id=w,model=m,endpoint=%s,replay_endpoint=%s,image_token_id=151655", strings.TrimSuffix(endpoint, ","), replay))
		eventually(t, func() error {
			out := mustRun(t, "match", "--server", s.address, "--file", prompts, "--mm", "exact")
			if n := strings.Count(out, "best: w"); n != 20 {
				return fmt.Errorf("%d of 20 prompts are held\n%s", n, out)
			}
			return nil
		})
		b.cancel()
		if code := b.wait(t); code != exitOK {
			t.Errorf("exit code %d: %s", code, b.stderr())
		}
	}
}
