package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

const goodConfig = `
models:
  - name: Qwen/Qwen2-VL-7B-Instruct
    aliases: [qwen-vl]
    image_token_id: 151655
    video_token_id: 151656
    tower_connector_lora: false
    block_size: 16
    loras:
      - {name: sql-adapter, aliases: [sql]}
workers:
  - id: vllm-0
    model: Qwen/Qwen2-VL-7B-Instruct
    namespace: default
    role: aggregated
    endpoint: tcp://10.0.0.5:5557
    replay_endpoint: tcp://10.0.0.5:5657
    topic: ""
    dp_size: 2
    exact_mm: true
    extra_keys: native
    eagle_drop: false
    on_gap: keep
  - id: vllm-1
    model: Qwen/Qwen2-VL-7B-Instruct
    endpoint: tcp://10.0.0.6:5557
    rank_index: 3
`

func TestParseConfig(t *testing.T) {
	c, err := ParseConfig("w.yaml", []byte(goodConfig), EndpointDefaults{})
	if err != nil {
		t.Fatal(err)
	}
	id, video, no, three := uint32(151655), uint32(151656), false, 3
	want := Config{
		Models: []ModelSpec{{
			Name: "Qwen/Qwen2-VL-7B-Instruct", Aliases: []string{"qwen-vl"}, ImageTokenID: &id, VideoTokenID: &video,
			TowerConnectorLora: &no, BlockSize: 16, Loras: []LoraSpec{{Name: "sql-adapter", Aliases: []string{"sql"}}},
		}},
		Workers: []WorkerSpec{{
			ID: "vllm-0", Model: "Qwen/Qwen2-VL-7B-Instruct", Namespace: "default", Role: "aggregated",
			Endpoint: "tcp://10.0.0.5:5557", ReplayEndpoint: "tcp://10.0.0.5:5657", DPSize: 2,
			ExactMM: true, ExtraKeys: "native", OnGap: "keep",
		}, {ID: "vllm-1", Model: "Qwen/Qwen2-VL-7B-Instruct", Endpoint: "tcp://10.0.0.6:5557", RankIndex: &three}},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
	asJSON := `{"workers": [{"id": "a", "model": "m", "endpoint": "tcp://h:1"}]}`
	if c, err := ParseConfig("w.json", []byte(asJSON), EndpointDefaults{}); err != nil || len(c.Workers) != 1 || c.Workers[0].ID != "a" {
		t.Errorf("JSON: %+v, %v", c, err)
	}
	if c, err := ParseConfig("empty", nil, EndpointDefaults{}); err != nil || len(c.Workers) != 0 {
		t.Errorf("empty: %+v, %v", c, err)
	}
}

// TestConfigErrors: each error says where and what.
func TestConfigErrors(t *testing.T) {
	f := func(config string, want ...string) {
		t.Helper()
		_, err := ParseConfig("w.yaml", []byte(config), EndpointDefaults{})
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: error %v, want ErrInvalid", config, err)
			return
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: error %q, want %q in it", config, err, w)
			}
		}
	}
	worker := func(more string) string {
		return "workers:\n- id: a\n  model: m\n  endpoint: tcp://h:5557\n" + more
	}
	f("workers: [", "w.yaml")
	f("- a", "w.yaml:1", "expected a mapping")
	f("wokers: []", "w.yaml:1", `unknown key "wokers"`)
	f("workers: 5", "w.yaml:1", "expected a list")
	f("workers: [5]", "w.yaml:1", "expected a mapping")
	f(worker("  endpint: x\n"), "w.yaml:5", `unknown key "endpint"`)
	f(worker("  id: b\n"), "w.yaml:", "id")
	f(worker("  dp_size: many\n"), "w.yaml:5", "dp_size", "many")
	f(worker("  dp_size: 5000\n"), "w.yaml:2", "dp_size", "1..1024")
	f(worker("  role: cook\n"), "role", `"cook"`, "prefill")
	f(worker("  on_gap: ignore\n"), "on_gap", "keep")
	f(worker("  extra_keys: some\n"), "extra_keys", "bare_mm")
	f(worker("  image_token_id: -1\n"), "w.yaml:5", "image_token_id", "-1")
	f(worker("  image_token_id: 4294967296\n"), "w.yaml:5", "image_token_id")
	f(worker("  image_token_id: 9\n  video_token_id: 9\n"), "video_token_id")
	f(worker("  replay_endpoint: tcp://h:5558\n  dp_size: 2\n"), "5557", "5558")
	f(worker("  replay_endpoint: tcp://h:5557\n"), "w.yaml:2")
	f(worker("  replay_endpoint: tcp://*:5558\n"), "replay_endpoint")
	f(worker("  rank_index: 1\n  dp_size: 2\n"), "rank_index")
	f(worker("  rank_index: -1\n"), "rank_index")
	f(worker("  ranks: [{rank: 0, endpoint: tcp://h:1}]\n"), "ranks")
	f(worker("  loras: [{nme: x}]\n"), "loras", `unknown key "nme"`)
	f(worker("- id: a\n  model: m\n  endpoint: tcp://h:9\n"), "w.yaml:5", "line 2")
	f("workers:\n- {id: a, model: m, endpoint: 'udp://h:5557'}", "endpoint", "udp")
	f("workers:\n- {id: a, model: m}", "endpoint: missing")
	f("workers:\n- {id: a, model: m, ranks: [{rank: 1, endpoint: 'tcp://h:1'}, {rank: 1, endpoint: 'tcp://h:2'}]}", "rank 1 stands twice")
	f("models:\n- {name: m}\n- {name: m}", "w.yaml:3", "line 2")
	f("dns:\n- {dns: 'a b', port: 1, worker: {model: m}}", "host name")
	f("dns:\n- {dns: a, port: 1, worker: {model: m, endpoint: 'tcp://h:1'}}", "endpoints follow")
	f("endpoints:\n- {name: a, port: 8000}", "w.yaml:2", "address: missing")
}

