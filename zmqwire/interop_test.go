package zmqwire

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// Real libzmq on the other side, in both roles. Skipped without pyzmq.

// libzmqPublisher starts testdata/pub.py and returns its endpoints.
func libzmqPublisher(tb testing.TB, args ...string) (p *wiretest.Process, events, replay string) {
	tb.Helper()
	p = wiretest.Python(tb, filepath.Join("testdata", "pub.py"), args...)
	words := strings.Fields(p.Line())
	if len(words) != 3 || words[0] != "ready" {
		tb.Fatalf("pub.py says %q", words)
	}
	return p, words[1], words[2]
}

// untilFed publishes single messages until the tap has one: a subscription takes
// effect in libzmq's own time. It returns the next seq.
func untilFed(t *tap, p *wiretest.Process) (next int) {
	t.tb.Helper()
	t.mu.Lock()
	before := len(t.seqs)
	t.mu.Unlock()
	t.until("a first message", func() bool {
		fmt.Sscanf(p.Ask("send 1 100"), "sent %d", &next)
		return len(t.seqs) > before
	})
	t.until("the rest", func() bool { return len(t.seqs) > 0 && t.seqs[len(t.seqs)-1] == uint64(next-1) })
	return next
}

// checkRun checks that the tap's messages count up without a gap, and that each
// payload is the one that the script made for its seq.
func (t *tap) checkRun() {
	t.tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, seq := range t.seqs {
		if seq != t.seqs[0]+uint64(i) || binary.BigEndian.Uint64(t.bodies[i]) != seq {
			t.tb.Fatalf("message %d: seq %d after %d", i, seq, t.seqs[max(0, i-1)])
		}
	}
}

func TestInteropLibzmqPublishes(t *testing.T) {
	noLeaks(t)
	f := func(name, endpoint string) {
		t.Run(name, func(t *testing.T) {
			p, events, _ := libzmqPublisher(t, "--endpoint", endpoint, "--topic", "kv@w0")
			tap := subscribe(t, SubscriberConfig{Endpoint: events, Topic: "kv@w0"})
			next := untilFed(tap, p)
			for _, size := range []int{8, 200, 4096, 65536, 3 << 20} {
				n := min(500, 32<<20/size)
				next += n
				p.Ask("send %d %d", n, size)
			}
			tap.until("all", func() bool { return tap.seqs[len(tap.seqs)-1] == uint64(next-1) })
			tap.checkRun()
			p.Ask("raw %x", "kv@w0")
			p.Ask("raw %x 01 02", "kv@w0")
			p.Ask("raw %x %016x ab", "kv@w00", 1)
			untilFed(tap, p)
			if st := tap.sub.Stats(); st.Malformed != 2 || st.ForeignTopic != 1 || st.Disconnects != 0 {
				t.Errorf("%+v; want 2 malformed, 1 of another topic", st)
			}
		})
	}
	f("tcp", "tcp://127.0.0.1:*")
	f("tcp6", "tcp://[::1]:*")
	f("ipc", "ipc://"+filepath.Join(t.TempDir(), "kv"))
}

// TestInteropSubscriptionArrives: libzmq itself says what it was asked for.
func TestInteropSubscriptionArrives(t *testing.T) {
	noLeaks(t)
	p, events, _ := libzmqPublisher(t, "--xpub")
	subscribe(t, SubscriberConfig{Endpoint: events, Topic: "kv"})
	if got := p.Line(); got != "subscription 01"+fmt.Sprintf("%x", "kv") {
		t.Errorf("libzmq says %q", got)
	}
}

// TestInteropSilence: an idle libzmq answers our PING; a stopped one does not,
// and is taken up again when it goes on.
func TestInteropSilence(t *testing.T) {
	noLeaks(t)
	p, events, _ := libzmqPublisher(t)
	const interval = 40 * time.Millisecond
	tap := subscribe(t, SubscriberConfig{Endpoint: events, PingInterval: interval})
	untilFed(tap, p)
	idle, cancel := context.WithTimeout(context.Background(), 5*silentIntervals*interval)
	defer cancel()
	<-idle.Done()
	if st := tap.sub.Stats(); st.Disconnects != 0 {
		t.Fatalf("an idle publisher was given up: %+v", st)
	}
	p.Signal(syscall.SIGSTOP)
	tap.untilReason(ReasonSilent)
	p.Signal(syscall.SIGCONT)
	untilFed(tap, p)
}

func TestInteropLibzmqRestarts(t *testing.T) {
	noLeaks(t)
	p, events, _ := libzmqPublisher(t)
	tap := subscribe(t, SubscriberConfig{Endpoint: events})
	untilFed(tap, p)
	for range 3 {
		p.Kill()
		p, _, _ = libzmqPublisher(t, "--endpoint", events)
		tap.mu.Lock()
		tap.seqs, tap.bodies = nil, nil
		tap.mu.Unlock()
		untilFed(tap, p)
		tap.checkRun()
	}
}

