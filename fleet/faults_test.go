package fleet

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// What is promised of every fault, with the pauses of a daemon: it is noticed
// within noticed, and at most heals after its end the stream holds what the
// publisher holds, or says what is lost.
const (
	noticed = 20 * time.Second
	heals   = 5 * time.Second
)

// fault happens to an engine that a fleet follows.
type fault struct {
	name string
	cfg  zmqwire.PublisherConfig
	on   []kind // nil: all
	do   func(*faulty)
}

// faulty is one fault under way.
type faulty struct {
	*engine
	f *Fleet
}

// healed: the fault is over, and within the time that is promised all is as if
// it had not been.
func (f *faulty) healed() {
	f.t.Helper()
	f.says(Live, 0)
}

// says: the fault is over, and within the time that is promised the stream says
// that so many batches are lost. What it holds is the truth all the same if
// none was.
func (f *faulty) says(want State, lost uint64) {
	f.t.Helper()
	within(f.t, heals, func() string {
		st := statusOf(f.f, "w/0")
		if st.State != want || st.Lost != lost || f.seq > 0 && st.Seq != f.seq-1 {
			return fmt.Sprintf("%+v, want %s at %d with %d lost", st, want, int64(f.seq)-1, lost)
		}
		if lost > 0 {
			return ""
		}
		return f.short(f.f, "w/0", want)
	})
}

// comes waits for what a fault is to happen in the middle of.
func (f *faulty) comes(what string, when func(Status) bool) {
	f.t.Helper()
	within(f.t, noticed, func() string {
		if st := statusOf(f.f, "w/0"); !when(st) {
			return fmt.Sprintf("%+v, want %s", st, what)
		}
		return ""
	})
}

// accounted: of the batches that were published, every one was applied once or
// is told lost. The publisher must have lived as long as the worker.
func (f *faulty) accounted() {
	f.t.Helper()
	if c := countsOf(f.f, "w/0"); c.Applied+c.Lost != f.seq {
		f.t.Errorf("%d applied and %d lost of %d: %+v", c.Applied, c.Lost, f.seq, c)
	}
}

func connected(st Status) bool { return st.Connected }
func cutOff(st Status) bool    { return !st.Connected }
func fillingGap(s Status) bool { return s.State == Replaying }
func farBehind(n uint64) func(Status) bool {
	return func(st Status) bool { return st.HasSeq && st.Seq >= n }
}

// away cuts the connection and refuses others while f runs.
func (f *faulty) away(do func()) {
	f.t.Helper()
	f.events.Refuse(true)
	f.events.Cut()
	f.comes("cut off", cutOff)
	do()
	f.events.Refuse(false)
}

// newest are the kinds but for those that differ by their replies alone.
var newest = []kind{own, libzmq, vllm}

var faults = []fault{
	{name: "killed idle", on: newest, do: func(f *faulty) {
		f.restart()
		f.healed()
		f.churn(20)
		f.healed()
	}},
	{name: "killed mid-stream", on: newest, do: func(f *faulty) {
		for _, n := range []int{1500, 3, 700} { // shorter, longer
			f.churn(n)
			f.comes("some of it", farBehind(uint64(n/10)))
			f.restart()
		}
		f.churn(300)
		f.healed()
	}},
	{name: "killed mid-replay", do: func(f *faulty) {
		f.replay.Delay(5 * time.Millisecond)
		batches := make([][]byte, 100)
		for n := range batches {
			batches[n] = f.encode(f.storeEvent(10 + n))
		}
		at := f.seq
		f.lose(batches...)
		f.store(500)
		f.comes("replaying", fillingGap)
		f.comes("some of the replay", farBehind(at+3))
		f.kill()
		f.replay.Delay(0)
		f.succeed()
		f.churn(150)
		f.healed()
	}},
	{name: "killed while nobody listens", on: newest, do: func(f *faulty) {
		for _, n := range []int{50, 50, 1, 0, 20} { // as long as before, shorter, longer
			f.away(func() {
				f.restart()
				f.churn(n)
			})
			f.healed()
		}
	}},
	{name: "twenty restarts", on: newest, do: func(f *faulty) {
		for n := range 20 {
			f.churn(n * n % 17)
			if n%5 == 0 {
				f.healed()
			}
			f.restart()
		}
		f.churn(10)
		f.healed()
	}},
	{name: "messages dropped", do: func(f *faulty) {
		f.events.Drop(func(n int, _ [][]byte) bool { return n%3 == 1 })
		f.churn(400)
		f.events.Drop(nil)
		f.churn(1)
		f.healed()
		f.accounted()
	}},
	{name: "last message dropped", on: newest, do: func(f *faulty) {
		f.lose(f.encode(f.removeEvent(0)))
		f.healed()
		f.accounted()
	}},
	{name: "messages delayed", do: func(f *faulty) {
		f.events.Delay(3 * time.Millisecond)
		f.replay.Delay(time.Millisecond)
		f.churn(150)
		f.lose(f.encode(f.storeEvent(7)))
		f.churn(150)
		f.events.Delay(0)
		f.replay.Delay(0)
		f.healed()
		f.accounted()
	}},
	{name: "cut in the middle of frames", do: func(f *faulty) {
		f.events.CutAfter(700)
		f.replay.CutAfter(1500)
		f.events.Cut()
		for range 5 {
			f.comes("connected again", connected)
			f.churn(20)
			f.comes("all of it", farBehind(f.seq-1))
		}
		f.events.CutAfter(0)
		f.replay.CutAfter(0)
		f.events.Cut()
		f.healed()
		f.accounted()
	}},
	{name: "replay arrives late", do: func(f *faulty) {
		// A probe's answers are on their way while live messages undo them.
		f.store(11, 12, 13)
		f.replay.Silence(true)
		f.comes("a probe", func(Status) bool { return publisherOf(f.t, f.f, "w").asking() })
		f.remove(11, 12, 13)
		f.replay.Silence(false)
		f.healed()
		f.accounted()
	}},
	{name: "replay endpoint away", do: func(f *faulty) {
		f.replay.Refuse(true)
		f.replay.Cut() // one may be under way
		f.lose(f.encode(f.storeEvent(1)), f.encode(f.storeEvent(2)))
		f.store(3)
		f.says(Suspect, 2)
		f.accounted()
	}},
	{name: "number burnt", do: func(f *faulty) {
		f.churn(5)
		f.burn()
		f.churn(5)
		f.says(Suspect, 1)
		f.accounted()
	}},
	{name: "partition", on: newest, do: func(f *faulty) {
		f.events.Silence(true)
		f.replay.Silence(true)
		f.comes("cut off", cutOff)
		f.churn(60)
		f.events.Silence(false)
		f.replay.Silence(false)
		f.healed()
		f.accounted()
	}},
	{name: "subscriber paused", on: newest, cfg: zmqwire.PublisherConfig{HWM: 50}, do: func(f *faulty) {
		f.paused()
		f.healed()
		f.accounted()
	}},
	{name: "subscriber paused for longer than the ring", on: newest, cfg: zmqwire.PublisherConfig{HWM: 50, RingSize: 40}, do: func(f *faulty) {
		before := countsOf(f.f, "w/0")
		f.paused()
		f.comes("suspect at the end", func(st Status) bool {
			return st.State == Suspect && st.Seq == f.seq-1
		})
		f.accounted()
		if c := countsOf(f.f, "w/0"); c.Lost == before.Lost || c.Restarts != 0 {
			f.t.Errorf("%+v", c)
		}
	}},
}

