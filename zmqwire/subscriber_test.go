package zmqwire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// The tests of a subscriber's connection, in the order of what was measured to
// be needed:
//
//  1. budget, cancel, all addresses      TestConnect*
//  2. guarded handshake                  TestHostilePeers, FuzzHandshake
//  3. limits, PING and PONG, reuse       TestPong*, TestFrameReader*, TestHostilePeers
//  4. silence                            TestSilence*
//  5. reconnect                          TestReconnect*
//  6. one goroutine an endpoint          TestOneGoroutine*, TestManyEndpoints
//  7. bind mode                          TestBind*

func TestConnectBudgetEndsSilentHandshake(t *testing.T) {
	noLeaks(t)
	tap := subscribe(t, SubscriberConfig{Endpoint: peers(t, hold), HandshakeTimeout: 30 * time.Millisecond})
	e := tap.untilReason(ReasonHandshakeTimeout)
	if e.Peer == "" || e.Peers != 0 || e.Retry <= 0 {
		t.Errorf("%+v: want a peer, no connected peers, a retry", e)
	}
	tap.untilState(Connecting, 3) // It goes on.
}

func TestConnectCancelCutsHandshake(t *testing.T) {
	noLeaks(t)
	accepted := make(chan struct{}, 1)
	endpoint := peers(t, func(c net.Conn) {
		accepted <- struct{}{}
		hold(c)
	})
	tap := subscribe(t, SubscriberConfig{Endpoint: endpoint, HandshakeTimeout: time.Hour})
	<-accepted
	tap.stop() // Fails where Run does not end.
	if e := tap.events[len(tap.events)-1]; e.Reason != ReasonStopped {
		t.Errorf("last event %+v, want reason stopped", e)
	}
}

func TestConnectRefused(t *testing.T) {
	noLeaks(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	tap := subscribe(t, SubscriberConfig{Endpoint: "tcp://" + ln.Addr().String()})
	tap.untilReason(ReasonRefused)
	gone := subscribe(t, SubscriberConfig{Endpoint: "ipc://" + filepath.Join(t.TempDir(), "none")})
	gone.untilReason(ReasonRefused)
}

func TestConnectDenied(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{})
	var asked string
	tap := subscribe(t, SubscriberConfig{Endpoint: p.Addr(), Control: func(network, address string) error {
		asked = network + " tcp://" + address
		return errors.New("not on the list")
	}})
	tap.untilReason(ReasonDenied)
	tap.stop()
	if asked != "tcp4 "+p.Addr() {
		t.Errorf("Control was asked for %q, want tcp4 %s", asked, p.Addr())
	}
}

// TestConnectTriesAllAddresses: a name has an address where nobody listens, one
// where somebody else does, one where the peer stays silent, and then the
// publisher's.
func TestConnectTriesAllAddresses(t *testing.T) {
	noLeaks(t)
	if runtime.GOOS != "linux" {
		t.Skip("127.0.0.2 is an address of this host on Linux only")
	}
	p := publisher(t, PublisherConfig{Endpoint: "tcp://127.0.0.5:*"})
	e, _ := ParseEndpoint(p.Addr())
	_, port, _ := net.SplitHostPort(e.Address)
	for host, serve := range map[string]func(net.Conn){
		"127.0.0.3": func(c net.Conn) { c.Write([]byte("SSH-2.0-x\r\n")); hold(c) },
		"127.0.0.4": hold,
	} {
		ln, err := net.Listen("tcp", net.JoinHostPort(host, port))
		if err != nil {
			t.Skipf("port taken: %v", err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				wg.Go(func() { serve(c); c.Close() })
			}
		})
		t.Cleanup(func() { ln.Close(); wg.Wait() })
	}
	dns := wiretest.NewNameserver(t, "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5").Resolver()
	tap := subscribe(t, SubscriberConfig{
		Endpoint: "tcp://worker.test:" + port, Resolver: dns, HandshakeTimeout: 400 * time.Millisecond,
	})
	tap.untilState(Connected, 1)
	tap.stop()
	if got := tap.events[1].Peer; got != "127.0.0.5:"+port {
		t.Errorf("connected to %s, want 127.0.0.5:%s", got, port)
	}
	unknown := subscribe(t, SubscriberConfig{Endpoint: "tcp://none.test:1", Resolver: wiretest.NewNameserver(t).Resolver()})
	unknown.untilReason(ReasonResolve)
}

