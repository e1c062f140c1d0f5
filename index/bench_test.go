package index

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// The benchmarks drive the index as the daemon does. What they time by hand is
// CPU time of their own thread, since the machines are shared. Figures of what is in use
// elsewhere, measured on two cores of the same kind with each project's own
// code, stand in the comments; docs/index.md says how to repeat them.

const benchBlock = 16 // tokens

// loader makes batches of events whose blocks are hashed as a publisher's are.
type loader struct {
	norm *normalize.Normalizer
}

func newLoader() *loader { return &loader{norm: normalize.NewNormalizer(normalize.View{})} }

// chain is one prompt of a benchmark: its blocks' tokens and handles.
type chain struct {
	tokens []uint32
	hashes []zmqwire.EngineHash
}

// newChain makes content that is a function of id, with handles of a seed.
func newChain(id uint64, blocks int, seed uint64) chain {
	c := chain{tokens: make([]uint32, blocks*benchBlock), hashes: make([]zmqwire.EngineHash, blocks)}
	fillChain(c, id, seed)
	return c
}

func fillChain(c chain, id, seed uint64) {
	for i := range c.tokens {
		c.tokens[i] = uint32((id*0x9e3779b97f4a7c15 + uint64(i)*0x2545f4914f6cdd1d) >> 40)
	}
	for i := range c.hashes {
		c.hashes[i] = zmqwire.EngineHash(mix(id<<20 + uint64(i) + seed<<50 + 1)) // never 0
	}
}

func mix(x uint64) uint64 {
	x ^= x >> 31
	x *= 0x7fb5d329728ea185
	x ^= x >> 27
	x *= 0x81dadef4bc2dd44d
	return x ^ x>>33
}

func (c chain) store(from, to int) zmqwire.Event {
	ev := zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: c.hashes[from:to],
		Tokens: c.tokens[from*benchBlock : to*benchBlock], BlockSize: benchBlock, Group: zmqwire.NoGroup}
	if from > 0 {
		ev.HasParent, ev.Parent = true, c.hashes[from-1]
	}
	return ev
}

func (c chain) remove(i int) zmqwire.Event {
	return zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: c.hashes[i : i+1], Group: zmqwire.NoGroup}
}

// removals are those of all its blocks, as an engine evicts them: from the end.
func (c chain) removals() (events []zmqwire.Event) {
	for i := len(c.hashes) - 1; i >= 0; i-- {
		events = append(events, c.remove(i))
	}
	return events
}

func (l *loader) prepare(events ...zmqwire.Event) *normalize.Batch {
	b := new(normalize.Batch)
	l.norm.Normalize(b, &zmqwire.Batch{Events: events})
	return b
}

// BenchmarkStore: apply only, events of 8 blocks, chains of 128.
//
// new: content new to the index. Dynamo 1.6.1 217 ns, llm-d 4.7-5.9 µs, AIBrix
// 3.8 µs. shared: content that 31 other streams hold. Dynamo 86 ns. single: one
// block an event, 64 chains in turns. Dynamo 855 ns. step: the same, 64 events a
// batch, as a step of an engine that decodes so many requests brings them.
func BenchmarkStore(b *testing.B) {
	const blocks, perEvent = 128, 8
	b.Run("new", func(b *testing.B) { benchStore(b, blocks, perEvent, 0, 1, 1) })
	b.Run("shared", func(b *testing.B) { benchStore(b, blocks, perEvent, 0, 32, 1) })
	b.Run("shared-own-hashes", func(b *testing.B) { benchStore(b, blocks, perEvent, 1, 32, 1) })
	b.Run("single", func(b *testing.B) { benchStore(b, blocks, 1, 0, 1, 1) })
	b.Run("step", func(b *testing.B) { benchStore(b, blocks, 1, 0, 1, 64) })
}

