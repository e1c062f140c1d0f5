package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// quick are pauses for tests: no test depends on their length.
var quick = Timing{
	IdleProbe: 20 * time.Millisecond, MaxIdleProbe: 100 * time.Millisecond,
	ReplayBackoff: 5 * time.Millisecond, MaxReplayBackoff: 20 * time.Millisecond,
	ReplayInactivity: 100 * time.Millisecond,
	DisconnectGrace:  200 * time.Millisecond, Resync: 50 * time.Millisecond, MaxResync: 200 * time.Millisecond,
	Reconnect: 2 * time.Millisecond, MaxReconnect: 20 * time.Millisecond,
	Poll: 100 * time.Millisecond,
}

// running starts a fleet that ends with the test and leaves no goroutine.
func running(t testing.TB, o Options) *Fleet {
	t.Helper()
	if o.Logger == nil {
		o.Logger = quiet
	}
	if o.Timing == (Timing{}) {
		o.Timing = quick
	}
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("Run: %v, want context.Canceled", err)
			}
		case <-time.After(wiretest.Patience):
			buf := make([]byte, 1<<20)
			t.Fatalf("Run does not end\n%s", buf[:runtime.Stack(buf, true)])
		}
	})
	return f
}

// noLeaks fails the test if a goroutine of it outlives its cleanups. It is to be
// called first.
func noLeaks(t testing.TB) {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
}

func statusOf(f *Fleet, stream string) Status {
	for _, p := range f.Sets() {
		for _, m := range p.Members {
			if streamName(m.Worker, m.Rank) == stream {
				return m.Status()
			}
		}
	}
	return Status{LastError: "no such stream"}
}

func countsOf(f *Fleet, stream string) StreamCounts {
	for _, w := range f.Workers() {
		for _, s := range w.Streams {
			if streamName(w.Spec.ID, s.Rank) == stream {
				return s.Counts
			}
		}
	}
	return StreamCounts{}
}

func TestFollowsAPublisher(t *testing.T) {
	noLeaks(t)
	for _, old := range []bool{false, true} {
		e := newEngine(t, zmqwire.PublisherConfig{OldReplyLayout: old})
		e.store(0, 1, 2)
		e.remove(1)
		f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
		e.truth(f, "w/0", Live)
		e.store(3)
		e.remove(0)
		e.truth(f, "w/0", Live)
		if r := f.Ready(); r.Workers != 1 || r.Settled != 1 {
			t.Errorf("ready: %+v", r)
		}
	}
}

func TestSilentReplayEndpoint(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.store(0)
	e.truth(f, "w/0", Live)
	e.replay.Silence(true)
	e.lose(e.encode(e.storeEvent(1)), e.encode(e.storeEvent(2)))
	e.store(3)
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); st.State != Suspect || st.Lost != 2 {
			return fmt.Sprintf("%+v, want suspect with 2 lost", st)
		}
		return ""
	})
	e.replay.Silence(false)
	e.replay.Cut()
	e.truth(f, "w/0", Live)
	if st := statusOf(f, "w/0"); st.Lost != 0 {
		t.Errorf("lost %d after the whole history came", st.Lost)
	}
}

func TestRingTooShort(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{RingSize: 3})
	e.store(0, 1, 2, 3, 4)
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); st.State != Partial || st.Lost != 2 || st.Seq != 4 {
			return fmt.Sprintf("%+v, want partial at 4 with 2 lost", st)
		}
		return ""
	})
	e.events.Refuse(true)
	e.events.Cut()
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); st.State != Disconnected {
			return fmt.Sprintf("%+v, want disconnected", st)
		}
		return ""
	})
	e.store(5, 6, 7, 8, 9, 10)
	e.events.Refuse(false)
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); st.State != Suspect || st.Lost != 5 || st.Seq != 10 {
			return fmt.Sprintf("%+v, want suspect at 10 with 5 lost", st)
		}
		return ""
	})
}

func TestResetByHand(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.store(0, 1)
	e.truth(f, "w/0", Live)
	if err := f.Reset("w"); err != nil {
		t.Fatal(err)
	}
	e.truth(f, "w/0", Live)
	if err := f.Reset("x"); !errors.Is(err, ErrUnknownWorker) {
		t.Errorf("Reset of an unknown worker: %v", err)
	}
}