func TestPongCarriesContext(t *testing.T) {
	noLeaks(t)
	got := make(chan string, 2)
	tap := subscribe(t, SubscriberConfig{Endpoint: peers(t, func(c net.Conn) {
		if !greet(c, "PUB", 0) {
			return
		}
		sub, _ := readFrame(c)
		m := messageOf("t", 1, "a")
		c.Write(appendCommand(nil, "PING", []byte("\x00\x0actx")))
		c.Write(m[:3]) // A heartbeat may stand between the frames of a message.
		c.Write(appendCommand(nil, "PING", []byte("\x00\x00")))
		c.Write(appendCommand(nil, "FUTURE", []byte("whatever")))
		c.Write(m[3:])
		one, _ := readFrame(c)
		two, _ := readFrame(c)
		got <- fmt.Sprintf("%q %q %q", sub, one, two)
		hold(c)
	})})
	tap.untilMessages(1)
	if g, want := <-got, `"\x00\x01\x01" "\x04\b\x04PONGctx" "\x04\x05\x04PONG"`; g != want {
		t.Errorf("peer received %s, want %s", g, want)
	}
	if tap.seqs[0] != 1 || tap.sub.Stats().Malformed != 0 {
		t.Errorf("seqs %v, %+v", tap.seqs, tap.sub.Stats())
	}
}

// TestSilenceIsNormal: peers that answer PING, or know none, may be silent for
// as long as they like.
func TestSilenceIsNormal(t *testing.T) {
	noLeaks(t)
	pings := make(chan struct{}, 100)
	knows := subscribe(t, SubscriberConfig{PingInterval: 10 * time.Millisecond, Endpoint: peers(t, func(c net.Conn) {
		if !greet(c, "PUB", 1) {
			return
		}
		readFrame(c)
		for {
			if _, err := readFrame(c); err != nil {
				return
			}
			pings <- struct{}{}
			c.Write(appendCommand(nil, "PONG", nil))
		}
	})})
	from30 := make(chan []byte, 1)
	old := subscribe(t, SubscriberConfig{PingInterval: time.Millisecond, Endpoint: peers(t, func(c net.Conn) {
		if greet(c, "PUB", 0) {
			readFrame(c)
			b, _ := io.ReadAll(c)
			from30 <- b
		}
	})})
	for range 3 * silentIntervals {
		<-pings
	}
	old.untilState(Connected, 1)
	knows.stop()
	old.stop()
	if b := <-from30; len(b) > 0 {
		t.Errorf("a peer of ZMTP 3.0 was sent %q", b)
	}
	for _, tap := range []*tap{knows, old} {
		if st := tap.sub.Stats(); st.Connects != 1 || st.Disconnects != 1 {
			t.Errorf("%+v: want one connection, ended by the test", st)
		}
	}
}

// TestSilenceOfPartition: a proxy swallows everything and the connection stays
// up. It is noticed, and healed when the network is.
func TestSilenceOfPartition(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{})
	proxy := wiretest.NewProxy(t, p.Addr()[len("tcp://"):])
	tap := subscribe(t, SubscriberConfig{
		Endpoint: "tcp://" + proxy.Addr(), PingInterval: 20 * time.Millisecond, HandshakeTimeout: 50 * time.Millisecond,
	})
	waitSubscribers(t, p, 1)
	p.Publish([]byte("before"))
	tap.untilMessages(1)
	proxy.Silence(true)
	tap.untilReason(ReasonSilent)
	tap.untilReason(ReasonHandshakeTimeout)
	proxy.Silence(false)
	tap.until("messages after the partition", func() bool {
		p.Publish([]byte("after"))
		return len(tap.seqs) > 1
	})
}

// TestReconnectBacksOff: a peer that makes the handshake and closes is not
// redialled in a loop: only a valid message resets the wait.
func TestReconnectBacksOff(t *testing.T) {
	noLeaks(t)
	waits := func(reply []byte, n int) []time.Duration {
		t.Helper()
		tap := subscribe(t, SubscriberConfig{
			BackoffMin: time.Millisecond, BackoffMax: 64 * time.Millisecond,
			Endpoint: peers(t, func(c net.Conn) {
				if greet(c, "PUB", 1) {
					readFrame(c)
					c.Write(reply)
				}
				c.Close()
			}),
		})
		tap.untilState(Disconnected, n)
		tap.stop()
		var out []time.Duration
		for _, e := range tap.events {
			if e.State == Disconnected && e.Reason != ReasonStopped {
				out = append(out, e.Retry)
			}
		}
		return out
	}
	f := func(what string, reply []byte, grows bool) {
		t.Helper()
		w := waits(reply, 8)
		if last := w[7]; grows != (last >= 32*time.Millisecond) {
			t.Errorf("%s: waits %v; want to grow: %v", what, w, grows)
		}
		for i := range w {
			if w[i] < time.Millisecond || w[i] > 64*time.Millisecond {
				t.Errorf("%s: wait %v is out of bounds", what, w[i])
			}
		}
	}
	f("nothing", nil, true)
	f("a malformed message", appendFrame(nil, 0, []byte("x")), true)
	f("a valid message", messageOf("", 1, "x"), false)
}