// benchStore stores 512 Ki blocks a round: by one stream, or by the last of
// several that all store the same.
func benchStore(b *testing.B, blocks, perEvent int, seedStep uint64, streams, perBatch int) {
	const total = 1 << 19
	chainsN := total / blocks
	l := newLoader()
	var took time.Duration
	stored := 0
	for stored < b.N {
		set := New(Options{})
		for s := 0; s < streams; s++ {
			t := applyChains(l, set.NewStream(StreamConfig{}), chainsN, blocks, perEvent, perBatch, uint64(s)*seedStep)
			if s == streams-1 {
				took += t
			}
		}
		stored += total
	}
	reportBlocks(b, took, stored)
}

// reportBlocks replaces the framework's figure, which has the preparation in
// it.
func reportBlocks(b *testing.B, took time.Duration, blocks int) {
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(took.Nanoseconds())/float64(blocks), "ns/block")
}

// applyChains stores chains, 64 of them growing in turns where an event has one
// block, and returns what the index took for it: the batches are made in groups
// beforehand.
func applyChains(l *loader, st *Stream, n, blocks, perEvent, perBatch int, seed uint64) (took time.Duration) {
	turns := 1
	if perEvent == 1 {
		turns = 64
	}
	for c := 0; c < n; c += turns {
		cs := make([]chain, turns)
		for k := range cs {
			cs[k] = newChain(uint64(c+k), blocks, seed)
		}
		var batches []*normalize.Batch
		for from := 0; from < blocks; from += perEvent {
			for k := 0; k < len(cs); k += perBatch {
				var events []zmqwire.Event
				for _, c := range cs[k : k+perBatch] {
					events = append(events, c.store(from, from+perEvent))
				}
				batches = append(batches, l.prepare(events...))
			}
			if len(batches) >= 16 { // few enough to stay in the cache, as a decoder's do
				took += applyAll(st, batches)
				batches = batches[:0]
			}
		}
		took += applyAll(st, batches)
	}
	return took
}

func applyAll(st *Stream, batches []*normalize.Batch) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadTime()
	for _, batch := range batches {
		st.Apply(batch)
	}
	return threadTime() - start
}

// BenchmarkRemove: one hash an event, as vLLM sends it, tail first, from a
// stream of 512 Ki blocks. Dynamo 470-670 ns. A scheduler step's removals come
// in one batch: 16 here (68 on average in the load capture); alone has one.
func BenchmarkRemove(b *testing.B) {
	b.Run("batch16", func(b *testing.B) { benchRemove(b, 16) })
	b.Run("alone", func(b *testing.B) { benchRemove(b, 1) })
}

func benchRemove(b *testing.B, perBatch int) {
	const blocks, total = 128, 1 << 19
	l := newLoader()
	var took time.Duration
	removed := 0
	for removed < b.N {
		set := New(Options{})
		st := set.NewStream(StreamConfig{})
		applyChains(l, st, total/blocks, blocks, 8, 1, 0)
		for _, c := range rand.New(rand.NewPCG(1, 2)).Perm(total / blocks) {
			ch := newChain(uint64(c), blocks, 0)
			var batches []*normalize.Batch
			for i := blocks; i > 0; i -= perBatch {
				var events []zmqwire.Event
				for k := i - 1; k >= i-perBatch; k-- {
					events = append(events, ch.remove(k))
				}
				batches = append(batches, l.prepare(events...))
			}
			took += applyAll(st, batches)
		}
		removed += total
		if left := st.Stats().Resident[normalize.Device]; left != 0 {
			b.Fatalf("%d blocks left", left)
		}
	}
	reportBlocks(b, took, removed)
}

// BenchmarkWireToIndex: decode, identity and apply, one goroutine. Dynamo
// 1.7-2.8 µs of CPU a block, llm-d 8.7-12 µs.
//
// load is the capture of that name; churn is batches of 4 to 20 blocks, half
// stores, half removals, on a stream of 64 Ki blocks.
func BenchmarkWireToIndex(b *testing.B) {
	b.Run("load", func(b *testing.B) { benchWire(b, captureFeeds(b, "../testdata/captures/load.kvcap.zst")) })
	b.Run("churn", func(b *testing.B) { benchWire(b, churnFeed(b)) })
}

