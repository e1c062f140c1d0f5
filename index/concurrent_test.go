package index

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// toggler stores and drops one chain again and again, and says when it is done
// with which: a reader that sees the same turn before and after its query knows
// what the stream held throughout.
type toggler struct {
	stream *Stream
	chain  chain
	// turn counts half-steps: 4k: gone; 4k+1: being stored; 4k+2: there;
	// 4k+3: being dropped.
	turn atomic.Int64
}

func (g *toggler) run(l *loader, rng *rand.Rand, stop *atomic.Bool) {
	blocks := len(g.chain.hashes)
	store := l.prepare(g.chain.store(0, blocks))
	again := l.prepare(append(g.removals(), g.chain.store(0, blocks))...)
	removals := l.prepare(g.removals()...)
	cleared := l.prepare(zmqwire.Event{Kind: zmqwire.AllBlocksCleared})
	for !stop.Load() {
		g.turn.Add(1)
		g.stream.Apply(store)
		g.turn.Add(1)
		for range rng.IntN(4) { // gone and back within one batch: never seen
			g.stream.Apply(again)
		}
		g.turn.Add(1)
		switch rng.IntN(3) {
		case 0:
			g.stream.Apply(cleared)
		case 1:
			g.stream.Clear()
		default:
			g.stream.Apply(removals)
		}
		g.turn.Add(1)
	}
}

func (g *toggler) removals() (events []zmqwire.Event) {
	for i := len(g.chain.hashes) - 1; i >= 0; i-- {
		events = append(events, g.chain.remove(i))
	}
	return events
}

// TestConcurrentNeverTooLong: queries during stores, removals, clears and
// restarts of streams that share their content, with another that branches off
// it everywhere. A stream that held nothing throughout a query must not be
// credited; one that held everything throughout must be, in full.
func TestConcurrentNeverTooLong(t *testing.T) {
	const blocks = 150
	x := New(Options{})
	var togglers []*toggler
	var streams []*Stream
	for i := range 12 {
		seed := uint64(0)
		if i%3 == 0 {
			seed = uint64(i) + 1 // own handles
		}
		g := &toggler{stream: x.NewStream(StreamConfig{}), chain: newChain(7, blocks, seed)}
		togglers, streams = append(togglers, g), append(streams, g.stream)
	}
	roster := x.NewRoster(streams, nil)

	var stop atomic.Bool
	var writers, readers sync.WaitGroup
	for i, g := range togglers {
		writers.Go(func() { g.run(newLoader(), rand.New(rand.NewPCG(uint64(i), 1)), &stop) })
	}
	writers.Go(func() { branch(x, &stop) })
	errs := make(chan error, 64)
	for r := range 4 {
		readers.Go(func() {
			if err := watch(roster, queryOf(New(Options{}), newChain(7, blocks, 0).tokens), togglers, 50_000, r); err != nil {
				errs <- err
			}
		})
	}
	readers.Wait()
	stop.Store(true)
	writers.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
}

func watch(roster *Roster, q *Query, togglers []*toggler, queries, reader int) error {
	rows := make([]Row, len(togglers))
	before := make([]int64, len(togglers))
	full := q.PromptTokens
	quiet := 0
	for range queries {
		for i, g := range togglers {
			before[i] = g.turn.Load()
		}
		roster.Match(q, rows)
		for i, g := range togglers {
			if g.turn.Load() != before[i] {
				continue
			}
			quiet++
			switch got := rows[i].Device; {
			case before[i]%4 == 0 && got != 0:
				return fmt.Errorf("stream %d held nothing throughout, credited with %d tokens", i, got)
			case before[i]%4 == 2 && got != full:
				return fmt.Errorf("stream %d held all throughout, credited with %d tokens of %d", i, got, full)
			}
		}
	}
	if quiet == 0 {
		return fmt.Errorf("reader %d never saw a stream at rest", reader)
	}
	return nil
}

// branch stores and drops chains that leave the shared one at every block.
func branch(x *Set, stop *atomic.Bool) {
	l := newLoader()
	st := x.NewStream(StreamConfig{})
	defer st.Close()
	trunk := newChain(7, 150, 500)
	for id := uint64(1000); !stop.Load(); id++ {
		side := newChain(id, 3, 500)
		at := int(id % 149)
		ev := side.store(0, 3)
		ev.HasParent, ev.Parent = true, trunk.hashes[at]
		st.Apply(l.prepare(trunk.store(0, at+1), ev))
		if id%5 == 0 {
			st.Clear()
		}
	}
}

// TestClearOfManyRuns: a clear that takes several slices gives its slot back
// once, at the end.
func TestClearOfManyRuns(t *testing.T) {
	x := New(Options{})
	l := newLoader()
	big := x.NewStream(StreamConfig{})
	for id := range uint64(5 * sweepRuns) {
		big.Apply(l.prepare(newChain(id, 3, 0).store(0, 3)))
	}
	big.Clear()
	var streams []*Stream
	for id := range uint64(8) {
		streams = append(streams, x.NewStream(StreamConfig{}))
		streams[id].Apply(l.prepare(newChain(id, 3, 0).store(0, 3)))
	}
	if err := x.check(); err != nil {
		t.Fatal(err)
	}
	for id := range uint64(8) {
		rows := make([]Row, len(streams))
		x.Match(queryOf(x, newChain(id, 3, 0).tokens), streams, rows)
		for i, row := range rows {
			if held := row.Device > 0; held != (uint64(i) == id) {
				t.Errorf("stream %d, chain %d: %d tokens", i, id, row.Device)
			}
		}
	}
}

// TestAllocations: the steady state of applying and asking allocates nothing.
func TestAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool forget")
	}
	x := New(Options{})
	l := newLoader()
	s := x.NewStream(StreamConfig{})
	for id := uint64(100); id < 200; id++ { // what it holds throughout
		s.Apply(l.prepare(newChain(id, 64, 0).store(0, 64)))
	}
	c := newChain(1, 64, 0)
	store, remove := l.prepare(c.store(0, 64)), l.prepare(c.removals()...)
	q := queryOf(x, c.tokens)
	roster := x.NewRoster([]*Stream{s}, nil)
	rows := make([]Row, 1)
	for range 50 { // the rings fill
		s.Apply(store)
		s.Apply(remove)
	}
	f := func(what string, most float64, run func()) {
		if got := testing.AllocsPerRun(100, run); got > most {
			t.Errorf("%s: %v allocations, at most %v", what, got, most)
		}
	}
	f("store and remove 64 blocks", 0, func() { s.Apply(store); s.Apply(remove) })
	s.Apply(store)
	f("a lookup", 0, func() { roster.Match(q, rows) })
}
