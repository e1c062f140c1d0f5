package fleet

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// newLibEngine is an engine whose publisher is a process with real libzmq
// sockets, which can be killed.
func newLibEngine(t *testing.T, layout string) *engine {
	t.Helper()
	e := &engine{t: t, rank: -1, held: map[uint32]bool{}, known: map[uint32]bool{}}
	events, replay := e.spawn(layout)
	e.events, e.replay = wiretest.NewProxy(t, events), wiretest.NewProxy(t, replay)
	return e
}

func (e *engine) spawn(layout string) (events, replay string) {
	e.t.Helper()
	e.lib = wiretest.Python(e.t, filepath.Join("testdata", "engine.py"), "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", layout)
	words := strings.Fields(e.lib.Line())
	if len(words) != 2 {
		e.t.Fatalf("engine.py says %q", words)
	}
	return hostOf(words[0]), hostOf(words[1])
}

// respawn is kill -9 and another process behind the same address.
func (e *engine) respawn(layout string) {
	e.t.Helper()
	e.lib.Kill()
	events, replay := e.spawn(layout)
	e.life++
	clear(e.held)
	e.events.Retarget(events)
	e.replay.Retarget(replay)
	e.events.Cut()
	e.replay.Cut()
}

// TestLibzmqKilled: kill -9 and restart of a real libzmq publisher at different
// moments, in both layouts of its replay.
func TestLibzmqKilled(t *testing.T) {
	noLeaks(t)
	wiretest.Interpreter(t, "zmq")
	for _, layout := range []string{"new", "old"} {
		e := newLibEngine(t, layout)
		e.store(0, 1, 2)
		f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
		e.truth(f, "w/0", Live)

		e.respawn(layout) // idle
		e.truth(f, "w/0", Live)

		e.store(0, 1)
		e.remove(0)
		e.respawn(layout) // in the middle of the stream
		e.store(5)
		e.truth(f, "w/0", Live)

		e.lib.Ask("slow 20")
		for n := range 20 {
			e.lib.Ask("hide %x", e.encode(e.storeEvent(10+n)))
		}
		e.store(40)
		eventually(t, func() string {
			if st := statusOf(f, "w/0"); st.State != Replaying {
				return fmt.Sprintf("%+v, want replaying", st)
			}
			return ""
		})
		e.respawn(layout) // in the middle of a replay
		e.store(7)
		e.truth(f, "w/0", Live)

		e.events.Refuse(true) // while nobody listens
		e.events.Cut()
		e.respawn(layout)
		e.store(1, 2, 3, 4, 5, 6)
		e.remove(2)
		e.events.Refuse(false)
		e.truth(f, "w/0", Live)
	}
}

// TestLibzmqBurntNumber: the events of a number that was never published are
// lost, and the stream says so.
func TestLibzmqBurntNumber(t *testing.T) {
	noLeaks(t)
	wiretest.Interpreter(t, "zmq")
	e := newLibEngine(t, "new")
	e.store(0)
	e.lib.Ask("burn")
	e.store(1)
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.truth(f, "w/0", Suspect)
	if st := statusOf(f, "w/0"); st.Lost != 1 || st.Seq != 2 {
		t.Errorf("%+v, want 1 lost at 2", st)
	}
	if c := countsOf(f, "w/0"); c.Burnt != 1 {
		t.Errorf("counts: %+v", c)
	}
}
