package fleet

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// kind is what publishes.
type kind string

const (
	own       kind = "own"        // zmqwire.Publisher, in this process
	libzmq    kind = "libzmq"     // libzmq's sockets, in a process that can be killed
	libzmqOld kind = "libzmq_old" // the same, with the replies of vLLM up to 0.25
	vllm      kind = "vllm"       // vLLM's own ZmqEventPublisher
)

// require skips the test, or fails it where it was asked not to skip, if the
// kind cannot run here.
func (k kind) require(t testing.TB) {
	t.Helper()
	switch k {
	case libzmq, libzmqOld:
		wiretest.Interpreter(t, "zmq")
	case vllm:
		vllmSource(t)
		wiretest.Interpreter(t, "zmq", "msgspec")
	}
}

// vllmSource is where vLLM's kv_events.py is.
func vllmSource(t testing.TB) string {
	t.Helper()
	if path := os.Getenv("KVINDEXD_VLLM"); path != "" {
		return path
	}
	const reason = "KVINDEXD_VLLM is not set: neither a directory with vLLM's kv_events.py (scripts/fetch-vllm) nor its wheel"
	if os.Getenv("KVINDEXD_REQUIRE_VLLM") == "1" {
		t.Fatal(reason)
	}
	t.Skip(reason)
	return ""
}

// engine is a publisher behind two proxies, and the truth of what it holds:
// blocks of four tokens, by number. Those below chained stand alone; the others
// make chains of eight.
type engine struct {
	t              testing.TB
	kind           kind
	cfg            zmqwire.PublisherConfig
	pub            *zmqwire.Publisher
	proc           *wiretest.Process // in place of pub
	events, replay *wiretest.Proxy
	rank           int32
	life           uint32
	seq            uint64         // the next batch's
	held           map[int]bool   // in this life
	known          map[block]bool // all that were ever stored
}

const chained = 1000

// block is a block's number in one life. Equal numbers of two lives have equal
// handles and other content.
type block struct {
	life uint32
	n    int
}

// tokens of the block.
func (b block) tokens() []uint32 {
	first := b.life*1_000_000 + uint32(b.n)*4 + 1
	return []uint32{first, first + 1, first + 2, first + 3}
}

// path is the blocks from the first of the chain to this.
func (b block) path() []block {
	if b.n < chained {
		return []block{b}
	}
	var p []block
	for n := b.n - b.n%8; n <= b.n; n++ {
		p = append(p, block{b.life, n})
	}
	return p
}

func handle(n int) zmqwire.EngineHash { return zmqwire.EngineHash(n + 1) }

// newEngine is a publisher of our own. Its endpoints are chosen here.
func newEngine(t testing.TB, cfg zmqwire.PublisherConfig) *engine {
	t.Helper()
	return newEngineOf(t, own, cfg)
}

func newEngineOf(t testing.TB, k kind, cfg zmqwire.PublisherConfig) *engine {
	t.Helper()
	e := &engine{t: t, kind: k, cfg: cfg, rank: -1, held: map[int]bool{}, known: map[block]bool{}}
	e.cfg.Endpoint, e.cfg.ReplayEndpoint, e.cfg.Logger = "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", quiet
	e.cfg.Linger = time.Millisecond
	events, replay := e.spawn()
	e.events, e.replay = wiretest.NewProxy(t, events), wiretest.NewProxy(t, replay)
	return e
}

// spawn starts the publisher and returns the host:port of its sockets.
func (e *engine) spawn() (events, replay string) {
	e.t.Helper()
	if e.kind == own {
		p, err := zmqwire.NewPublisher(e.cfg)
		if err != nil {
			e.t.Fatal(err)
		}
		e.pub = p
		e.t.Cleanup(func() { _ = p.Close() })
		return hostOf(p.Addr()), hostOf(p.ReplayAddr())
	}
	what := map[kind]string{libzmq: "new", libzmqOld: "old"}[e.kind]
	if e.kind == vllm {
		what = vllmSource(e.t)
	}
	e.proc = wiretest.Python(e.t, filepath.Join("testdata", "engine.py"), what, e.cfg.Endpoint, e.cfg.ReplayEndpoint,
		strconv.Itoa(orElse(e.cfg.RingSize, 10_000)), strconv.Itoa(orElse(e.cfg.HWM, 100_000)))
	words := strings.Fields(e.proc.Line())
	if len(words) != 2 {
		e.t.Fatalf("engine.py says %q", words)
	}
	return hostOf(words[0]), hostOf(words[1])
}

func orElse(n, def int) int {
	if n == 0 {
		return def
	}
	return n
}

func hostOf(endpoint string) string { return strings.TrimPrefix(endpoint, "tcp://") }

// kill is kill -9, for what is a process.
func (e *engine) kill() {
	if e.kind == own {
		_ = e.pub.Close()
		return
	}
	e.proc.Kill()
}

// restart kills the publisher and starts another behind the same address, with
// nothing held.
func (e *engine) restart() {
	e.t.Helper()
	e.kill()
	e.succeed()
}

