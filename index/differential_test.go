package index

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// The differential test writes random histories into the index and the model,
// and asks both the same questions.

// chooser is where a history's choices come from: rapid, which shrinks them, or
// a seeded source, which is faster.
type chooser interface{ below(n int) int }

type drawn struct{ t *rapid.T }

func (d drawn) below(n int) int { return rapid.IntRange(0, n-1).Draw(d.t, "n") }

type seeded struct{ *rand.Rand }

func (s seeded) below(n int) int { return s.IntN(n) }

// world is a worker set under test beside its models.
type world struct {
	choose  chooser
	set     *Set
	streams []*subject
	roster  *Roster // of the streams, as a picture of the fleet keeps it
	ops     int
	last    string // what the last batch was, for a failure
}

type subject struct {
	stream *Stream
	model  *model
	norm   *normalize.Normalizer
	batch  normalize.Batch

	bs      uint32 // of its full-attention groups
	naming  int    // how it calls its blocks
	groups  []zmqwire.Event
	unusual bool // it also sends handles that stand for other blocks already
	// wild: beside that, it names parents that nobody announced. Which of two
	// handles for one content is the newest is then open, so that its answers
	// are only held against the most that any of them can give.
	wild bool
}

func newWorld(c chooser) *world {
	w := &world{choose: c, set: New(Options{})}
	for n := []int{2, 4, 12}[c.below(3)]; n > 0; n-- {
		w.streams = append(w.streams, w.newSubject())
	}
	return w
}

func (w *world) newSubject() *subject {
	cfg := StreamConfig{Name: "w", EagleDrop: w.choose.below(8) == 0}
	s := &subject{
		stream: w.set.NewStream(cfg), model: newModel(cfg),
		norm:    normalize.NewNormalizer(normalize.View{}),
		bs:      []uint32{1, 1, 2}[w.choose.below(3)],
		naming:  w.choose.below(4),
		unusual: w.choose.below(4) == 0,
	}
	s.wild = (s.unusual || s.naming == 2) && w.choose.below(2) == 0
	full := zmqwire.Event{Group: 0, Spec: []byte("full_attention"), BlockSize: s.bs}
	s.groups = []zmqwire.Event{full}
	switch w.choose.below(6) {
	case 0: // two full groups
		s.groups = append(s.groups, zmqwire.Event{Group: 1, Spec: full.Spec, BlockSize: s.bs})
	case 1: // a window
		s.groups = append(s.groups, zmqwire.Event{Group: 1, Spec: []byte("sliding_window"), Window: 4, BlockSize: s.bs})
	case 2: // windows of two sizes
		s.groups = append(s.groups, zmqwire.Event{Group: 1, Spec: []byte("sliding_window"), Window: 4, BlockSize: s.bs},
			zmqwire.Event{Group: 2, Spec: []byte("sliding_window"), Window: 6, BlockSize: 2 * s.bs})
	case 3: // an old publisher names no group
		s.groups = []zmqwire.Event{{Group: zmqwire.NoGroup, BlockSize: s.bs}}
	}
	return s
}

// prompt is a path in a small tree of contents: few tokens, so that chains meet.
type prompt struct {
	tokens     []uint32
	lora, salt string
}

func (w *world) prompt(atMost int) prompt {
	n := 1 + w.choose.below(atMost)
	p := prompt{tokens: make([]uint32, n)}
	turn := w.choose.below(n + 1)
	for i := range p.tokens {
		p.tokens[i] = uint32(i)
		if i >= turn {
			p.tokens[i] += 1000
		}
	}
	if w.choose.below(6) == 0 && n > 2 {
		p.tokens[w.choose.below(n)] += 2000
	}
	switch w.choose.below(8) {
	case 0:
		p.lora = "a"
	case 1:
		p.salt = "s"
	}
	return p
}

// name is the stream's handle of the block that ends a prefix.
func (s *subject) name(w *world, prefix []uint32, p prompt) zmqwire.EngineHash {
	h := uint64(14695981039346656037)
	mix := func(v uint64) { h = (h ^ v) * 1099511628211 }
	for _, t := range prefix {
		mix(uint64(t) + 7)
	}
	mix(uint64(len(p.lora)*2 + len(p.salt)))
	switch s.naming {
	case 1: // its own hash seed
		mix(uint64(uintptrOf(w, s)) + 99)
	case 2: // re-pointed adapters: now and then another handle
		if w.choose.below(6) == 0 {
			mix(uint64(1 + w.choose.below(2)))
		}
	}
	if s.unusual && w.choose.below(12) == 0 {
		return zmqwire.EngineHash(w.choose.below(20))
	}
	return zmqwire.EngineHash(h)
}