func TestReconnectTwentyRestarts(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{})
	addr := p.Addr()
	tap := subscribe(t, SubscriberConfig{Endpoint: addr})
	for i := range 20 {
		waitSubscribers(t, p, 1)
		p.Publish(fmt.Appendf(nil, "life %d", i))
		tap.untilMessages(i + 1)
		p.Close()
		p = publisher(t, PublisherConfig{Endpoint: addr, Bind: true})
	}
	for i, seq := range tap.seqs {
		if seq != 0 || string(tap.bodies[i]) != fmt.Sprintf("life %d", i) {
			t.Errorf("message %d: seq %d %q", i, seq, tap.bodies[i])
		}
	}
	if st := tap.sub.Stats(); st.Connects < 20 || st.Malformed != 0 {
		t.Errorf("%+v: want at least 20 connects and nothing malformed", st)
	}
}

// TestCutWithinFrame: a connection that breaks in the middle of a frame never
// gives half a message.
func TestCutWithinFrame(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{})
	proxy := wiretest.NewProxy(t, p.Addr()[len("tcp://"):])
	proxy.CutAfter(greetingBytes + 2000)
	tap := subscribe(t, SubscriberConfig{Endpoint: "tcp://" + proxy.Addr()})
	for tap.sub.Stats().Disconnects < 5 {
		waitSubscribers(t, p, 1)
		p.Publish(make([]byte, 301))
	}
	tap.stop()
	for i, b := range tap.bodies {
		if len(b) != 301 {
			t.Errorf("message %d has %d bytes, want 301", i, len(b))
		}
	}
}

// TestManyEndpoints: 256 streams on one process are served evenly, by one
// goroutine each.
func TestManyEndpoints(t *testing.T) {
	noLeaks(t)
	const n, each = 256, 20
	p := publisher(t, PublisherConfig{})
	before := runtime.NumGoroutine()
	taps := make([]*tap, n)
	for i := range taps {
		taps[i] = subscribe(t, SubscriberConfig{Endpoint: p.Addr(), Buffer: 16 << 10})
	}
	waitSubscribers(t, p, n)
	// The publisher has two goroutines for each peer, the tap none.
	if got := runtime.NumGoroutine() - before; got > 3*n {
		t.Errorf("%d goroutines for %d endpoints and their publisher, want at most %d", got, n, 3*n)
	}
	for range each {
		p.Publish(make([]byte, 100))
	}
	for _, tap := range taps {
		tap.untilMessages(each)
	}
}