// wireFeed is a round of payloads, all of which a fresh set can take.
type wireFeed struct {
	streams  int
	payloads [][]byte
	of       []int // the stream of each payload
}

func benchWire(b *testing.B, f wireFeed) {
	var dec zmqwire.Decoder
	var batch normalize.Batch
	norm := normalize.NewNormalizer(normalize.View{})
	var took time.Duration
	var mallocs uint64
	ops := 0
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for ops < b.N {
		set := New(Options{})
		streams := make([]*Stream, f.streams)
		for i := range streams {
			streams[i] = set.NewStream(StreamConfig{})
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := threadTime()
		for i, payload := range f.payloads {
			events, err := dec.Decode(payload)
			if err != nil {
				b.Fatal(err)
			}
			norm.Normalize(&batch, events)
			a := streams[f.of[i]].Apply(&batch)
			ops += a.Stored + a.Removed
		}
		took += threadTime() - start
		runtime.ReadMemStats(&after)
		mallocs += after.Mallocs - before.Mallocs
	}
	reportBlocks(b, took, ops)
	b.ReportMetric(float64(ops)/took.Seconds()/1e6, "Mops/s")
	b.ReportMetric(float64(mallocs)/float64(ops), "allocs/block")
}

func captureFeeds(b *testing.B, file string) wireFeed {
	f, err := os.Open(file)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	r, err := zmqwire.NewCaptureReader(f)
	if err != nil {
		b.Fatal(err)
	}
	feed := wireFeed{streams: len(r.Header().Streams)}
	of := map[string]int{}
	var rec zmqwire.Record
	for {
		if err := r.Next(&rec); errors.Is(err, io.EOF) {
			return feed
		} else if err != nil {
			b.Fatal(err)
		}
		if _, ok := of[rec.Stream]; !ok {
			of[strings.Clone(rec.Stream)] = len(of)
		}
		feed.payloads = append(feed.payloads, append([]byte(nil), rec.Frames[2]...))
		feed.of = append(feed.of, of[rec.Stream])
	}
}

func churnFeed(b *testing.B) wireFeed {
	rng := rand.New(rand.NewPCG(1, 2))
	feed := wireFeed{streams: 1}
	add := func(events ...zmqwire.Event) {
		p, err := zmqwire.AppendBatch(nil, &zmqwire.Batch{Rank: 0, Events: events}, zmqwire.EncodeOptions{Maps: true})
		if err != nil {
			b.Fatal(err)
		}
		feed.payloads, feed.of = append(feed.payloads, p), append(feed.of, 0)
	}
	var held []chain
	id := uint64(0)
	grow := func() {
		c := newChain(id, 2+rng.IntN(9), 0)
		id++
		held = append(held, c)
		add(c.store(0, len(c.hashes)))
	}
	for n := 0; n < 8192; n++ {
		grow()
	}
	for n := 0; n < 16384; n++ {
		c := newChain(id, 2+rng.IntN(9), 0)
		id++
		events := []zmqwire.Event{c.store(0, len(c.hashes))}
		k := rng.IntN(len(held))
		for i := len(held[k].hashes) - 1; i >= 0; i-- {
			events = append(events, held[k].remove(i))
		}
		held[k] = c
		add(events...)
	}
	return feed
}

// BenchmarkLookup: 512 blocks already hashed, by how many streams hold them,
// over 200 resident prompts. Dynamo 0.79 / 1.14 / 3.26 µs for 1 / 32 / 256
// holders; branchy, where another chain leaves at every 32nd block, 3.7 / 4.2 /
// 6.9. AIBrix 127 µs, llm-d 222-750 µs.
func BenchmarkLookup(b *testing.B) {
	for _, shape := range []string{"512x", "branchy512x"} {
		for _, holders := range []int{1, 32, 256} {
			b.Run(fmt.Sprint(shape, holders), func(b *testing.B) { benchLookup(b, holders, shape != "512x") })
		}
	}
}

func residentPrompts(holders int, branchy bool) (*Set, []*Stream, []*Query) {
	const prompts, blocks = 200, 512
	l := newLoader()
	set := New(Options{})
	var streams []*Stream
	for s := 0; s < holders; s++ {
		streams = append(streams, set.NewStream(StreamConfig{}))
	}
	var queries []*Query
	for p := 0; p < prompts; p++ {
		c := newChain(uint64(p), blocks, 0)
		for _, st := range streams {
			for from := 0; from < blocks; from += 32 {
				if branchy && from > 0 {
					side := newChain(uint64(p*blocks+from+1<<20), 4, 0)
					ev := side.store(0, 4)
					ev.HasParent, ev.Parent = true, c.hashes[from-1]
					st.Apply(l.prepare(ev))
				}
				st.Apply(l.prepare(c.store(from, from+32)))
			}
		}
		queries = append(queries, queryOf(set, c.tokens))
	}
	return set, streams, queries
}

func queryOf(set *Set, tokens []uint32) *Query {
	pr := normalize.Prompt{Tokens: tokens}
	shape := normalize.Shape{BlockSize: benchBlock}
	proj := pr.Project(normalize.View{}, shape)
	var c normalize.Chain
	pr.Chain(&c, &proj, normalize.View{}, shape)
	return &Query{PromptTokens: len(tokens), Views: []QueryView{{Chains: []normalize.Chain{c}, Limits: []int{proj.Limit}}}}
}

func benchLookup(b *testing.B, holders int, branchy bool) {
	set, streams, queries := residentPrompts(holders, branchy)
	rows := make([]Row, len(streams))
	roster := set.NewRoster(streams, nil)
	roster.Match(queries[0], rows)
	if rows[holders-1].Device != 512*benchBlock {
		b.Fatalf("holds %d tokens", rows[holders-1].Device)
	}
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		roster.Match(queries[n], rows)
		if n++; n == len(queries) {
			n = 0
		}
	}
}

