package zmqwire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

// TestPublisherTopics: subscriptions of both ZMTP forms, by prefix, counted.
func TestPublisherTopics(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{Topic: "kv@a"})
	message := func(on byte) func(topic string) []byte {
		return func(topic string) []byte { return appendFrame(nil, 0, append([]byte{on}, topic...)) }
	}
	command := func(name string) func(topic string) []byte {
		return func(topic string) []byte { return appendCommand(nil, name, []byte(topic)) }
	}
	f := func(minor byte, subscribe, cancel func(string) []byte) {
		t.Helper()
		c := rawSubscriber(t, p, minor)
		say := func(b []byte, want int) {
			t.Helper()
			if _, err := c.Write(b); err != nil {
				t.Fatal(err)
			}
			for p.Subscribers() != want {
				p.mu.Lock()
				changed := p.changed
				p.mu.Unlock()
				if p.Subscribers() == want {
					break
				}
				select {
				case <-changed:
				case <-patience(t).Done():
					t.Fatalf("%d subscribers, want %d", p.Subscribers(), want)
				}
			}
		}
		say(append(subscribe("kv@b"), subscribe("kv@a2")...), 0)
		say(subscribe("kv@"), 1)
		say(subscribe("kv@"), 1)
		say(cancel("kv@b"), 1)
		say(append(cancel("kv@"), subscribe("")...), 1)
		say(cancel(""), 1) // kv@ was subscribed twice and cancelled once.
		p.Publish([]byte("x"))
		if got, err := readFrame(c); err != nil || string(got) != "\x01\x04kv@a" {
			t.Errorf("first frame %q, %v", got, err)
		}
		say(cancel("kv@"), 0)
		c.Close()
	}
	f(0, message(1), message(0))
	f(1, command("SUBSCRIBE"), command("CANCEL"))
	f(1, message(1), message(0))
}

// rawSubscriber is a SUB peer of p written by hand.
func rawSubscriber(t *testing.T, p *Publisher, minor byte) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr()[len("tcp://"):])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if !greet(c, "SUB", minor) {
		t.Fatal("no handshake")
	}
	return c
}

// TestPublisherSlowSubscriber: a subscriber that does not read loses the newest
// messages beyond the high-water mark, and no other one loses anything.
func TestPublisherSlowSubscriber(t *testing.T) {
	noLeaks(t)
	const hwm, n = 100, 2000
	p := publisher(t, PublisherConfig{HWM: hwm, Linger: time.Millisecond})
	slow := rawSubscriber(t, p, 1)
	slow.Write(appendFrame(nil, 0, []byte{1}))
	waitSubscribers(t, p, 1)
	tap := subscribe(t, SubscriberConfig{Endpoint: p.Addr()})
	waitSubscribers(t, p, 2)
	for i := range n {
		p.Publish(make([]byte, 16<<10))
		tap.untilMessages(i + 1)
	}
	if d := p.Stats().Dropped; d == 0 || d > n-hwm {
		t.Errorf("%d dropped of %d for the slow subscriber, want some, at most %d", d, n, n-hwm)
	}
	tap.stop()
	for i, seq := range tap.seqs {
		if seq != uint64(i) {
			t.Fatalf("the other subscriber: message %d has seq %d", i, seq)
		}
	}
	// What the slow one finds is the oldest, without a hole up to where its
	// queue was full.
	r := newFrameReader(slow, 64<<10, 1<<20, 8)
	for i := range hwm {
		frames, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		if m, err := ParseMessage(frames); err != nil || m.Seq != uint64(i) {
			t.Fatalf("message %d: %v %v", i, m.Seq, err)
		}
	}
}

// TestPublisherHostileSubscribers: the publisher lives and serves others.
func TestPublisherHostileSubscribers(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:*", HandshakeTimeout: 50 * time.Millisecond})
	tap := subscribe(t, SubscriberConfig{Endpoint: p.Addr()})
	waitSubscribers(t, p, 1)
	f := func(addr string, b []byte) {
		t.Helper()
		c, err := net.Dial("tcp", addr[len("tcp://"):])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Write(b)
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(io.Discard, c); err != nil && isTimeout(err) {
			t.Errorf("%.20q: the connection stays", b)
		}
		p.Publish([]byte("x"))
		tap.untilMessages(int(p.Stats().Published))
	}
	sub := func(b []byte) []byte { return append(append(greetingOf(1), readyOf("SUB")...), b...) }
	many := func() (b []byte) {
		for i := range maxSubscriptions + 1 {
			b = appendFrame(b, 0, fmt.Appendf([]byte{1}, "topic %d", i))
		}
		return b
	}
	f(p.Addr(), nil)
	f(p.Addr(), []byte("GET / HTTP/1.1\r\n\r\n"))
	f(p.Addr(), append(greetingOf(1), readyOf("DEALER")...))
	f(p.Addr(), sub(longFrame(0, 1<<62)))
	f(p.Addr(), sub(many()))
	f(p.ReplayAddr(), append(greetingOf(1), readyOf("SUB")...))
	f(p.ReplayAddr(), append(append(greetingOf(1), readyOf("DEALER")...), longFrame(0, 64<<30)...))
}

// TestPublisherAnswersPing: a subscriber may ask it for a sign of life.
func TestPublisherAnswersPing(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{})
	c := rawSubscriber(t, p, 1)
	c.Write(appendCommand(nil, "PING", []byte("\x00\x00abc")))
	if got, err := readFrame(c); err != nil || string(got) != "\x04\x08\x04PONGabc" {
		t.Errorf("%q, %v; want PONG with the context", got, err)
	}
}

