package index

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// exported takes a whole set out.
func exported(x *Set, streams []*Stream) (chunks [][]byte, orphans []int, err error) {
	e := x.Export()
	defer e.Close()
	for _, s := range streams {
		t, ok := e.Take(s)
		if !ok {
			return nil, nil, errors.New("closed")
		}
		orphans = append(orphans, t.Orphans)
		if err := e.Chunks(func(c []byte) error { chunks = append(chunks, slices.Clone(c)); return nil }); err != nil {
			return nil, nil, err
		}
	}
	return chunks, orphans, nil
}

func archived(chunks [][]byte) (*Archive, error) {
	a := new(Archive)
	for _, c := range chunks {
		if err := a.Add(c); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// travel moves the world into another set, by chunks, in any order; the models
// stay as they are, but for what an export leaves out.
func (w *world) travel() error {
	var streams []*Stream
	for _, s := range w.streams {
		streams = append(streams, s.stream)
	}
	chunks, orphans, err := exported(w.set, streams)
	if err != nil {
		return err
	}
	a, err := archived(chunks)
	if err != nil {
		return err
	}
	into := New(Options{})
	arrived := make([]*Stream, len(streams))
	for _, i := range w.order(len(streams)) {
		arrived[i] = into.NewStream(w.streams[i].stream.config)
		if err := a.Import(i, arrived[i]); err != nil {
			return fmt.Errorf("stream %d: %w", i, err)
		}
		if got, want := arrived[i].Stats().Resident, streams[i].Stats().Resident; got != want {
			return fmt.Errorf("stream %d: %v blocks resident of %v", i, got, want)
		}
		if err := into.check(); err != nil {
			return fmt.Errorf("after stream %d: %w", i, err)
		}
	}
	for i, s := range w.streams {
		s.stream = arrived[i]
		if orphans[i] > 0 {
			s.model.forgetOrphans()
		}
	}
	if got, want := into.Stats(), w.set.Stats(); got.Memberships != want.Memberships {
		return fmt.Errorf("%d memberships of %d", got.Memberships, want.Memberships)
	}
	w.set, w.roster = into, nil
	w.last = "the journey"
	return nil
}

// forgetOrphans drops what waits for its parent: an export leaves it out.
// Window blocks that wait for nothing but to be placed stay.
func (m *model) forgetOrphans() {
	for k, n := range m.nodes {
		if n.content == "" || n.chain != "" {
			continue
		}
		delete(m.nodes, k)
		for p, c := range n.copies {
			if g := m.groups[p.group]; g != nil && g.window && c > 0 {
				m.node(k.shape, k.engine, nil).copies[p] = c
			}
		}
	}
}

func (w *world) order(n int) []int {
	out := make([]int, n)
	for i := range out {
		k := w.choose.below(i + 1)
		out[i], out[k] = out[k], i
	}
	return out
}

// TestTravel: a set that was exported and imported again answers as the model
// does, then and after more of its history.
func TestTravel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(drawn{t})
		for n := rapid.IntRange(1, 60).Draw(t, "steps"); n > 0; n-- {
			w.step()
			if w.choose.below(8) == 0 {
				if err := w.travel(); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.check(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestTravelLong(t *testing.T) {
	want := 50_000
	if os.Getenv("KVINDEXD_LONG") == "1" {
		want = 200_000
	}
	ops := 0
	for seed := uint64(1); ops < want; seed++ {
		w := newWorld(seeded{rand.New(rand.NewPCG(seed, 11))})
		for n := 0; n < 300; n++ {
			w.step()
			if w.choose.below(30) == 0 {
				if err := w.travel(); err != nil {
					t.Fatalf("seed %d, step %d: %v", seed, n, err)
				}
			}
			if err := w.check(); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, n, err)
			}
		}
		ops += w.ops
		for _, s := range w.streams {
			s.stream.Close()
		}
		if err := w.set.empty(); err != nil {
			t.Fatalf("seed %d: after the last stream: %v", seed, err)
		}
	}
	t.Logf("%d operations", ops)
}

// TestTravelWhileOthersWrite: between the taking of two streams, and within one,
// the other streams go on; each stream arrives as it was when it was taken.
func TestTravelWhileOthersWrite(t *testing.T) {
	for seed := uint64(1); seed <= 60; seed++ {
		w := newWorld(seeded{rand.New(rand.NewPCG(seed, 13))})
		for range 100 {
			w.step()
		}
		if err := w.travelSlowly(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// travelSlowly exports each stream as soon as the ones before it have changed.
func (w *world) travelSlowly() error {
	e := w.set.Export()
	defer e.Close()
	a, into := new(Archive), New(Options{})
	var arrived []*Stream
	var wild []bool
	var models []*model
	for i := range w.streams {
		s := w.streams[i]
		taken, ok := e.Take(s.stream)
		if !ok {
			return errors.New("closed")
		}
		// From here on s may change too: what is asked afterwards is its
		// answers of now.
		if err := e.Chunks(a.Add); err != nil {
			return err
		}
		arrived = append(arrived, into.NewStream(s.stream.config))
		if err := a.Import(i, arrived[i]); err != nil {
			return fmt.Errorf("stream %d: %w", i, err)
		}
		if err := into.check(); err != nil {
			return fmt.Errorf("after stream %d: %w", i, err)
		}
		wild = append(wild, s.wild || taken.Orphans > 0)
		models = append(models, s.model)
		if err := w.compare(into, arrived[i], models[i], wild[i]); err != nil {
			return fmt.Errorf("stream %d: %w", i, err)
		}
		for range 20 {
			w.step()
		}
	}
	for _, s := range arrived {
		s.Close()
	}
	return into.empty()
}

// compare asks one stream of a set about some prompts.
func (w *world) compare(set *Set, s *Stream, m *model, wild bool) error {
	old := w.set
	w.set, w.roster = set, nil
	defer func() { w.set, w.roster = old, nil }()
	for range 20 {
		p := w.prompt(16)
		rows := make([]Row, 1)
		set.Match(w.query(p), []*Stream{s}, rows)
		want := m.match(p.tokens, p.lora, p.salt)
		if wild {
			want.Disk = m.most(p.tokens, p.lora, p.salt)
			if rows[0].Disk > want.Disk {
				return fmt.Errorf("holds of %v: %d, at most %d", p, rows[0].Disk, want.Disk)
			}
			continue
		}
		if got := rows[0]; got.Device != want.Device || got.Host != want.Host || got.Disk != want.Disk {
			return fmt.Errorf("holds of %v: %d %d %d, should be %d %d %d", p,
				got.Device, got.Host, got.Disk, want.Device, want.Host, want.Disk)
		}
	}
	return nil
}

// TestExportBesideWriters: streams are written to at full speed by goroutines of
// their own while they are exported, one held back at a time, in turns of a few
// runs; each arrives as it was when it was held back.
func TestExportBesideWriters(t *testing.T) {
	defer func(cost int) { turnCost = cost }(turnCost)
	turnCost = 300
	for seed := uint64(1); seed <= 2; seed++ {
		besideWriters(t, seed)
	}
}

func besideWriters(t *testing.T, seed uint64) {
	whole := newWorld(seeded{rand.New(rand.NewPCG(seed, 31))})
	whole.streams = whole.streams[:min(4, len(whole.streams))]
	worlds := make([]*world, len(whole.streams)) // one for each writer
	locks := make([]sync.Mutex, len(worlds))
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i, s := range whole.streams {
		w := &world{choose: seeded{rand.New(rand.NewPCG(seed, uint64(100+i)))}, set: whole.set, streams: []*subject{s}}
		worlds[i] = w
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				locks[i].Lock()
				if s := w.streams[0]; len(s.model.nodes) > 400 {
					s.stream.Clear()
					s.model.restart()
				}
				w.step()
				locks[i].Unlock()
			}
		})
	}
	for range 8 {
		a, into := new(Archive), New(Options{})
		e := whole.set.Export()
		for i, w := range worlds {
			locks[i].Lock()
			s := w.streams[0]
			e.Prepare(s.stream)
			taken, ok := e.Take(s.stream)
			ask := &world{choose: seeded{rand.New(rand.NewPCG(seed, 7))}, set: into}
			held := *s.model
			held.nodes = make(map[modelKey]*modelNode, len(s.model.nodes))
			for k, n := range s.model.nodes {
				c := *n
				c.copies = maps.Clone(n.copies)
				held.nodes[k] = &c
			}
			held.newest, held.groups, held.full = maps.Clone(s.model.newest), cloneGroups(s.model.groups), cloneFull(s.model.full)
			locks[i].Unlock()
			if !ok {
				t.Fatal("closed")
			}
			if err := e.Chunks(a.Add); err != nil {
				t.Fatal(err)
			}
			in := into.NewStream(s.stream.config)
			if err := a.Import(i, in); err != nil {
				t.Fatalf("seed %d, stream %d: %v", seed, i, err)
			}
			if err := ask.compare(into, in, &held, s.wild || taken.Orphans > 0); err != nil {
				t.Fatalf("seed %d, stream %d: %v", seed, i, err)
			}
		}
		e.Close()
		if err := into.check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	close(stop)
	wg.Wait()
	if err := whole.set.check(); err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
}

func cloneGroups(m map[int32]*modelGroup) map[int32]*modelGroup {
	out := make(map[int32]*modelGroup, len(m))
	for k, g := range m {
		c := *g
		out[k] = &c
	}
	return out
}

func cloneFull(m map[modelTree]map[int32]bool) map[modelTree]map[int32]bool {
	out := make(map[modelTree]map[int32]bool, len(m))
	for k, v := range m {
		out[k] = maps.Clone(v)
	}
	return out
}

// TestChunkBytes: the form on disk and between replicas is fixed. A change of
// it needs another ChunkVersion.
func TestChunkBytes(t *testing.T) {
	set := New(Options{})
	s := set.NewStream(StreamConfig{})
	l := newLoader()
	store := func(ev zmqwire.Event) { s.Apply(l.prepare(ev)) }
	ev := zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: []zmqwire.EngineHash{0x11, 0x22, 0x33},
		Tokens: []uint32{1, 2, 3}, BlockSize: 1, Group: zmqwire.NoGroup}
	store(ev)
	fork := ev
	fork.Hashes, fork.Tokens, fork.HasParent, fork.Parent = []zmqwire.EngineHash{0x44}, []uint32{9}, true, 0x22
	store(fork)
	store(fork) // a second copy
	fork.Medium = []byte("CPU")
	store(fork)
	s.Apply(l.prepare(zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: []zmqwire.EngineHash{0x33}, Group: zmqwire.NoGroup}))
	chunks, _, err := exported(set, []*Stream{s})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range chunks {
		got = append(got, fmt.Sprintf("%x", c))
	}
	want := []string{
		"01540101000402040003030d069e87a05d35c8b135cfe71e16d801ca68179d96bf208007000000000000001100000000000000220000000000000033000000000000000205010100" +
			"01a3da26fd38a39c7301000000000000004400000000000000",
		"01530001020100000100010001010002000002000100010100030002030100030000000000000003020201020001000000000000000101000000000000000501000001" +
			"0700023300000000000000000a0204",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
}

// TestImportIntoLiveSet: a set that holds other streams' blocks already takes
// one in, whatever the way its runs are cut there.
func TestImportIntoLiveSet(t *testing.T) {
	for seed := uint64(1); seed <= 60; seed++ {
		w := newWorld(seeded{rand.New(rand.NewPCG(seed, 17))})
		other := newWorld(seeded{rand.New(rand.NewPCG(seed, 19))})
		for range 100 {
			w.step()
			other.step()
		}
		var streams []*Stream
		for _, s := range w.streams {
			streams = append(streams, s.stream)
		}
		chunks, orphans, err := exported(w.set, streams)
		if err != nil {
			t.Fatal(err)
		}
		a, err := archived(chunks)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range w.streams {
			in := other.set.NewStream(s.stream.config)
			if err := a.Import(i, in); err != nil {
				t.Fatalf("seed %d, stream %d: %v", seed, i, err)
			}
			if err := w.compare(other.set, in, s.model, s.wild || orphans[i] > 0); err != nil {
				t.Fatalf("seed %d, stream %d: %v", seed, i, err)
			}
			if i%2 == 0 {
				in.Close()
			}
			other.step()
			if err := other.check(); err != nil {
				t.Fatalf("seed %d, stream %d: %v", seed, i, err)
			}
			if err := other.set.check(); err != nil {
				t.Fatalf("seed %d, stream %d: %v", seed, i, err)
			}
		}
	}
}

func TestImportRefuses(t *testing.T) {
	w := newWorld(seeded{rand.New(rand.NewPCG(4, 4))})
	for range 100 {
		w.step()
	}
	var streams []*Stream
	for _, s := range w.streams {
		streams = append(streams, s.stream)
	}
	chunks, _, err := exported(w.set, streams)
	if err != nil {
		t.Fatal(err)
	}
	a, err := archived(chunks)
	if err != nil {
		t.Fatal(err)
	}
	cfg := streams[0].config
	cfg.EagleDrop = !cfg.EagleDrop
	set := New(Options{})
	if err := a.Import(0, set.NewStream(cfg)); !errors.Is(err, ErrSettings) {
		t.Errorf("other settings: %v", err)
	}
	newer := slices.Clone(chunks[0])
	newer[0] = ChunkVersion + 1
	if err := new(Archive).Add(newer); !errors.Is(err, ErrChunk) || err.Error() != "unusable index chunk: version 2, this program reads version 1" {
		t.Errorf("a newer version: %v", err)
	}
	a.Drop(0)
	if err := a.Import(0, set.NewStream(streams[0].config)); err == nil {
		t.Error("a stream that was dropped came back")
	}
}

// TestDamagedChunks: every single byte of an export that is another one gives
// an error, or a set that is well-formed; and never a panic.
func TestDamagedChunks(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	w := newWorld(seeded{rng})
	for range 120 {
		w.step()
	}
	var streams []*Stream
	for _, s := range w.streams {
		streams = append(streams, s.stream)
	}
	chunks, _, err := exported(w.set, streams)
	if err != nil {
		t.Fatal(err)
	}
	for n := range chunks {
		step := 1 + len(chunks[n])/150
		for at := 0; at < len(chunks[n]); at += step {
			damaged := slices.Clone(chunks)
			damaged[n] = slices.Clone(chunks[n])
			damaged[n][at] ^= 1 << rng.IntN(8)
			if err := importAll(damaged); err != nil {
				t.Fatalf("chunk %d, byte %d: %v", n, at, err)
			}
			damaged[n] = chunks[n][:at]
			if err := importAll(damaged); err != nil {
				t.Fatalf("chunk %d cut at byte %d: %v", n, at, err)
			}
		}
	}
}

// importAll takes in what can be, and says what is wrong with the set then.
func importAll(chunks [][]byte) error {
	a := new(Archive)
	for _, c := range chunks {
		if err := a.Add(c); err != nil {
			if !errors.Is(err, ErrChunk) {
				return err
			}
			break
		}
	}
	set := New(Options{})
	var all []*Stream
	for i := range a.Streams() {
		for _, drop := range []bool{false, true} {
			s := set.NewStream(StreamConfig{EagleDrop: drop})
			all = append(all, s)
			err := a.Import(i, s)
			if err != nil && !errors.Is(err, ErrChunk) && !errors.Is(err, ErrSettings) {
				return err
			}
			if err := set.check(); err != nil {
				return fmt.Errorf("stream %d: %w", i, err)
			}
			if err != nil && s.Stats().Resident != [normalize.NoTier]int64{} {
				return fmt.Errorf("stream %d: refused, and holds %v", i, s.Stats().Resident)
			}
		}
	}
	for _, s := range all {
		s.Close()
	}
	return set.empty()
}

func FuzzArchive(f *testing.F) {
	for seed := range uint64(6) {
		w := newWorld(seeded{rand.New(rand.NewPCG(seed, 23))})
		for range 12 {
			w.step()
		}
		var streams []*Stream
		for _, s := range w.streams {
			streams = append(streams, s.stream)
		}
		chunks, _, err := exported(w.set, streams)
		if err != nil || len(chunks) < 2 {
			f.Fatal(len(chunks), err)
		}
		f.Add(chunks[0], chunks[1])
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		if err := importAll([][]byte{one, two}); err != nil {
			t.Fatal(err)
		}
	})
}

// TestImportKeepsTheBudget: what is more than the budget goes, and the rest is
// well-formed; an export of a set that is being trimmed is too.
func TestImportKeepsTheBudget(t *testing.T) {
	const blocks, chains = 64, 400
	full, l := New(Options{}), newLoader()
	s := full.NewStream(StreamConfig{})
	for c := range uint64(chains) {
		s.Apply(l.prepare(newChain(c, blocks, 1).store(0, blocks)))
	}
	chunks, _, err := exported(full, []*Stream{s})
	if err != nil {
		t.Fatal(err)
	}
	a, err := archived(chunks)
	if err != nil {
		t.Fatal(err)
	}
	tight := New(Options{Budget: NewBudget(full.Stats().Bytes / 2)})
	in := tight.NewStream(StreamConfig{})
	if err := a.Import(0, in); err != nil {
		t.Fatal(err)
	}
	if err := tight.check(); err != nil {
		t.Error(err)
	}
	held := tight.Stats().Memberships
	if held == 0 || held == blocks*chains || in.Stats().Trimmed == 0 {
		t.Errorf("%d blocks of %d: %+v", held, blocks*chains, in.Stats())
	}
	if chunks, _, err = exported(tight, []*Stream{in}); err != nil {
		t.Fatal(err)
	}
	if a, err = archived(chunks); err != nil {
		t.Fatal(err)
	}
	again := New(Options{})
	back := again.NewStream(StreamConfig{})
	if err := a.Import(0, back); err != nil || back.Stats().Resident[normalize.Device] != held {
		t.Errorf("%v: %d blocks of %d", err, back.Stats().Resident[normalize.Device], held)
	}
	if err := again.check(); err != nil {
		t.Error(err)
	}
}

// TestExportKeepsNothing: an export that ended leaves the trees as they were.
func TestExportKeepsNothing(t *testing.T) {
	set := New(Options{})
	s := set.NewStream(StreamConfig{})
	s.Apply(newLoader().prepare(newChain(1, 100, 0).store(0, 100)))
	if _, _, err := exported(set, []*Stream{s}); err != nil {
		t.Fatal(err)
	}
	if n := len(set.trees[0].exports); n != 0 {
		t.Errorf("%d exports left", n)
	}
	s.Close()
	e := set.Export()
	defer e.Close()
	if _, ok := e.Take(s); ok {
		t.Error("took a closed stream")
	}
}

// BenchmarkSnapshot: 5 M memberships of 32 streams in chains of 128 blocks, and
// 20 M with KVINDEXD_LONG=1: what taking and encoding cost of one core, what
// reading back and importing does, the bytes of a membership before
// compression, and the longest that one stream's writer and one query wait.
func BenchmarkSnapshot(b *testing.B) {
	sizes := []int{5_000_000}
	if os.Getenv("KVINDEXD_LONG") == "1" {
		sizes = append(sizes, 20_000_000)
	}
	for _, n := range sizes {
		m := fmt.Sprintf("%dM-", n/1_000_000)
		b.Run(m+"unique", func(b *testing.B) { benchSnapshot(b, n, false, 1) })
		b.Run(m+"shared32", func(b *testing.B) { benchSnapshot(b, n, true, 1) })
		b.Run(m+"shared32same", func(b *testing.B) { benchSnapshot(b, n, true, 0) })
	}
}

func benchSnapshot(b *testing.B, memberships int, shared bool, seedStep uint64) {
	set, all := filledSet(memberships, shared, seedStep)
	n := float64(set.Stats().Memberships)
	stop, longest := keepAsking(set, all)
	time.Sleep(300 * time.Millisecond)
	close(stop)
	idle := <-longest
	for b.Loop() {
		var chunks [][]byte
		size := 0
		stop, longest := keepAsking(set, all)
		runtime.LockOSThread()
		start, frozen := threadTime(), time.Duration(0)
		e := set.Export()
		for _, s := range all {
			e.Prepare(s)
			began := threadTime()
			e.Take(s)
			frozen = max(frozen, threadTime()-began)
			e.Chunks(func(c []byte) error {
				chunks = append(chunks, slices.Clone(c))
				size += len(c)
				return nil
			})
		}
		e.Close()
		b.ReportMetric((threadTime() - start).Seconds(), "export-s")
		close(stop)
		b.ReportMetric(float64((<-longest).Microseconds()), "longest-query-µs")
		b.ReportMetric(float64(frozen.Microseconds()), "longest-freeze-µs")
		start = threadTime()
		a, err := archived(chunks)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric((threadTime() - start).Seconds(), "read-s")
		into := New(Options{})
		start = threadTime()
		for i := range all {
			if err := a.Import(i, into.NewStream(StreamConfig{})); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric((threadTime() - start).Seconds(), "import-s")
		runtime.UnlockOSThread()
		b.ReportMetric(float64(size)/n, "B/membership")
		b.ReportMetric(float64(a.Bytes())/n, "archive-B/membership")
		if got := into.Stats().Memberships; float64(got) != n {
			b.Fatalf("%d memberships of %g", got, n)
		}
	}
	b.ReportMetric(float64(idle.Microseconds()), "idle-longest-query-µs")
	b.ReportMetric(0, "ns/op")
}

func filledSet(memberships int, shared bool, seedStep uint64) (*Set, []*Stream) {
	const streams, blocks = 32, 128
	set, l, batch := New(Options{}), newLoader(), new(normalize.Batch)
	ch := newChain(0, blocks, 0)
	var all []*Stream
	for range streams {
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
	return set, all
}

// keepAsking asks the set and writes to it until stop is closed, and tells the
// longest that an answer took, beyond what writing alone makes of it.
func keepAsking(set *Set, all []*Stream) (stop chan struct{}, longest chan time.Duration) {
	stop, longest = make(chan struct{}), make(chan time.Duration, 1)
	q := queryOf(set, newChain(0, 128, 0).tokens)
	writer := set.NewStream(StreamConfig{})
	l := newLoader()
	go func() {
		defer writer.Close()
		for n := uint64(0); ; n++ {
			select {
			case <-stop:
				return
			default:
				writer.Apply(l.prepare(newChain(n|1<<60, 8, 0).store(0, 8)))
				time.Sleep(time.Millisecond)
			}
		}
	}()
	go func() {
		rows := make([]Row, len(all))
		worst := time.Duration(0)
		for {
			select {
			case <-stop:
				longest <- worst
				return
			default:
				start := time.Now()
				set.Match(q, all, rows)
				worst = max(worst, time.Since(start))
				time.Sleep(200 * time.Microsecond)
			}
		}
	}()
	return stop, longest
}

// A doomed block is one with several handles: an archive that says it of another
// is refused.
func TestImportDoomedWithoutRivals(t *testing.T) {
	x, l := New(Options{}), newLoader()
	s := x.NewStream(StreamConfig{})
	c := newChain(1, 2, 0)
	s.Apply(l.prepare(c.store(0, 2)))
	s.Apply(l.prepare(c.remove(1)))
	m := s.members[0]
	m.doomed = map[ref]struct{}{m.dormant[0].block: {}}
	chunks, _, err := exported(x, []*Stream{s})
	if err != nil {
		t.Fatal(err)
	}
	a, err := archived(chunks)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Import(0, New(Options{}).NewStream(StreamConfig{})); !errors.Is(err, ErrChunk) {
		t.Errorf("%v, want %v", err, ErrChunk)
	}
}