// BenchmarkClear: clear one stream of 32 that hold 1 Mi blocks together.
// Dynamo 2.3-3.1 ms, AIBrix 645 ms, llm-d 1 s.
func BenchmarkClear(b *testing.B) {
	for _, shared := range []bool{false, true} {
		name := "1of32"
		if shared {
			name = "1of32-shared"
		}
		b.Run(name, func(b *testing.B) { benchClear(b, shared) })
	}
}

func benchClear(b *testing.B, shared bool) {
	const streams, perStream, blocks = 32, 1 << 15, 128
	l := newLoader()
	set := New(Options{})
	var all []*Stream
	fill := func(s int) {
		for c := 0; c < perStream/blocks; c++ {
			id := uint64(c)
			if !shared {
				id += uint64(s) << 32
			}
			ch := newChain(id, blocks, 0)
			for from := 0; from < blocks; from += 8 {
				all[s].Apply(l.prepare(ch.store(from, from+8)))
			}
		}
	}
	for s := 0; s < streams; s++ {
		all = append(all, set.NewStream(StreamConfig{}))
		fill(s)
	}
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		all[n%streams].Clear()
		b.StopTimer()
		fill(n % streams)
		n++
		b.StartTimer()
	}
}

// BenchmarkMemory: bytes a membership, of 10 M memberships in chains of 128,
// heap and resident set: unique content; content shared by 32 streams under
// different engine hashes; under equal ones. Dynamo 88 / 38, llm-d 1156 / 259,
// AIBrix 463.
func BenchmarkMemory(b *testing.B) {
	b.Run("unique", func(b *testing.B) { benchMemory(b, 32, false, 1) })
	b.Run("shared32", func(b *testing.B) { benchMemory(b, 32, true, 1) })
	b.Run("shared32same", func(b *testing.B) { benchMemory(b, 32, true, 0) })
}