func TestRanks(t *testing.T) {
	noLeaks(t)
	a, b := newEngine(t, zmqwire.PublisherConfig{}), newEngine(t, zmqwire.PublisherConfig{})
	a.rank, b.rank = 0, 1
	b.life = 1
	spec := WorkerSpec{ID: "w", Model: "m", Ranks: []RankSpec{
		{Rank: 0, Endpoint: "tcp://" + a.events.Addr(), ReplayEndpoint: "tcp://" + a.replay.Addr()},
		{Rank: 1, Endpoint: "tcp://" + b.events.Addr(), ReplayEndpoint: "tcp://" + b.replay.Addr()},
	}}
	f := running(t, Options{Workers: []WorkerSpec{spec}})
	a.store(0, 1)
	b.store(0, 2)
	a.truth(f, "w/0", Live)
	b.truth(f, "w/1", Live)
	// Rank 1's publisher begins to speak of a rank that nobody declared.
	b.rank = 7
	b.held, b.known = map[int]bool{}, map[block]bool{}
	b.store(4)
	b.truth(f, "w/7", Live)
	ms := f.Sets()[0].Members
	if len(ms) != 3 || ms[0].Undeclared || ms[1].Undeclared || !ms[2].Undeclared {
		t.Errorf("members: %+v", ms)
	}
	// One rank's clear is that rank's.
	a.clear()
	a.truth(f, "w/0", Live)
	b.truth(f, "w/7", Live)
	// A rank that another publisher feeds is not taken over.
	b.rank = 0
	b.store(5)
	eventually(t, func() string {
		if got := device(t, f, "m", "w/1", block{1, 5}.tokens()...); got != 4 {
			return "the batch of rank 0 did not stay with its own publisher"
		}
		return ""
	})
	if got := device(t, f, "m", "w/0", block{1, 5}.tokens()...); got != 0 {
		t.Errorf("rank 0 is credited with %d tokens of rank 1", got)
	}
}

func TestRankPorts(t *testing.T) {
	noLeaks(t)
	base := freePortPair(t)
	f := running(t, Options{Workers: []WorkerSpec{{ID: "w", Model: "m", Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", base), DPSize: 2}}})
	for r := range 2 {
		p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", base), Bind: true, DPRank: r, Logger: quiet})
		if err != nil {
			t.Skipf("ports taken meanwhile: %v", err)
		}
		t.Cleanup(func() { p.Close() })
		ctx, cancel := context.WithTimeout(t.Context(), wiretest.Patience)
		defer cancel()
		if err := p.WaitSubscribers(ctx, 1); err != nil {
			t.Fatal(err)
		}
		e := &engine{t: t, kind: own, pub: p, rank: int32(r), life: uint32(r), held: map[int]bool{}, known: map[block]bool{}}
		e.store(0)
		e.truth(f, streamName("w", r), Live)
	}
}

// freePortPair is a port that is free like the one after it.
func freePortPair(t *testing.T) int {
	for range 100 {
		a, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := a.Addr().(*net.TCPAddr).Port
		b, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+1))
		a.Close()
		if err == nil {
			b.Close()
			return port
		}
	}
	t.Skip("no two free ports in a row")
	return 0
}

func TestBoundEndpoint(t *testing.T) {
	noLeaks(t)
	f := running(t, Options{Workers: []WorkerSpec{{ID: "w", Model: "m", Endpoint: "tcp://127.0.0.1:0", Bind: true}}})
	sub := publisherOf(t, f, "w").sub
	eventually(t, func() string {
		if sub.Addr() == "" {
			return "not bound"
		}
		return ""
	})
	p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: sub.Addr(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), wiretest.Patience)
	defer cancel()
	if err := p.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, kind: own, pub: p, rank: -1, held: map[int]bool{}, known: map[block]bool{}}
	e.store(0, 1)
	e.truth(f, "w/0", Live)
}

func publisherOf(t testing.TB, f *Fleet, id string) *publisher {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, w := range f.workers {
		if k.id == id && len(w.pubs) > 0 {
			return w.pubs[0]
		}
	}
	t.Fatalf("no worker %q", id)
	return nil
}

// TestRegistrationIsGuarded: what was registered over HTTP is dialled only where
// the operator allows it, checked on the resolved address.
func TestRegistrationIsGuarded(t *testing.T) {
	noLeaks(t)
	allow, err := ParseAllowList([]string{"10.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	e := newEngine(t, zmqwire.PublisherConfig{})
	f := running(t, Options{Allow: allow})
	if err := f.Put(e.spec("w")); !errors.Is(err, ErrDenied) {
		t.Errorf("Put of 127.0.0.1: %v, want ErrDenied", err)
	}
	spec := e.spec("w")
	spec.Endpoint = strings.Replace(spec.Endpoint, "127.0.0.1", "localhost", 1)
	spec.ReplayEndpoint = ""
	if err := f.Put(spec); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); !strings.Contains(st.LastError, "denied") {
			return fmt.Sprintf("%+v, want a denied dial", st)
		}
		return ""
	})
	if n := e.pub.Subscribers(); n != 0 {
		t.Errorf("%d subscribers", n)
	}
}