// asking: a replay is under way.
func (p *publisher) asking() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.st.inflight
}

// paused stops the subscription from reading while the engine publishes more
// than its socket keeps. KVINDEXD_LONG=1 makes the pause ten seconds long.
func (f *faulty) paused() {
	f.t.Helper()
	pause := time.Second
	if os.Getenv("KVINDEXD_LONG") == "1" {
		pause = 10 * time.Second
	}
	p := publisherOf(f.t, f.f, "w")
	end := time.NewTimer(pause)
	p.mu.Lock()
	for range 700 {
		f.send(f.big())
	}
	<-end.C
	p.mu.Unlock()
	f.send(f.big())
}

// big is a batch of 32 KB that stores one block of fifty, or removes it.
func (e *engine) big() []byte {
	n := 100 + int(e.seq%50)
	ev := e.removeEvent(n)
	if e.seq%100 < 50 {
		ev = e.storeEvent(n)
	}
	ev.Ownership = make([]byte, 32<<10)
	return e.encode(ev)
}

// runFaults lets every fault happen to publishers of each kind, each with a
// fleet of its own. They wait for most of their time, hence several at once.
func runFaults(t *testing.T, kinds ...kind) {
	var all sync.WaitGroup
	atOnce := make(chan struct{}, 8)
	for _, k := range kinds {
		all.Go(func() {
			t.Run(string(k), func(t *testing.T) {
				k.require(t)
				runFaultsOf(t, k, atOnce)
			})
		})
	}
	all.Wait()
}

func runFaultsOf(t *testing.T, k kind, atOnce chan struct{}) {
	var all sync.WaitGroup
	for _, c := range faults {
		if c.on != nil && !slices.Contains(c.on, k) {
			continue
		}
		all.Go(func() {
			atOnce <- struct{}{}
			defer func() { <-atOnce }()
			t.Run(c.name, func(t *testing.T) { c.run(t, k) })
		})
	}
	all.Wait()
}

func (c *fault) run(t *testing.T, k kind) {
	e := newEngineOf(t, k, c.cfg)
	e.store(0, 1)
	// The pauses of a daemon, not those of a test.
	f := &faulty{e, running(t, Options{Timing: Timing{}.withDefaults(), Workers: []WorkerSpec{e.spec("w")}})}
	// The subscription stands when a message has come by it, not before.
	f.comes("a live message", func(Status) bool {
		e.send(e.encode())
		return countsOf(f.f, "w/0").Messages > 0
	})
	f.healed()
	c.do(f)
	t.Logf("%+v", countsOf(f.f, "w/0"))
}

// within waits for a condition that nothing signals.
func within(t testing.TB, d time.Duration, what func() string) {
	t.Helper()
	limit := time.NewTimer(d)
	defer limit.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		why := what()
		if why == "" {
			return
		}
		select {
		case <-limit.C:
			t.Fatal(why)
		case <-tick.C:
		}
	}
}

// eventually is within a time that is no measure of anything.
func eventually(t testing.TB, what func() string) {
	t.Helper()
	within(t, wiretest.Patience, what)
}

// TestFaults: what becomes of a stream when its publisher, the way to it or its
// own process have a bad day. Most of the time is spent waiting, hence all at
// once.
func TestFaults(t *testing.T) {
	noLeaks(t)
	var all sync.WaitGroup
	all.Go(func() { runFaults(t, own, libzmq, libzmqOld, vllm) })
	for _, restart := range []bool{false, true} {
		all.Go(func() {
			t.Run(fmt.Sprintf("network partition, restart=%t", restart), func(t *testing.T) { partition(t, restart) })
		})
	}
	all.Wait()
}