func benchMemory(b *testing.B, streams int, shared bool, seedStep uint64) {
	const memberships, blocks = 10_000_000, 128
	for b.Loop() {
		runtime.GC()
		debug.FreeOSMemory()
		heap, rss := heapInUse(), residentSet()
		set := New(Options{})
		l := newLoader()
		batch := new(normalize.Batch)
		ch := newChain(0, blocks, 0)
		var all []*Stream
		for s := 0; s < streams; s++ {
			all = append(all, set.NewStream(StreamConfig{}))
		}
		for c := 0; c < memberships/blocks/streams; c++ {
			for s, st := range all {
				id := uint64(c)
				if !shared {
					id += uint64(s) << 32
				}
				fillChain(ch, id, uint64(s)*seedStep)
				for from := 0; from < blocks; from += 8 {
					l.norm.Normalize(batch, &zmqwire.Batch{Events: []zmqwire.Event{ch.store(from, from+8)}})
					st.Apply(batch)
				}
			}
		}
		n := float64(set.Stats().Memberships)
		runtime.GC()
		debug.FreeOSMemory()
		b.ReportMetric(float64(heapInUse()-heap)/n, "heap-B/membership")
		b.ReportMetric(float64(residentSet()-rss)/n, "rss-B/membership")
		b.ReportMetric(float64(set.Stats().Bytes)/n, "counted-B/membership")
		b.ReportMetric(n, "memberships")
		runtime.KeepAlive(all)
	}
}

func heapInUse() int64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse)
}

// residentSet in bytes, 0 where the system does not tell.
func residentSet() int64 {
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, resident int64
	fmt.Sscan(string(raw), &size, &resident)
	return resident * int64(os.Getpagesize())
}

// BenchmarkChurnGC: 20 M memberships held, stores and removals at full speed;
// what the collector takes of the CPU.
func BenchmarkChurnGC(b *testing.B) {
	const streams, perStream, blocks = 32, 625_000, 128
	set := New(Options{})
	l := newLoader()
	batch := new(normalize.Batch)
	var all []*Stream
	apply := func(st *Stream, events ...zmqwire.Event) {
		l.norm.Normalize(batch, &zmqwire.Batch{Events: events})
		st.Apply(batch)
	}
	ch := newChain(0, blocks, 0)
	put := func(s int, id uint64) {
		fillChain(ch, uint64(s)<<32+id, 0)
		for from := 0; from < blocks; from += 8 {
			apply(all[s], ch.store(from, from+8))
		}
	}
	for s := 0; s < streams; s++ {
		all = append(all, set.NewStream(StreamConfig{}))
		for c := 0; c < perStream/blocks; c++ {
			put(s, uint64(c))
		}
	}
	var before, after runtime.MemStats
	runtime.GC()
	gc0 := gcCPU()
	runtime.ReadMemStats(&before)
	start := time.Now()
	ops, n := 0, 0
	events := make([]zmqwire.Event, 0, blocks)
	for b.Loop() {
		s, old, now := n%streams, uint64(n/streams), uint64(perStream/blocks+n/streams)
		fillChain(ch, uint64(s)<<32+old, 0)
		events = events[:0]
		for i := blocks - 1; i >= 0; i-- {
			events = append(events, ch.remove(i))
		}
		apply(all[s], events...)
		put(s, now)
		ops += 2 * blocks
		n++
	}
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	b.ReportMetric(100*(gcCPU()-gc0)/took.Seconds()/float64(runtime.GOMAXPROCS(0)), "gc-%")
	b.ReportMetric(float64(ops)/took.Seconds()/1e6, "Mops/s")
	b.ReportMetric(float64(after.NumGC-before.NumGC), "collections")
}

func gcCPU() float64 {
	s := []metrics.Sample{{Name: "/cpu/classes/gc/total:cpu-seconds"}}
	metrics.Read(s)
	return s[0].Value.Float64()
}