func TestBlockSizeIsChecked(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	spec := e.spec("w")
	spec.BlockSize = 3
	f := running(t, Options{Workers: []WorkerSpec{spec}})
	e.store(0)
	e.truth(f, "w/0", Live)
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); !strings.Contains(st.LastError, "configured 3, the events say 4") {
			return fmt.Sprintf("last error %q", st.LastError)
		}
		return ""
	})
}

// TestLifeLeavesNothing: registrations come and go, each with a subscription,
// blocks of the past and a block of its own; goroutines, memory and sets return.
func TestLifeLeavesNothing(t *testing.T) {
	noLeaks(t)
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	e := newHost(t, "127.0.0.1", nil)
	spec := WorkerSpec{ID: "w", Model: "m", Endpoint: e.pub.Addr(), ReplayEndpoint: e.pub.ReplayAddr()}
	f := running(t, Options{})
	e.churn(8)
	var before runtime.MemStats
	for n := range rounds {
		if err := f.Put(spec); err != nil {
			t.Fatal(err)
		}
		e.send(e.encode(e.storeEvent(1), e.removeEvent(1), e.storeEvent(2)))
		e.truth(f, "w/0", Live)
		e.send(e.encode(e.removeEvent(2)))
		if err := f.Delete("w"); err != nil {
			t.Fatal(err)
		}
		if n == rounds/2 {
			settleGoroutines(t)
			runtime.GC()
			runtime.ReadMemStats(&before)
		}
	}
	if len(f.Sets()) != 0 || len(f.Workers()) != 0 {
		t.Errorf("%d sets, %d workers left", len(f.Sets()), len(f.Workers()))
	}
	settleGoroutines(t)
	runtime.GC()
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	// The publisher's ring grows by two batches of some 200 bytes a round.
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 2<<20 {
		t.Errorf("heap grew by %d bytes in %d rounds", grown, rounds-rounds/2)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.closing) != 0 || len(f.workers) != 0 {
		t.Errorf("%d lives are still ending", len(f.closing))
	}
}

// settleGoroutines waits until the ends of past lives are over.
func settleGoroutines(t *testing.T) {
	t.Helper()
	eventually(t, func() string {
		if n := runtime.NumGoroutine(); n > 40 {
			return fmt.Sprintf("%d goroutines", n)
		}
		return ""
	})
}

// TestRemovalThatCannotBeRead: the block may be gone or not. The stream says so,
// and a clear ends the doubt.
func TestRemovalThatCannotBeRead(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.store(0, 1)
	e.truth(f, "w/0", Live)
	torn := bytes.Replace(e.encode(e.removeEvent(0)), []byte("block_hashes"), []byte("block_hushes"), 1)
	e.send(torn)
	e.store(2)
	eventually(t, func() string {
		st := statusOf(f, "w/0")
		if st.Seq != 3 || st.State != Suspect || st.Lost != 0 || st.LastError != "batch 2 has removals that cannot be read: 1" {
			return fmt.Sprintf("%+v, want suspect at 3 with the reason", st)
		}
		return ""
	})
	e.clear()
	e.truth(f, "w/0", Live)
}

// TestNewcomerIsFollowedOnceAdmitted: a worker with another image token id waits,
// and nobody connects to it; when the incumbents leave, all that it holds is
// there.
func TestNewcomerIsFollowedOnceAdmitted(t *testing.T) {
	noLeaks(t)
	old, next := newHost(t, "127.0.0.1", nil), newHost(t, "127.0.0.1", nil)
	next.life = 1
	spec := func(id string, e *engine, image uint32) WorkerSpec {
		return WorkerSpec{ID: id, Model: "m", Endpoint: e.pub.Addr(), ReplayEndpoint: e.pub.ReplayAddr(), ImageTokenID: &image}
	}
	f := running(t, Options{})
	put(t, f, spec("old", old, 9), spec("next", next, 10))
	old.churn(30)
	next.churn(40)
	old.truth(f, "old/0", Live)
	wantMembers(t, f, "default/m/aggregated: old/0 | next (image_token_id: 10 here, 9 in the set)")
	if n := next.pub.Subscribers(); n != 0 {
		t.Errorf("%d subscriptions to a worker that waits", n)
	}
	remove(t, f, "old")
	next.churn(5)
	next.takesOver(old)
	next.truth(f, "next/0", Live)
	wantMembers(t, f, "default/m/aggregated: next/0 | ")
}