func uintptrOf(w *world, s *subject) int {
	for i, o := range w.streams {
		if o == s {
			return i
		}
	}
	return -1
}

func (w *world) medium() []byte {
	switch w.choose.below(10) {
	case 0, 1:
		return []byte("CPU")
	case 2:
		return []byte("DISK")
	}
	return []byte("GPU")
}

// storeEvents makes the stores of one stretch of a prompt, one per group.
func (w *world) storeEvents(s *subject, events []zmqwire.Event) []zmqwire.Event {
	long := 12
	if w.choose.below(10) == 0 {
		long = 200
	}
	p := w.prompt(long)
	medium := w.medium()
	for _, g := range s.groups {
		if w.choose.below(8) == 0 {
			continue
		}
		if ev, ok := w.storeEvent(s, g, p, medium); ok {
			events = append(events, ev)
		}
	}
	return events
}

func (w *world) storeEvent(s *subject, g zmqwire.Event, p prompt, medium []byte) (zmqwire.Event, bool) {
	ev := g
	ev.Kind, ev.Medium = zmqwire.BlockStored, medium
	if p.lora != "" {
		ev.LoraName = []byte(p.lora)
	}
	bs := int(g.BlockSize)
	blocks := len(p.tokens) / bs
	if blocks == 0 {
		return ev, false
	}
	from := 0
	if w.choose.below(2) == 0 {
		from = w.choose.below(blocks)
	}
	to := from + 1 + w.choose.below(blocks-from)
	if from > 0 {
		ev.HasParent, ev.Parent = true, s.name(w, p.tokens[:from*bs], p)
		if (s.unusual || s.naming == 2) && !s.wild && !s.model.placed(&ev) {
			return ev, false
		}
	} else if p.salt != "" {
		ev.CacheSalt = []byte(p.salt)
	}
	seen := map[zmqwire.EngineHash]bool{ev.Parent: ev.HasParent}
	for i := from; i < to; i++ {
		e := s.name(w, p.tokens[:(i+1)*bs], p)
		if seen[e] {
			return ev, false
		}
		seen[e] = true
		ev.Hashes = append(ev.Hashes, e)
	}
	ev.Tokens = p.tokens[from*bs : to*bs]
	switch w.choose.below(12) {
	case 0: // placement only
		ev.Tokens, ev.BlockSize = nil, 0
	case 1: // blocks outside the window are left out of the hashes
		if len(ev.Hashes) > 1 {
			ev.Hashes = ev.Hashes[1:]
		}
	}
	return ev, true
}

func (w *world) removeEvents(s *subject, events []zmqwire.Event) []zmqwire.Event {
	p := w.prompt(12)
	medium := w.medium()
	for n := 1 + w.choose.below(4); n > 0; n-- {
		g := s.groups[w.choose.below(len(s.groups))]
		bs := int(g.BlockSize)
		blocks := len(p.tokens) / bs
		if blocks == 0 {
			continue
		}
		ev := zmqwire.Event{Kind: zmqwire.BlockRemoved, Medium: medium, Group: g.Group}
		if w.choose.below(20) == 0 {
			ev.Group = zmqwire.NoGroup
		}
		for i := w.choose.below(blocks) + 1; i > 0 && len(ev.Hashes) < 3; i-- {
			ev.Hashes = append(ev.Hashes, s.name(w, p.tokens[:i*bs], p))
			if w.choose.below(30) == 0 {
				ev.Remaining = make([]uint32, len(ev.Hashes))
				for k := range ev.Remaining {
					ev.Remaining[k] = uint32(w.choose.below(3))
				}
				break
			}
		}
		if ev.Remaining != nil && len(ev.Remaining) != len(ev.Hashes) {
			ev.Remaining = nil
		}
		events = append(events, ev)
	}
	return events
}

// step applies one random batch, or lets something happen to a stream.
func (w *world) step() {
	i := w.choose.below(len(w.streams))
	s := w.streams[i]
	switch w.choose.below(60) {
	case 0: // restart
		w.last = fmt.Sprintf("stream %d restarts", i)
		s.stream.Clear()
		s.model.restart()
		return
	case 1: // the worker goes, and another comes
		w.last = fmt.Sprintf("stream %d is another", i)
		s.stream.Close()
		w.streams[i] = w.newSubject()
		w.roster = nil
		return
	}
	var events []zmqwire.Event
	for n := 1 + w.choose.below(3); n > 0; n-- {
		switch w.choose.below(20) {
		case 0:
			events = append(events, zmqwire.Event{Kind: zmqwire.AllBlocksCleared})
		case 1, 2, 3, 4, 5, 6, 7, 8:
			events = w.removeEvents(s, events)
		default:
			events = w.storeEvents(s, events)
		}
	}
	w.last = fmt.Sprintf("stream %d: %s", i, describe(events))
	w.ops += len(events)
	s.norm.Normalize(&s.batch, &zmqwire.Batch{Events: events})
	s.stream.Apply(&s.batch)
	s.model.apply(events)
}

