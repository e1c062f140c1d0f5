package fleet

import (
	"errors"
	"testing"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// Ranks come and go one by one, as registrations tell them, and those that stay
// keep what they hold.
func TestRanksComeAndGo(t *testing.T) {
	noLeaks(t)
	engines := make([]*engine, 3)
	at := make([]RankSpec, 3)
	for i := range engines {
		e := newEngine(t, zmqwire.PublisherConfig{})
		e.rank, e.life = int32(i), uint32(i)
		engines[i], at[i] = e, RankSpec{Rank: i, Endpoint: "tcp://" + e.events.Addr()}
	}
	a, b, c := engines[0], engines[1], engines[2]
	f := running(t, Options{})
	register := func(ranks ...RankSpec) {
		t.Helper()
		if err := f.Register(WorkerSpec{ID: "w", Model: "m", Ranks: ranks}); err != nil {
			t.Fatal(err)
		}
	}
	// Without a replay endpoint, what a rank has forgotten nobody tells again.
	follows := func(e *engine, stream string, n int) {
		t.Helper()
		eventually(t, func() string {
			e.store(n) // until the subscription is there
			if device(t, f, "m", stream, block{e.life, n}.tokens()...) == 0 {
				return stream + " does not follow its publisher"
			}
			return ""
		})
	}
	holds := func(e *engine, stream string, n int) {
		t.Helper()
		if device(t, f, "m", stream, block{e.life, n}.tokens()...) == 0 {
			t.Errorf("%s has forgotten what it holds", stream)
		}
	}
	register(at[0])
	follows(a, "w/0", 1)
	register(at[0], at[1])
	follows(b, "w/1", 1)
	holds(a, "w/0", 1)
	register(at[0], at[1], at[2])
	follows(c, "w/2", 1)
	register(at[1], at[2])
	holds(b, "w/1", 1)
	holds(c, "w/2", 1)
	if n := len(f.Sets()[0].Members); n != 2 {
		t.Errorf("%d members, want 2", n)
	}
	waitWorkers(t, f, "w g1")

	// A rank that comes back has forgotten everything.
	register(at[0], at[1], at[2])
	if got := device(t, f, "m", "w/0", block{a.life, 1}.tokens()...); got != 0 {
		t.Errorf("a new rank is credited with %d tokens of the old", got)
	}
	follows(a, "w/0", 2)
	holds(b, "w/1", 1)

	// Another publisher in a rank's place is a new life.
	register(at[0], at[1], RankSpec{Rank: 2, Endpoint: "tcp://127.0.0.1:1"})
	waitWorkers(t, f, "w g2")

	err := f.Register(WorkerSpec{ID: "w", Model: "m", Ranks: []RankSpec{at[0], {Rank: 1, Endpoint: at[0].Endpoint}}})
	if !errors.Is(err, ErrConflict) {
		t.Errorf("two ranks on one publisher: %v, want ErrConflict", err)
	}
}