// TestPublisherCloseLingers: what was published before Close arrives.
func TestPublisherCloseLingers(t *testing.T) {
	noLeaks(t)
	const n = 500
	p := publisher(t, PublisherConfig{Linger: 10 * time.Second})
	tap := subscribe(t, SubscriberConfig{Endpoint: p.Addr()})
	waitSubscribers(t, p, 1)
	for range n {
		p.Publish(make([]byte, 10<<10))
	}
	p.Close()
	tap.untilMessages(n)
}

func TestPublisherRanks(t *testing.T) {
	noLeaks(t)
	base := publisher(t, PublisherConfig{})
	e, _ := ParseEndpoint(base.Addr())
	endpoint := fmt.Sprintf("tcp://127.0.0.1:%d", e.port()-1)
	_, err := NewPublisher(PublisherConfig{Endpoint: endpoint, Bind: true, DPRank: 1, Logger: quiet})
	var ce *ConnError
	if !errors.As(err, &ce) || ce.Reason != ReasonBind || ce.Endpoint != base.Addr() {
		t.Errorf("rank 1 of %s: %v, want bind_failed at the other publisher's %s", endpoint, err, base.Addr())
	}
	for _, cfg := range []PublisherConfig{
		{Endpoint: "ipc://" + filepath.Join(t.TempDir(), "kv"), DPRank: 1},
		{Endpoint: "tcp://*:5557", ReplayEndpoint: "tcp://*:5557"},
		{Endpoint: "inproc://kv"},
		{Endpoint: "nonsense"},
		{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "nonsense"},
	} {
		if _, err := NewPublisher(cfg); !errors.Is(err, ErrEndpoint) {
			t.Errorf("%+v: %v, want ErrEndpoint", cfg, err)
		}
	}
}

// TestPublisherTakesStaleSocket: the file of a publisher that was killed does
// not keep the next one from binding; a living one does.
func TestPublisherTakesStaleSocket(t *testing.T) {
	noLeaks(t)
	path := filepath.Join(t.TempDir(), "kv")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	p := publisher(t, PublisherConfig{Endpoint: "ipc://" + path})
	if _, err := NewPublisher(PublisherConfig{Endpoint: "ipc://" + path}); ReasonOf(err) != ReasonBind {
		t.Errorf("second publisher: %v, want bind_failed", err)
	}
	tap := subscribe(t, SubscriberConfig{Endpoint: "ipc://" + path})
	waitSubscribers(t, p, 1)
	p.Publish([]byte("x"))
	tap.untilMessages(1)
}

// TestPublisherNumbers: Publish, PublishSeq, Hold and Burn share one count.
func TestPublisherNumbers(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:*", RingSize: 4})
	tap := subscribe(t, SubscriberConfig{Endpoint: p.Addr()})
	waitSubscribers(t, p, 1)
	p.Publish([]byte("0"))
	p.Hold(1, []byte("1"))
	if n := p.Burn(); n != 2 {
		t.Errorf("burnt %d, want 2", n)
	}
	p.Publish([]byte("3"))
	p.PublishSeq(10, []byte("10"))
	if n := p.Publish([]byte("11")); n != 11 {
		t.Errorf("seq %d, want 11", n)
	}
	tap.untilMessages(4)
	if got := fmt.Sprint(tap.seqs); got != "[0 3 10 11]" {
		t.Errorf("live %s", got)
	}
	if got := fmt.Sprint(replayed(t, p.ReplayAddr(), 0)); got != "[1 3 10 11]" {
		t.Errorf("replayed %s", got)
	}
}

// replayed are the seqs of one complete replay.
func replayed(t *testing.T, endpoint string, from uint64) (seqs []uint64) {
	t.Helper()
	_, err := Replay(patience(t), ReplayConfig{Endpoint: endpoint, From: from, Logger: quiet}, func(m Message) error {
		seqs = append(seqs, m.Seq)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return seqs
}

// TestPublisherReplayRequests: as in vLLM, a request without its delimiter has
// no answer, and one connection may ask again.
func TestPublisherReplayRequests(t *testing.T) {
	noLeaks(t)
	p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:*"})
	p.Publish([]byte("x"))
	ep, _ := ParseEndpoint(p.ReplayAddr())
	tg := target{endpoint: p.ReplayAddr(), ep: ep, sock: zmq4.Dealer, timeout: time.Minute}
	conn, _, err := tg.dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	seq := make([]byte, 8)
	var ask []byte
	ask = appendFrame(ask, 0, seq)                             // No delimiter.
	ask = appendFrame(appendFrame(ask, flagMore, nil), 0, nil) // No seq.
	ask = appendFrame(appendFrame(ask, flagMore, nil), 0, seq) // Right,
	ask = appendFrame(appendFrame(ask, flagMore, nil), 0, seq) // and again.
	conn.Write(ask)
	r := newFrameReader(conn, 4096, 4096, 8)
	for i := range 4 {
		frames, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		if _, end, err := ParseReply(frames); err != nil || end != (i%2 == 1) || len(frames) != 4 {
			t.Errorf("reply %d: end %v, %d frames, %v", i, end, len(frames), err)
		}
	}
	if st := p.Stats(); st.Replayed != 2 {
		t.Errorf("%+v: want 2 replayed", st)
	}
}