// FuzzParseConfig: no file panics, and what comes out is valid.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(goodConfig))
	f.Add([]byte("workers: [&a {id: a, <<: *a}]"))
	f.Add([]byte(`{"endpoints": [{"name": "a", "address": "10.0.0.1", "rankIndex": 2}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, _ := ParseConfig("f", raw, EndpointDefaults{Model: "m", EventPortBase: 5557})
		for i := range c.Workers {
			if err := c.Workers[i].Validate(); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestRouterEndpoints(t *testing.T) {
	const file = `
endpoints:
- {name: pod-a, namespace: prod, address: 10.0.0.7, port: "8000", labels: {llm-d.ai/role: decode}}
- {name: pod-b, namespace: prod, address: 10.0.0.7, port: "8001", rankIndex: 1, labels: {llm-d.ai/model: other, llm-d.ai/role: both}, weight: 3}
`
	c, err := ParseConfig("e.yaml", []byte(file), EndpointDefaults{Model: "m", EventPortBase: 5557, ReplayPortBase: 5657})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range c.Workers {
		ranks, err := w.ranks()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintln(w.ID, w.Key(), ranks))
	}
	want := []string{
		fmt.Sprintln("pod-a", SetKey{"prod", "m", "decode"}, []rankEndpoint{{0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657", false}}),
		fmt.Sprintln("pod-b", SetKey{"prod", "other", "aggregated"}, []rankEndpoint{{0, "tcp://10.0.0.7:5558", "tcp://10.0.0.7:5658", false}}),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// workersOf lists "id generation".
func workersOf(f *Fleet) (out []string) {
	for _, w := range f.Workers() {
		out = append(out, fmt.Sprintf("%s g%d", w.Spec.ID, w.Generation))
	}
	return out
}

func waitWorkers(t *testing.T, f *Fleet, want ...string) {
	t.Helper()
	eventually(t, func() string {
		if got := workersOf(f); !slices.Equal(got, want) {
			return fmt.Sprintf("workers %q, want %q; problems %v", got, want, f.Problems())
		}
		return ""
	})
}

// nobody is an endpoint that refuses.
func nobody(n int) string { return fmt.Sprintf("tcp://127.0.0.3:%d", n) }

func workerLine(id string, n int) string {
	return fmt.Sprintf("- {id: %s, model: m, endpoint: '%s'}\n", id, nobody(n))
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestFileIsWatched: writes, renames over it, bad entries and an unreadable
// file, with polling out of the way.
func TestFileIsWatched(t *testing.T) {
	noLeaks(t)
	slow := quick
	slow.Poll = time.Hour
	dir := t.TempDir()
	path := filepath.Join(dir, "workers.yaml")
	write(t, path, "workers:\n"+workerLine("a", 1))
	f := running(t, Options{ConfigFile: path, Timing: slow})
	waitWorkers(t, f, "a g1")

	write(t, path, "workers:\n"+workerLine("a", 1)+workerLine("b", 2))
	waitWorkers(t, f, "a g1", "b g1")

	// A rename over the file; a changed endpoint is another life.
	write(t, path+".new", "workers:\n"+workerLine("a", 3)+workerLine("b", 2))
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	waitWorkers(t, f, "a g2", "b g1")

	// A bad entry keeps its last good state, and the others change.
	write(t, path, "workers:\n- {id: b, model: m, endpoint: nowhere}\n"+workerLine("c", 4))
	waitWorkers(t, f, "b g1", "c g1")
	p := f.Problems()
	if len(p) != 1 || p[0].Entry != "b" || p[0].Where != path+":2" || !errors.Is(p[0].Err, ErrInvalid) {
		t.Errorf("problems: %+v", p)
	}

	// What cannot be read keeps everything.
	write(t, path, "workers: [")
	eventually(t, func() string {
		p := f.Problems()
		if slices.ContainsFunc(p, func(p Problem) bool { return p.Where == path }) {
			return ""
		}
		return fmt.Sprintf("problems: %+v", p)
	})
	waitWorkers(t, f, "b g1", "c g1")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	write(t, path, "workers:\n"+workerLine("d", 5))
	waitWorkers(t, f, "d g1")
	if p := f.Problems(); len(p) != 0 {
		t.Errorf("problems: %+v", p)
	}
}

// TestConfigMapSwap: the file is a link through ..data, which is swapped.
func TestConfigMapSwap(t *testing.T) {
	noLeaks(t)
	slow := quick
	slow.Poll = time.Hour
	dir := t.TempDir()
	version := func(name, text string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name, "workers.yaml"), text)
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version("..1", "workers:\n"+workerLine("a", 1))
	path := filepath.Join(dir, "workers.yaml")
	if err := os.Symlink("..data/workers.yaml", path); err != nil {
		t.Fatal(err)
	}
	f := running(t, Options{ConfigFile: path, Timing: slow})
	waitWorkers(t, f, "a g1")
	version("..2", "workers:\n"+workerLine("b", 1))
	waitWorkers(t, f, "b g1")
	version("..3", "workers:\n"+workerLine("b", 1)+workerLine("c", 2))
	waitWorkers(t, f, "b g1", "c g1")
	if err := os.RemoveAll(filepath.Join(dir, "..1")); err != nil {
		t.Fatal(err)
	}
	waitWorkers(t, f, "b g1", "c g1")
}

// TestRegistrations: upserts, refusals and what a restart of the daemon finds.
func TestRegistrations(t *testing.T) {
	dir := t.TempDir()
	open := func() *Fleet {
		f, err := New(Options{Logger: quiet, StateDir: dir, Workers: []WorkerSpec{{ID: "flag", Model: "m", Endpoint: "tcp://127.0.0.1:9"}}})
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	f := open()
	spec := WorkerSpec{ID: "w", Model: "m", Endpoint: "tcp://127.0.0.1:1"}
	for range 3 {
		if err := f.Put(spec); err != nil {
			t.Fatal(err)
		}
	}
	waitWorkers(t, f, "flag g1", "w g1")
	spec.OnGap = OnGapClear // changes no block: the same life
	if err := f.Put(spec); err != nil {
		t.Fatal(err)
	}
	waitWorkers(t, f, "flag g1", "w g1")
	spec.BlockSize = 32
	if err := f.Put(spec); err != nil {
		t.Fatal(err)
	}
	waitWorkers(t, f, "flag g1", "w g2")

	refused := func(spec WorkerSpec, want error, words ...string) {
		t.Helper()
		err := f.Put(spec)
		if !errors.Is(err, want) {
			t.Errorf("Put(%+v): %v, want %v", spec, err, want)
			return
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("Put(%+v): %q, want %q in it", spec, err, w)
			}
		}
	}
	refused(WorkerSpec{ID: "x", Model: "m"}, ErrInvalid, "endpoint")
	refused(WorkerSpec{ID: "x", Model: "m", Endpoint: "tcp://8.8.8.8:5557"}, ErrDenied)
	refused(WorkerSpec{ID: "x", Model: "m", Endpoint: "tcp://169.254.169.254:80"}, ErrDenied)
	refused(WorkerSpec{ID: "x", Model: "m", Endpoint: "ipc:///var/run/docker.sock"}, ErrDenied)
	refused(WorkerSpec{ID: "x", Model: "m", Endpoint: "tcp://127.0.0.1:1"}, ErrConflict, `"x"`, `"w"`, "one publisher")
	refused(WorkerSpec{ID: "flag", Model: "m", Endpoint: "tcp://127.0.0.1:77"}, ErrConflict, "flags")
	refused(WorkerSpec{ID: "x", Model: "m", Endpoint: "tcp://localhost:8", DPSize: 2}, ErrConflict, `"flag"`)
	refused(WorkerSpec{ID: "x", Model: "m", Endpoint: "tcp://127.0.0.1:50", ModelDir: dir + "/absent"}, ErrInvalid, "config.json")
	waitWorkers(t, f, "flag g1", "w g2")

	// Several models of one id; removing one keeps the other.
	other := WorkerSpec{ID: "w", Model: "n", Endpoint: "tcp://127.0.0.1:2"}
	if err := f.Register(other); err != nil {
		t.Fatal(err)
	}
	waitWorkers(t, f, "flag g1", "w g2", "w g1")
	if got := len(f.Registered("w")); got != 2 {
		t.Errorf("%d registrations of w, want 2", got)
	}
	if err := f.Unregister("w", other.Key()); err != nil {
		t.Fatal(err)
	}
	waitWorkers(t, f, "flag g1", "w g2")

	f = open()
	waitWorkers(t, f, "flag g1", "w g1")
	if err := f.Delete("flag"); !errors.Is(err, ErrConflict) {
		t.Errorf("Delete of a flag's worker: %v, want ErrConflict", err)
	}
	if err := f.Delete("nobody"); !errors.Is(err, ErrUnknownWorker) {
		t.Errorf("Delete of nobody: %v, want ErrUnknownWorker", err)
	}
	if err := f.Delete("w"); err != nil {
		t.Fatal(err)
	}
	waitWorkers(t, open(), "flag g1")

	// A file that nobody can read is set aside.
	write(t, filepath.Join(dir, registryFile), "{")
	waitWorkers(t, open(), "flag g1")
	if _, err := os.Stat(filepath.Join(dir, registryFile+".bad")); err != nil {
		t.Error(err)
	}
}

func TestAllowList(t *testing.T) {
	f := func(endpoint, resolved string, allowed bool, patterns ...string) {
		t.Helper()
		a, err := ParseAllowList(patterns)
		if err != nil {
			t.Fatal(err)
		}
		network := "tcp4"
		if strings.HasPrefix(endpoint, "ipc") {
			network = "unix"
		}
		if err := a.Control(endpoint)(network, resolved); (err == nil) != allowed || err != nil && !errors.Is(err, ErrDenied) {
			t.Errorf("%q: %s as %s: %v, allowed should be %t", patterns, endpoint, resolved, err, allowed)
		}
	}
	f("tcp://a:1", "127.0.0.1:1", true)
	f("tcp://a:1", "10.1.2.3:1", true)
	f("tcp://a:1", "[fd00::1]:1", true)
	f("tcp://a:1", "[::ffff:10.1.2.3]:1", true)
	f("tcp://a:1", "8.8.8.8:1", false)
	f("tcp://a:1", "169.254.169.254:1", false)
	f("tcp://a:1", "8.8.8.8:1", true, "8.8.8.0/24")
	f("tcp://a:1", "127.0.0.1:1", false, "8.8.8.0/24")
	f("tcp://a.svc.cluster.local:1", "8.8.8.8:1", true, ".svc.cluster.local")
	f("tcp://a.svc.cluster.local.evil:1", "8.8.8.8:1", false, ".svc.cluster.local")
	f("tcp://evilsvc.cluster.local:1", "8.8.8.8:1", false, ".svc.cluster.local")
	f("ipc:///run/vllm/a", "/run/vllm/a", true, "ipc:///run/vllm/")
	f("ipc:///run/vllm/../docker.sock", "/run/vllm/../docker.sock", false, "ipc:///run/vllm/")
	f("ipc:///run/vllm/a", "/run/vllm/a", false)
	if _, err := ParseAllowList([]string{"http://x/"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a pattern that is none: %v", err)
	}
}

// zone is a resolver for tests: no name server is at hand there.
type zone struct {
	mu    sync.Mutex
	addrs []netip.Addr
	err   error
}

func (z *zone) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return slices.Clone(z.addrs), z.err
}

func (z *zone) set(err error, addrs ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.err, z.addrs = err, nil
	for _, a := range addrs {
		z.addrs = append(z.addrs, netip.MustParseAddr(a))
	}
}

// TestDNS: addresses come and go; a name server's trouble changes nothing, and
// a name that is gone is believed after a while.
func TestDNS(t *testing.T) {
	z := &zone{}
	f, err := New(Options{Logger: quiet, Resolver: z, DNS: []DNSSpec{{Name: "vllm", Port: 5557, ReplayPort: 5657, Worker: WorkerSpec{Model: "m"}}}})
	if err != nil {
		t.Fatal(err)
	}
	step := func(err error, addrs string, want ...string) {
		t.Helper()
		z.set(err, strings.Fields(addrs)...)
		f.dns.lookUp(t.Context())
		if got := workersOf(f); !slices.Equal(got, want) {
			t.Errorf("after %v %q: %q, want %q", err, addrs, got, want)
		}
	}
	step(nil, "10.0.0.1 10.0.0.2", "vllm-10.0.0.1 g1", "vllm-10.0.0.2 g1")
	step(nil, "10.0.0.2 ::ffff:10.0.0.3 10.0.0.3", "vllm-10.0.0.2 g1", "vllm-10.0.0.3 g1")
	step(errors.New("server misbehaving"), "", "vllm-10.0.0.2 g1", "vllm-10.0.0.3 g1")
	if p := f.Problems(); len(p) != 1 || p[0].Source != "dns" {
		t.Errorf("problems: %+v", p)
	}
	gone := &net.DNSError{IsNotFound: true}
	step(gone, "", "vllm-10.0.0.2 g1", "vllm-10.0.0.3 g1")
	step(gone, "", "vllm-10.0.0.2 g1", "vllm-10.0.0.3 g1")
	step(gone, "")
	step(nil, "10.0.0.2", "vllm-10.0.0.2 g2")
	if p := f.Problems(); len(p) != 0 {
		t.Errorf("problems: %+v", p)
	}
}

// TestDNSIsLookedUpAgain, on fake time.
func TestDNSIsLookedUpAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := &zone{}
		z.set(nil, "10.0.0.1")
		f, err := New(Options{Logger: quiet, Resolver: z, DNS: []DNSSpec{{Name: "vllm", Port: 5557, Worker: WorkerSpec{Model: "m"}}}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go f.dns.run(ctx)
		synctest.Wait()
		if got := workersOf(f); !slices.Equal(got, []string{"vllm-10.0.0.1 g1"}) {
			t.Errorf("workers %q", got)
		}
		z.set(nil, "10.0.0.9")
		time.Sleep(f.o.Timing.Resolve + time.Millisecond)
		synctest.Wait()
		if got := workersOf(f); !slices.Equal(got, []string{"vllm-10.0.0.9 g1"}) {
			t.Errorf("workers %q", got)
		}
	})
}

// TestSlots: no more replays at once than allowed, and probes do not take the
// places of gaps.
func TestSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(2)
		for range 2 {
			if _, err := s.acquire(t.Context(), true); err != nil {
				t.Fatal(err)
			}
		}
		release, err := s.acquire(t.Context(), false)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.acquire(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		got := make(chan struct{})
		go func() {
			if _, err := s.acquire(t.Context(), false); err == nil {
				close(got)
			}
		}()
		synctest.Wait()
		select {
		case <-got:
			t.Error("a third replay at once")
		default:
		}
		release()
		<-got
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.acquire(ctx, true); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("acquire: %v", err)
		}
	})
}