func describe(events []zmqwire.Event) string {
	out := ""
	for i := range events {
		ev := &events[i]
		out += fmt.Sprintf("\n  %v %x <- %x(%v) tokens %v bs %d group %d %s %s lora %q salt %q left %v",
			ev.Kind, ev.Hashes, ev.Parent, ev.HasParent, ev.Tokens, ev.BlockSize, ev.Group, ev.Spec, ev.Medium,
			ev.LoraName, ev.CacheSalt, ev.Remaining)
	}
	return out
}

// ask compares one answer of every stream.
func (w *world) ask() error {
	p := w.prompt(16)
	if w.roster == nil {
		streams := make([]*Stream, len(w.streams))
		for i, s := range w.streams {
			streams[i] = s.stream
		}
		w.roster = w.set.NewRoster(streams, nil)
	}
	rows := make([]Row, len(w.streams))
	w.roster.Match(w.query(p), rows)
	for i, s := range w.streams {
		got, want := rows[i], s.model.match(p.tokens, p.lora, p.salt)
		if s.wild {
			if most := s.model.most(p.tokens, p.lora, p.salt); got.Device > most || got.Disk > most {
				return fmt.Errorf("stream %d holds of %v: %d %d %d, at most %d, after %s",
					i, p, got.Device, got.Host, got.Disk, most, w.last)
			}
			continue
		}
		if got.Device != want.Device || got.Host != want.Host || got.Disk != want.Disk {
			return fmt.Errorf("stream %d holds of %v: %d %d %d, should be %d %d %d, after %s",
				i, p, got.Device, got.Host, got.Disk, want.Device, want.Host, want.Disk, w.last)
		}
		if got.Usable > got.Device {
			return fmt.Errorf("stream %d: usable %d of device %d", i, got.Usable, got.Device)
		}
	}
	return nil
}

// askAtMost checks that no stream is credited with more than its model holds.
func (w *world) askAtMost() error {
	p := w.prompt(16)
	q := w.query(p)
	for i, s := range w.streams {
		if s.unusual || s.naming == 2 {
			continue // a handle that was trimmed may come to stand elsewhere
		}
		rows := make([]Row, 1)
		w.set.Match(q, []*Stream{s.stream}, rows)
		if most := s.model.most(p.tokens, p.lora, p.salt); rows[0].Device > most || rows[0].Disk > most {
			return fmt.Errorf("stream %d holds of %v: %+v, at most %d, after %s", i, p, rows[0], most, w.last)
		}
	}
	return nil
}

func (w *world) query(p prompt) *Query {
	pr := normalize.Prompt{Tokens: p.tokens, LoraName: p.lora, CacheSalt: p.salt}
	var view QueryView
	for _, shape := range w.set.Shapes() {
		proj := pr.Project(normalize.View{}, shape)
		var c normalize.Chain
		pr.Chain(&c, &proj, normalize.View{}, shape)
		if w.choose.below(4) == 0 {
			normalize.ChainFromSequences(&c, shape, c.Seqs)
		}
		view.Chains, view.Limits = append(view.Chains, c), append(view.Limits, proj.Limit)
	}
	return &Query{PromptTokens: len(p.tokens), Views: []QueryView{view}}
}

func (w *world) check() error {
	if err := w.ask(); err != nil {
		return err
	}
	if w.choose.below(8) == 0 {
		return w.set.check()
	}
	return nil
}

func TestDifferential(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(drawn{t})
		for n := rapid.IntRange(1, 60).Draw(t, "steps"); n > 0; n-- {
			w.step()
			if err := w.check(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestDifferentialLong runs many histories from seeds: 10^5 operations, 10^6
// with KVINDEXD_LONG=1.
func TestDifferentialLong(t *testing.T) {
	want := 100_000
	if os.Getenv("KVINDEXD_LONG") == "1" {
		want = 1_000_000
	}
	ops := 0
	for seed := uint64(1); ops < want; seed++ {
		w := newWorld(seeded{rand.New(rand.NewPCG(seed, 7))})
		for n := 0; n < 300; n++ {
			w.step()
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