func TestInteropLibzmqConnectsToUs(t *testing.T) {
	noLeaks(t)
	tap := subscribe(t, SubscriberConfig{Endpoint: "tcp://127.0.0.1:*", PingInterval: 20 * time.Millisecond})
	tap.untilState(Listening, 1)
	p, _, _ := libzmqPublisher(t, "--connect", "--endpoint", tap.sub.Addr())
	next := untilFed(tap, p)
	p.Ask("send 1000 500")
	tap.until("all", func() bool { return tap.seqs[len(tap.seqs)-1] == uint64(next+1000-1) })
	tap.checkRun()
}

// TestInteropReplay: libzmq's ROUTER, both layouts, with its high-water mark
// small enough to drop most of what it is asked for.
func TestInteropReplay(t *testing.T) {
	noLeaks(t)
	f := func(layout, hwm string) {
		t.Run(layout+" hwm "+hwm, func(t *testing.T) {
			p, _, endpoint := libzmqPublisher(t, "--replay", "tcp://127.0.0.1:*", "--layout", layout, "--ring", "5000", "--replay-hwm", hwm)
			p.Ask("send 3000 4096")
			p.Ask("burn 2")
			p.Ask("send 3000 4096")
			next := uint64(1002)
			cfg := ReplayConfig{Endpoint: endpoint, From: 10, InactivityTimeout: 300 * time.Millisecond, Logger: quiet}
			res, err := ReplayAll(patience(t), cfg, func(m Replayed) error {
				want := next + m.Burnt
				if m.Seq == 1000 {
					want = 1000 // The oldest: 10..999 are lost.
				}
				if m.Seq != want && m.Seq != 1000 || binary.BigEndian.Uint64(m.Payload) != m.Seq {
					return fmt.Errorf("seq %d (lost %d, burnt %d), want %d", m.Seq, m.Lost, m.Burnt, want)
				}
				next = m.Seq + 1
				return nil
			})
			if err != nil || !res.Complete || res.Lost != 990 || res.Burnt != 2 || res.Next != 6002 || res.Replies != 5000 {
				t.Errorf("%+v, %v", res, err)
			}
			t.Logf("%d requests", res.Requests)
		})
	}
	f("new", "20000")
	f("old", "20000")
	f("new", "-1")
	f("old", "500")
}

// TestInteropLibzmqSubscribes: libzmq receives from our publisher byte for byte
// what was published, with heartbeats on, and in both directions of connecting.
func TestInteropLibzmqSubscribes(t *testing.T) {
	noLeaks(t)
	f := func(name string, connect bool) {
		t.Run(name, func(t *testing.T) {
			var p *Publisher
			var peer *wiretest.Process
			script := filepath.Join("testdata", "peer.py")
			if connect {
				peer = wiretest.Python(t, script, "sub", "tcp://127.0.0.1:*", "kv", "bind")
				p = publisher(t, PublisherConfig{Endpoint: strings.Fields(peer.Line())[1], Topic: "kv@w0"})
			} else {
				p = publisher(t, PublisherConfig{Topic: "kv@w0"})
				peer = wiretest.Python(t, script, "sub", p.Addr(), "kv")
				peer.Line()
			}
			waitSubscribers(t, p, 1)
			const n = 400
			sum := sha1.New()
			for i := range n {
				payload := make([]byte, []int{0, 8, 255, 256, 5000, 80000}[i%6])
				seq := p.Publish(payload)
				sum.Write([]byte("kv@w0"))
				sum.Write(binary.BigEndian.AppendUint64(nil, seq))
				sum.Write(payload)
			}
			want := fmt.Sprintf("got %d 0 %d %x", n, n-1, sum.Sum(nil))
			if got := peer.Ask("want %d", n); got != want {
				t.Errorf("peer: %s, want %s", got, want)
			}
		})
	}
	f("it connects", false)
	f("it binds", true)
}

// TestInteropLibzmqAsksForReplay: our ROUTER answers libzmq's DEALER as vLLM's
// does.
func TestInteropLibzmqAsksForReplay(t *testing.T) {
	noLeaks(t)
	f := func(old bool, frames int) {
		t.Helper()
		p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:*", Topic: "kv", OldReplyLayout: old, RingSize: 5})
		for i := range 8 {
			p.Publish(make([]byte, i))
		}
		dealer := wiretest.Python(t, filepath.Join("testdata", "peer.py"), "dealer", p.ReplayAddr(), "2")
		for seq := 3; seq < 8; seq++ {
			if got, want := dealer.Line(), fmt.Sprintf("%d %d %d", frames, seq, seq); got != want {
				t.Errorf("reply %q, want %q", got, want)
			}
		}
		if got, want := dealer.Line(), fmt.Sprintf("end %d", frames); got != want {
			t.Errorf("end %q, want %q", got, want)
		}
		bare := wiretest.Python(t, filepath.Join("testdata", "peer.py"), "dealer-bare", p.ReplayAddr(), "2")
		if got := bare.Line(); got != "silence" {
			t.Errorf("without a delimiter: %q, want silence", got)
		}
	}
	f(false, 4)
	f(true, 3)
}
