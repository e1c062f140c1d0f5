package zmqwire

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
	"go.uber.org/goleak"
)

var quiet = slog.New(slog.DiscardHandler)

// noLeaks fails the test if a goroutine of it outlives its cleanups. It is to be
// called first.
func noLeaks(t *testing.T) {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
}

// patience is a context that ends with the test, or when it hangs.
func patience(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), wiretest.Patience)
	tb.Cleanup(cancel)
	return ctx
}

// tap is a running Subscriber and all that it said.
type tap struct {
	tb   testing.TB
	sub  *Subscriber
	stop func()

	mu     sync.Mutex
	seqs   []uint64
	bodies [][]byte
	events []ConnEvent
	change chan struct{}
}

// subscribe runs a Subscriber with intervals for tests until the test ends.
func subscribe(tb testing.TB, cfg SubscriberConfig) *tap {
	tb.Helper()
	cfg.Logger = quiet
	if cfg.BackoffMin == 0 {
		cfg.BackoffMin, cfg.BackoffMax = 2*time.Millisecond, 20*time.Millisecond
	}
	s, err := NewSubscriber(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t := &tap{tb: tb, sub: s, change: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Run(ctx, t.message, t.state); err != context.Canceled {
			tb.Errorf("Run: %v, want context.Canceled", err)
		}
	}()
	t.stop = func() {
		cancel()
		select {
		case <-done:
		case <-time.After(wiretest.Patience):
			tb.Error("Run does not end")
		}
	}
	tb.Cleanup(t.stop)
	return t
}

func (t *tap) message(m Message) {
	t.note(func() {
		t.seqs = append(t.seqs, m.Seq)
		t.bodies = append(t.bodies, bytes.Clone(m.Payload))
	})
}

func (t *tap) state(e ConnEvent) {
	t.note(func() { t.events = append(t.events, e) })
}

func (t *tap) note(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
	close(t.change)
	t.change = make(chan struct{})
}

// until waits for cond, which is called under t.mu.
func (t *tap) until(what string, cond func() bool) {
	t.tb.Helper()
	timeout := time.After(wiretest.Patience)
	for {
		t.mu.Lock()
		ok, change := cond(), t.change
		t.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-change:
		case <-time.After(5 * time.Millisecond): // For what no event tells.
		case <-timeout:
			t.mu.Lock()
			defer t.mu.Unlock()
			t.tb.Fatalf("waited in vain for %s; %d messages, %d events, last %+v", what, len(t.seqs), len(t.events), t.events[max(0, len(t.events)-3):])
		}
	}
}

func (t *tap) untilMessages(n int) {
	t.tb.Helper()
	t.until("messages", func() bool { return len(t.seqs) >= n })
}

// untilState waits for the n-th event of the state.
func (t *tap) untilState(s ConnState, n int) {
	t.tb.Helper()
	t.until(s.String(), func() bool {
		have := 0
		for _, e := range t.events {
			if e.State == s {
				have++
			}
		}
		return have >= n
	})
}

// untilReason waits for a Disconnected of the reason and returns it.
func (t *tap) untilReason(r Reason) ConnEvent {
	t.tb.Helper()
	var found ConnEvent
	t.until("reason "+string(r), func() bool {
		i := slices.IndexFunc(t.events, func(e ConnEvent) bool { return e.State == Disconnected && e.Reason == r })
		if i >= 0 {
			found = t.events[i]
		}
		return i >= 0
	})
	return found
}

// publisher is a bound Publisher that closes at the test's end.
func publisher(tb testing.TB, cfg PublisherConfig) *Publisher {
	tb.Helper()
	cfg.Logger = quiet
	if cfg.Endpoint == "" {
		cfg.Endpoint = "tcp://127.0.0.1:*"
	}
	p, err := NewPublisher(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { p.Close() })
	return p
}

func waitSubscribers(tb testing.TB, p *Publisher, n int) {
	tb.Helper()
	if err := p.WaitSubscribers(patience(tb), n); err != nil {
		tb.Fatal(err)
	}
}

// peers listens and runs serve for each connection; what serve leaves open is
// closed at the test's end. It returns the endpoint.
func peers(tb testing.TB, serve func(net.Conn)) string {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	var (
		mu    sync.Mutex
		conns []net.Conn
		wg    sync.WaitGroup
	)
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() { serve(c) })
		}
	})
	tb.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return "tcp://" + ln.Addr().String()
}

// greetingOf is a ZMTP 3 greeting with the NULL mechanism.
func greetingOf(minor byte) []byte {
	g := make([]byte, greetingBytes)
	g[0], g[9], g[10], g[11] = 0xff, 0x7f, 3, minor
	copy(g[12:], "NULL")
	return g
}

func readyOf(sock string) []byte {
	return appendCommand(nil, "READY", property(nil, "Socket-Type", sock))
}

func property(dst []byte, name, value string) []byte {
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

// greet is the whole handshake of a peer written by hand. It reports whether
// the other side took part in it.
func greet(c net.Conn, sock string, minor byte) bool {
	c.Write(append(greetingOf(minor), readyOf(sock)...))
	if _, err := io.CopyN(io.Discard, c, greetingBytes); err != nil {
		return false
	}
	_, err := readFrame(c)
	return err == nil
}

// readFrame reads one short frame: flags, length, body.
func readFrame(c io.Reader) ([]byte, error) {
	head := make([]byte, 2)
	if _, err := io.ReadFull(c, head); err != nil {
		return nil, err
	}
	body := make([]byte, head[1])
	_, err := io.ReadFull(c, body)
	return append(head, body...), err
}

// messageOf is a live message as it goes over the wire.
func messageOf(topic string, seq uint64, payload string) []byte {
	return newBatchWire(topic, seq, []byte(payload)).bytes
}