// succeed puts another publisher, with other content, behind the address.
func (e *engine) succeed() {
	e.t.Helper()
	events, replay := e.spawn()
	e.life++
	e.seq = 0
	clear(e.held)
	e.events.Retarget(events)
	e.replay.Retarget(replay)
	e.events.Cut()
	e.replay.Cut()
}

func (e *engine) spec(id string) WorkerSpec {
	return WorkerSpec{ID: id, Model: "m", Endpoint: "tcp://" + e.events.Addr(), ReplayEndpoint: "tcp://" + e.replay.Addr()}
}

func (e *engine) encode(ev ...zmqwire.Event) []byte {
	e.t.Helper()
	raw, err := zmqwire.AppendBatch(nil, &zmqwire.Batch{Timestamp: now(), Rank: e.rank, Events: ev}, zmqwire.EncodeOptions{Maps: true})
	if err != nil {
		e.t.Fatal(err)
	}
	return raw
}

// now is a batch's timestamp, which makes equal events of two lives two batches.
func now() float64 { return float64(time.Now().UnixNano()) / 1e9 }

// storeEvent holds block n from now on.
func (e *engine) storeEvent(n int) zmqwire.Event {
	b := block{e.life, n}
	e.held[n], e.known[b] = true, true
	ev := zmqwire.Event{
		Kind: zmqwire.BlockStored, Hashes: []zmqwire.EngineHash{handle(n)},
		Tokens: b.tokens(), BlockSize: 4, Group: zmqwire.NoGroup,
	}
	if n >= chained && n%8 != 0 {
		ev.Parent, ev.HasParent = handle(n-1), true
	}
	return ev
}

func (e *engine) removeEvent(n int) zmqwire.Event {
	delete(e.held, n)
	return zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: []zmqwire.EngineHash{handle(n)}, Group: zmqwire.NoGroup}
}

// send publishes one batch and returns its number.
func (e *engine) send(payload []byte) uint64 {
	if e.kind == own {
		e.pub.Publish(payload)
	} else {
		e.proc.Say("post %x", payload)
	}
	e.seq++
	return e.seq - 1
}

// burn uses up a number.
func (e *engine) burn() {
	if e.kind == own {
		e.pub.Burn()
	} else {
		e.proc.Ask("burn")
	}
	e.seq++
}

// store publishes one batch for each block.
func (e *engine) store(blocks ...int) {
	for _, n := range blocks {
		e.send(e.encode(e.storeEvent(n)))
	}
}

func (e *engine) remove(blocks ...int) {
	for _, n := range blocks {
		e.send(e.encode(e.removeEvent(n)))
	}
}

// clear publishes an AllBlocksCleared.
func (e *engine) clear() {
	e.send(e.encode(zmqwire.Event{Kind: zmqwire.AllBlocksCleared}))
	clear(e.held)
}

// churn publishes n batches that store, or remove, one of 64 chained blocks in
// turn, or both: every one of them is held and not held many times.
func (e *engine) churn(n int) {
	for i := range n {
		b := chained + (i*i+7*i)%64
		switch {
		case !e.held[b]:
			e.store(b)
		case i%3 == 0:
			e.send(e.encode(e.removeEvent(b), e.storeEvent(b)))
		default:
			e.remove(b)
		}
	}
}

// lose publishes batches whose messages are dropped on their way: only a replay
// can bring them. A subscription has to stand.
func (e *engine) lose(batches ...[]byte) {
	e.t.Helper()
	limit, cancel := context.WithTimeout(e.t.Context(), wiretest.Patience)
	defer cancel()
	if e.kind == own {
		if err := e.pub.WaitSubscribers(limit, 1); err != nil {
			e.t.Fatal(err)
		}
	}
	dropped := make(chan struct{}, len(batches))
	from, to := e.seq, e.seq+uint64(len(batches))
	e.events.Drop(func(_ int, frames [][]byte) bool {
		seq := binary.BigEndian.Uint64(frames[1])
		if seq < from || seq >= to {
			return false
		}
		dropped <- struct{}{}
		return true
	})
	for _, b := range batches {
		e.send(b)
	}
	for range batches {
		select {
		case <-dropped:
		case <-limit.Done():
			e.t.Fatal("what was to be dropped did not come by")
		}
	}
	e.events.Drop(nil)
}

// truth waits until the stream is in the state and holds exactly what the engine
// holds.
func (e *engine) truth(f *Fleet, stream string, want State) {
	e.t.Helper()
	eventually(e.t, func() string { return e.short(f, stream, want) })
}

// short says what the stream lacks of the truth.
func (e *engine) short(f *Fleet, stream string, want State) string {
	if st := statusOf(f, stream); st.State != want {
		return fmt.Sprintf("%s is %s, want %s: %+v", stream, st.State, want, st)
	}
	for b := range e.known {
		var tokens []uint32
		want, unbroken := 0, true
		for _, p := range b.path() {
			tokens = append(tokens, p.tokens()...)
			if unbroken = unbroken && p.life == e.life && e.held[p.n]; unbroken {
				want += 4
			}
		}
		if got := device(e.t, f, "m", stream, tokens...); got != want {
			return fmt.Sprintf("%s: block %+v: %d tokens, want %d (%+v)", stream, b, got, want, statusOf(f, stream))
		}
	}
	return ""
}
