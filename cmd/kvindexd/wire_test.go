package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// Each capture goes over real sockets into a daemon, and the daemon gives
// vLLM's answers over real HTTP, at every question's own moment.
func TestCapturesOverZeroMQ(t *testing.T) {
	for _, name := range captures(t) {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && name != "gaps" && name != "everything" {
				t.Skip("short: gaps and everything stand for the others")
			}
			overZeroMQ(t, name)
		})
	}
}

// wirePlay publishes a capture record by record. Beside it the same capture is
// fed to an offline fleet, which tells where the recorded daemon stood: while a
// gap is open there, the daemon under test is ahead, since the replay ring has
// at once what the capture has later.
type wirePlay struct {
	t       *testing.T
	served  *served
	rep     *republisher
	offline *fleet.Offline
	checker *checker
	asked   int
	ahead   int
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Helper()
	w.t.Logf("%s", p)
	return len(p), nil
}

func overZeroMQ(t *testing.T, name string) {
	quiet := slog.New(slog.DiscardHandler)
	c := &captureFile{name: capturePath(name)}
	rep, err := newRepublisher(quiet, c, &republishOptions{endpoint: "tcp://127.0.0.1:*", wait: patience, ring: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(rep.close)
	config := filepath.Join(t.TempDir(), "workers.yaml")
	if err := rep.writeConfig(config); err != nil {
		t.Fatal(err)
	}
	p := &wirePlay{t: t, rep: rep, served: serveHere(t, "--config", config, "--idle-probe", "20ms")}
	replies, err := c.replies()
	if err != nil {
		t.Fatal(err)
	}
	if p.offline, err = fleet.NewOffline(rep.header, replies, fleet.Options{Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	p.checker = newChecker(p.served.client, rep.header.Streams, testWriter{t})
	if err := rep.waitSubscribers(t.Context(), patience); err != nil {
		t.Fatal(err)
	}
	questions, err := readQuestions(queriesPath(name))
	if err != nil {
		t.Fatal(err)
	}
	p.play(c, questions)
	if p.checker.tally.Differ > 0 {
		t.Errorf("%v", p.checker.tally)
	}
	if p.asked < len(questions)/2 {
		t.Errorf("%d questions put, %d left out while a gap was open: too few", p.asked, p.ahead)
	}
	t.Logf("%d questions put, %d left out while a gap was open; %v", p.asked, p.ahead, p.checker.tally)
}

func (p *wirePlay) play(c *captureFile, questions []question) {
	p.t.Helper()
	n := 0
	err := c.read(func(r *zmqwire.CaptureReader) error {
		return each(r, p.t.Logf, func(rec *zmqwire.Record) error {
			if err := p.rep.feed(p.t.Context(), rec); err != nil {
				return err
			}
			if err := p.offline.Feed(rec); err != nil {
				return err
			}
			for n++; len(questions) > 0 && questions[0].After <= n; questions = questions[1:] {
				if err := p.ask(&questions[0]); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// ask puts a question when the daemon stands where the capture does.
func (p *wirePlay) ask(q *question) error {
	p.t.Helper()
	for _, s := range p.offline.Positions() {
		next := p.rep.streams[s.Stream].place.next
		if s.Status.HasSeq && s.Status.Seq+1 != next || !s.Status.HasSeq && next > 0 {
			p.ahead++
			return nil
		}
	}
	eventually(p.t, p.behind)
	p.asked++
	return p.checker.ask(p.t.Context(), q)
}

// behind says which stream the daemon has not followed to its end.
func (p *wirePlay) behind() error {
	l, err := p.served.fleetView()
	if err != nil {
		return err
	}
	seen := map[string]*uint64{}
	state, fault := map[string]string{}, map[string]string{}
	for _, w := range l.Workers {
		for _, r := range w.Ranks {
			name := fmt.Sprintf("%s/%d", w.ID, r.Rank)
			seen[name], state[name], fault[name] = r.Seq, r.State, r.LastError
		}
	}
	for name, s := range p.rep.streams {
		if s.place.next == 0 {
			continue
		}
		if at := seen[name]; at == nil || *at != s.place.next-1 || state[name] != "live" {
			return fmt.Errorf("%s: published up to %d, the daemon is at %s, %s (%s)", name, s.place.next-1, optional(at), state[name], fault[name])
		}
	}
	return nil
}

// The command itself, from its arguments on: replay --to, serve, match.
func TestReplayToServe(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "workers.yaml")
	startCommand(t, "STREAM", "replay", capturePath("text"), "--to", "ipc://"+dir+"/{stream}", "--write-config", config, "--hold")
	s := serveHere(t, "--config", config)
	q, err := readQuestions(queriesPath("text"))
	if err != nil {
		t.Fatal(err)
	}
	last := q[len(q)-1]
	want := mustRun(t, "match", "--json", "--include", "zero", "--tokens", tokensOf(t, &last), "--server",
		startCommand(t, "serving on", "replay", capturePath("text"), "--serve", "127.0.0.1:0"))
	eventually(t, func() error {
		got := mustRun(t, "match", "--json", "--include", "zero", "--tokens", tokensOf(t, &last), "--server", s.address)
		if diff := cmp.Diff(figures(t, want), figures(t, got)); diff != "" {
			return fmt.Errorf("the daemon and the replay differ: %s", diff)
		}
		return nil
	})
}

// figures are the rows of an answer without what time and transport change.
func figures(t testing.TB, answer string) any {
	t.Helper()
	var a struct {
		Workers []struct {
			Worker       string
			Device, Host int
			Usable       int `json:"usable_tokens"`
			State        string
			Seq          uint64
		}
	}
	if err := json.Unmarshal([]byte(answer), &a); err != nil {
		t.Fatal(err)
	}
	return a.Workers
}

// A real libzmq publisher with vLLM's structs, in each form: what the daemon
// promises is what the engine then finds in its cache.
func TestLibzmqEngine(t *testing.T) {
	wiretest.Interpreter(t, "zmq", "msgspec")
	const image = 151655
	s := serveHere(t)
	load := newSimWorkload(3, 4, 96, 160, 0.5, image)
	type engine struct {
		*wiretest.Process
		id      string
		batches uint64
	}
	var engines []*engine
	for i, form := range [][]string{{"map", "bytes", "16"}, {"map", "int", "32"}, {"array", "int", "16"}, {"array", "bytes", "16"}} {
		e := &engine{Process: wiretest.Python(t, "testdata/engine.py", form...), id: fmt.Sprintf("vllm-%d", i)}
		var events, replay string
		if _, err := fmt.Sscanf(e.Line(), "ready %s %s", &events, &replay); err != nil {
			t.Fatal(err)
		}
		id := uint32(image)
		spec := fleet.WorkerSpec{ID: e.id, Model: "vl", Endpoint: events, ReplayEndpoint: replay, ImageTokenID: &id}
		if err := s.client.PutWorker(t.Context(), e.id, spec); err != nil {
			t.Fatal(err)
		}
		engines = append(engines, e)
	}
	order := func(e *engine, v any) (n int) {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(e.Ask("%s", b), &n, &e.batches); err != nil {
			t.Fatal(err)
		}
		return n
	}
	settle := func() {
		eventually(t, func() error {
			l, err := s.fleetView()
			if err != nil {
				return err
			}
			for i, w := range l.Workers {
				if r := w.Ranks[0]; engines[i].batches > 0 && (r.State != "live" || r.Seq == nil || *r.Seq+1 != engines[i].batches) {
					return fmt.Errorf("%s: %s at %s of %d (%s)", w.ID, r.State, optional(r.Seq), engines[i].batches, r.LastError)
				}
			}
			return nil
		})
	}
	compared := 0
	for n := range 60 {
		p := load.next()
		switch n % 4 {
		case 1:
			p.Salt = "tenant"
		case 2:
			p.Lora = "sql"
		}
		e := engines[n%len(engines)]
		if n > 8 && n%11 == 0 {
			order(e, map[string]any{"evict": 5})
		}
		settle()
		r := requestOf(p, "vl")
		r.Workers, r.Include, r.MM = []string{e.id}, []string{"zero"}, "exact"
		predicted := 0
		if a, err := s.client.Match(t.Context(), r); err != nil {
			t.Fatal(err)
		} else if len(a.Workers) == 1 && a.Workers[0].UsableTokens != nil {
			predicted = *a.Workers[0].UsableTokens
		}
		cached := order(e, map[string]any{"serve": map[string]any{"tokens": p.Tokens, "images": p.pythonImages(), "lora": p.Lora, "salt": p.Salt}})
		if predicted != cached {
			t.Errorf("prompt %d on %s: predicted %d, the engine found %d", n, e.id, predicted, cached)
		}
		if cached > 0 {
			compared++
		}
	}
	if compared < 10 {
		t.Errorf("only %d prompts had anything cached: this compares nothing", compared)
	}
}

func (p *simPrompt) pythonImages() []map[string]any {
	out := []map[string]any{}
	for _, m := range p.Images {
		out = append(out, map[string]any{"offset": m.Offset, "length": m.Length, "identifier": m.Identifier})
	}
	return out
}

// What record writes, replay reads: the same answers as from the daemon that
// listened at the same time.
func TestRecordReplay(t *testing.T) {
	dir := t.TempDir()
	pub, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*"})
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	e := newSimEngine(pub, 16, 4096, zmqwire.EncodeOptions{Maps: true})
	load := newSimWorkload(5, 2, 64, 128, 0, 0)
	var prompts []*simPrompt
	serve := func(n int) {
		for range n {
			p := load.next()
			if _, err := e.serve(p); err != nil {
				t.Fatal(err)
			}
			prompts = append(prompts, p)
		}
	}
	serve(5) // before anybody listens: only the ring has these
	file := filepath.Join(dir, "out.kvcap.zst")
	worker := fmt.Sprintf("id=w,model=m,endpoint=%s,replay_endpoint=%s", pub.Addr(), pub.ReplayAddr())
	recording := startInBackground(t, "record", "-o", file, "--replay", "--worker", worker, "--messages", "10")
	if err := pub.WaitSubscribers(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { // the ring has been asked for
		if pub.Stats().Replays == 0 {
			return errNotYet
		}
		return nil
	})
	serve(10)
	if code := recording.wait(t); code != exitOK {
		t.Fatalf("record: exit code %d: %s", code, recording.stderr())
	}
	address := startCommand(t, "serving on", "replay", file, "--serve", "127.0.0.1:0")
	for i, p := range prompts {
		raw, err := json.Marshal(p.Tokens)
		if err != nil {
			t.Fatal(err)
		}
		var a struct {
			Workers []struct{ Device int }
		}
		out := mustRun(t, "match", "--json", "--server", address, "--tokens", string(raw))
		if err := json.Unmarshal([]byte(out), &a); err != nil || len(a.Workers) != 1 || a.Workers[0].Device != 128 {
			t.Errorf("prompt %d: %s", i, out)
		}
	}
	// And an existing recording is not overwritten.
	code, _, errs := runs(t, "record", "-o", file, "--worker", worker)
	if code != exitUsage {
		t.Errorf("over an existing file: exit code %d: %s", code, errs)
	}
}