// TestOneGoroutineAnEndpoint: both callbacks run in Run's goroutine.
func TestOneGoroutineAnEndpoint(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{})
	s, err := NewSubscriber(SubscriberConfig{Endpoint: p.Addr(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		if p.WaitSubscribers(ctx, 1) == nil {
			p.Publish(nil)
		}
	}()
	stop := errors.New("enough")
	touched := 0 // Not guarded: the race detector watches it.
	err = s.Run(ctx, func(Message) {
		touched++
		cancel(stop)
	}, func(ConnEvent) { touched++ })
	if !errors.Is(err, stop) || touched < 4 {
		t.Errorf("Run: %v after %d callbacks, want the cause and connecting, connected, a message, disconnected", err, touched)
	}
}

func TestBindSeveralPublishers(t *testing.T) {
	noLeaks(t)
	f := func(endpoint string) {
		t.Helper()
		tap := subscribe(t, SubscriberConfig{Endpoint: endpoint, Bind: true, Topic: "kv"})
		tap.untilState(Listening, 1)
		addr := tap.sub.Addr()
		var ps []*Publisher
		for range 3 {
			ps = append(ps, connected(t, addr))
		}
		for _, p := range ps {
			waitSubscribers(t, p, 1)
			p.Publish([]byte("x"))
		}
		tap.untilMessages(3)
		ps[0].Close()
		tap.untilReason(ReasonClosed)
		ps[1].Publish([]byte("y"))
		tap.untilMessages(4)
		tap.until("two peers left", func() bool { return tap.events[len(tap.events)-1].Peers == 2 })
	}
	f("tcp://127.0.0.1:*")
	f("tcp://[::1]:0")
	f("ipc://" + filepath.Join(t.TempDir(), "kv"))
	f("ipc://*")
}

// connected is a Publisher that connects to addr. An ipc endpoint would be bound
// by vLLM's rule, so the connection is made by hand there.
func connected(t *testing.T, addr string) *Publisher {
	t.Helper()
	e, err := ParseEndpoint(addr)
	if err != nil {
		t.Fatal(err)
	}
	if e.Network == "tcp" && !e.binds() {
		return publisher(t, PublisherConfig{Endpoint: addr, Topic: "kv"})
	}
	p := publisher(t, PublisherConfig{Topic: "kv"})
	ctx, cancel := context.WithCancel(context.Background())
	p.wg.Go(func() { p.connect(ctx, addr, e) })
	t.Cleanup(cancel)
	p.cancel = func(stop context.CancelFunc) context.CancelFunc {
		return func() { cancel(); stop() }
	}(p.cancel)
	return p
}

// TestBindSilentPeers: peers that do not finish their handshake hold up nobody,
// and there is a cap on them.
func TestBindSilentPeers(t *testing.T) {
	noLeaks(t)
	tap := subscribe(t, SubscriberConfig{Endpoint: "tcp://127.0.0.1:*", MaxPending: 8, HandshakeTimeout: time.Hour})
	tap.untilState(Listening, 1)
	addr := tap.sub.Addr()[len("tcp://"):]
	dial := func() net.Conn {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	for range 7 {
		dial()
	}
	p := publisher(t, PublisherConfig{Endpoint: tap.sub.Addr()})
	waitSubscribers(t, p, 1)
	p.Publish([]byte("x"))
	tap.untilMessages(1)

	last := dial()
	over := dial()
	over.SetReadDeadline(time.Now().Add(wiretest.Patience))
	if _, err := io.Copy(io.Discard, over); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the ninth handshake: %v, want it closed", err)
	}
	tap.untilReason(ReasonTooManyPeers)
	last.Close()
	tap.until("the eighth's end", func() bool {
		r := tap.events[len(tap.events)-1].Reason
		return r == ReasonClosed || r == ReasonReset // Our greeting was not read.
	})
	if st := tap.sub.Stats(); st.Failures < 2 || st.Disconnects != 0 {
		t.Errorf("%+v: want failures only", st)
	}
}

func TestBindPeersAreBounded(t *testing.T) {
	noLeaks(t)
	tap := subscribe(t, SubscriberConfig{Endpoint: "tcp://127.0.0.1:*", MaxPeers: 1})
	tap.untilState(Listening, 1)
	p := publisher(t, PublisherConfig{Endpoint: tap.sub.Addr()})
	waitSubscribers(t, p, 1)
	publisher(t, PublisherConfig{Endpoint: tap.sub.Addr()})
	tap.untilReason(ReasonTooManyPeers)
}

func TestBindPortTaken(t *testing.T) {
	noLeaks(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tap := subscribe(t, SubscriberConfig{Endpoint: "tcp://" + ln.Addr().String(), Bind: true})
	tap.untilReason(ReasonBind)
	ln.Close()
	tap.untilState(Listening, 1)
}

func TestNewSubscriberRefuses(t *testing.T) {
	f := func(cfg SubscriberConfig) {
		t.Helper()
		if _, err := NewSubscriber(cfg); !errors.Is(err, ErrEndpoint) {
			t.Errorf("%+v: %v, want ErrEndpoint", cfg, err)
		}
	}
	f(SubscriberConfig{})
	f(SubscriberConfig{Endpoint: "inproc://kv"})
	f(SubscriberConfig{Endpoint: "tcp://127.0.0.1:0"})
}

// TestDroppedMessagesAreAGap: what is lost on the way shows in the seqs, and
// costs nothing else.
func TestDroppedMessagesAreAGap(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{})
	proxy := wiretest.NewProxy(t, p.Addr()[len("tcp://"):])
	proxy.Drop(func(n int, frames [][]byte) bool { return n == 1 || len(frames[2]) == 3 })
	tap := subscribe(t, SubscriberConfig{Endpoint: "tcp://" + proxy.Addr()})
	waitSubscribers(t, p, 1)
	for _, body := range []string{"0", "1", "2", "333", "4"} {
		p.Publish([]byte(body))
	}
	tap.untilMessages(3)
	if got := fmt.Sprint(tap.seqs); got != "[0 2 4]" {
		t.Errorf("seqs %s, want [0 2 4]", got)
	}
}
