package zmqwire

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"
)

// longFrame is a frame header that claims size bytes.
func longFrame(flags byte, size uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, size)
}

// hold reads and forgets until the other side closes.
func hold(c net.Conn) { io.Copy(io.Discard, c) }

// TestHostilePeers has one peer of each kind that was seen to break a consumer.
// Each is told by its reason while a publisher beside it is served.
func TestHostilePeers(t *testing.T) {
	noLeaks(t)
	good := publisher(t, PublisherConfig{})
	beside := subscribe(t, SubscriberConfig{Endpoint: good.Addr()})
	waitSubscribers(t, good, 1)

	f := func(name string, want Reason, serve func(net.Conn)) {
		t.Helper()
		t.Run(name, func(t *testing.T) {
			endpoint := peers(t, serve)
			tap := subscribe(t, SubscriberConfig{
				Endpoint: endpoint, HandshakeTimeout: 100 * time.Millisecond, PingInterval: 20 * time.Millisecond,
			})
			e := tap.untilReason(want)
			if ReasonOf(e.Err) != want || !strings.Contains(e.Err.Error(), endpoint) {
				t.Errorf("error %v, want reason %s and endpoint %s", e.Err, want, endpoint)
			}
			if n := good.Publish([]byte("still here")); n > 1<<20 {
				t.Fatal(n)
			}
			beside.untilMessages(int(good.Stats().Published))
		})
	}
	raw := func(b []byte) func(net.Conn) {
		return func(c net.Conn) { c.Write(b); hold(c) }
	}
	ready := func(b []byte) func(net.Conn) { return raw(append(greetingOf(1), b...)) }
	after := func(b []byte) func(net.Conn) {
		return func(c net.Conn) {
			if greet(c, "PUB", 1) {
				c.Write(b)
				hold(c)
			}
		}
	}
	random := make([]byte, 4096)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	random[0] = 'x'

	f("closes at once", ReasonClosed, func(c net.Conn) { c.Close() })
	f("silent", ReasonHandshakeTimeout, hold)
	f("half a greeting", ReasonHandshakeTimeout, raw(greetingOf(1)[:30]))
	f("half a greeting and gone", ReasonClosed, func(c net.Conn) {
		c.Write(greetingOf(1)[:30])
		io.CopyN(io.Discard, c, greetingBytes)
		c.Close()
	})
	f("random bytes", ReasonMalformedGreeting, raw(random))
	f("http", ReasonMalformedGreeting, raw([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")))
	f("old protocol", ReasonMalformedGreeting, func(c net.Conn) {
		g := greetingOf(0)
		g[10] = 2
		c.Write(g)
		hold(c)
	})
	f("other security", ReasonSecurity, func(c net.Conn) {
		g := greetingOf(1)
		copy(g[12:], "CURVE")
		c.Write(g)
		hold(c)
	})
	f("no ready", ReasonHandshakeTimeout, raw(greetingOf(1)))
	f("half a ready", ReasonHandshakeTimeout, ready(readyOf("PUB")[:12]))
	f("malformed ready", ReasonMalformedReady, ready(appendCommand(nil, "READY", []byte{200, 'x'})))
	f("ready that panics the library", ReasonMalformedReady, ready(appendCommand(nil, "READY", []byte("\x0bSocket-Type\x00"))))
	f("ready with a long value", ReasonMalformedReady, ready(appendCommand(nil, "READY", []byte("\x0bSocket-Type\xff\xff\xff\xffPUB"))))
	f("ready as message", ReasonMalformedReady, ready(appendFrame(nil, 0, []byte("\x05READY"))))
	f("ready without end", ReasonMalformedReady, ready(appendFrame(nil, flagCommand|flagMore, []byte("\x05READY"))))
	f("other command", ReasonMalformedReady, ready(appendCommand(nil, "HELLO", nil)))
	f("empty command", ReasonMalformedReady, ready(appendFrame(nil, flagCommand, nil)))
	f("refuses us", ReasonRejected, ready(appendCommand(nil, "ERROR", []byte("\x04nope"))))
	f("wrong socket type", ReasonSocketType, ready(readyOf("ROUTER")))
	f("unknown socket type", ReasonSocketType, ready(readyOf("XYZ")))
	f("no socket type", ReasonSocketType, ready(appendCommand(nil, "READY", nil)))
	f("oversized ready", ReasonOversizedFrame, ready(longFrame(flagCommand, maxHandshakeFrame+1)))
	f("ready of 64 GiB", ReasonOversizedFrame, ready(longFrame(flagCommand, 64<<30)))
	f("ready of 2^63", ReasonOversizedFrame, ready(longFrame(flagCommand, 1<<63)))

	f("frame of 64 GiB", ReasonOversizedFrame, after(longFrame(0, 64<<30)))
	f("frame of 2^62", ReasonOversizedFrame, after(longFrame(0, 1<<62)))
	f("frame of 2^64-1", ReasonOversizedFrame, after(longFrame(flagMore, 1<<64-1)))
	f("second frame beyond the limit", ReasonOversizedFrame, after(append(appendFrame(nil, flagMore, make([]byte, 300)), longFrame(0, 16<<20)...)))
	f("oversized command", ReasonOversizedFrame, after(longFrame(flagCommand, maxCommand+1)))
	f("endless more", ReasonTooManyFrames, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			flood(c, bytes.Repeat(appendFrame(nil, flagMore, []byte("x")), 1000))
		}
	})
	f("endless malformed messages", ReasonMalformedMessages, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			flood(c, bytes.Repeat(appendFrame(nil, 0, []byte("x")), 1000))
		}
	})
	f("reserved flags", ReasonMalformedFrame, after([]byte{0x80, 1, 'x'}))
	f("command with more", ReasonMalformedFrame, after([]byte{flagCommand | flagMore, 1, 0}))
	f("nameless command", ReasonMalformedFrame, after([]byte{flagCommand, 1, 9}))
	f("short ping", ReasonMalformedFrame, after(appendCommand(nil, "PING", []byte{0})))
	f("error command", ReasonRejected, after(appendCommand(nil, "ERROR", []byte("\x02no"))))
	f("ping flood", ReasonCommandFlood, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			go flood(c, bytes.Repeat(appendCommand(nil, "PING", []byte("\x00\x00context")), 100))
			hold(c)
		}
	})
	f("ping flood, not reading", ReasonCommandFlood, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			flood(c, bytes.Repeat(appendCommand(nil, "PING", []byte("\x00\x00context")), 100))
		}
	})
	f("command flood within a message", ReasonCommandFlood, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			c.Write(appendFrame(nil, flagMore, []byte("topic")))
			flood(c, bytes.Repeat(appendCommand(nil, "PONG", nil), 1000))
		}
	})
	f("silent after the handshake", ReasonSilent, after(nil))
	f("silent within a frame", ReasonSilent, after(longFrame(0, 1000)[:5]))
	f("closes after the handshake", ReasonClosed, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			readFrame(c) // The subscription: with it unread this would be a reset.
			c.Close()
		}
	})
	f("resets", ReasonReset, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
	})
}

// flood writes b again and again until the other side is gone.
func flood(c net.Conn, b []byte) {
	for {
		if _, err := c.Write(b); err != nil {
			return
		}
	}
}

// TestPeerThatNeverReads: what we write must not block for ever. PINGs from us
// and PONGs have a deadline each.
func TestPeerThatNeverReads(t *testing.T) {
	noLeaks(t)
	ours, theirs := net.Pipe() // It has no buffer: the first write blocks.
	defer theirs.Close()
	defer ours.Close()
	k := newLink(ours, "tcp://test:1", 1, limits{4096, 1 << 20, 8})
	go theirs.Write(appendCommand(nil, "PING", []byte{0, 0}))
	_, err := k.receive()
	if r := k.fail(context.Background(), err).Reason; r != ReasonNotReading {
		t.Errorf("reason %s (%v), want %s", r, err, ReasonNotReading)
	}
}

// TestMalformedMessages are counted and change nothing.
func TestMalformedMessages(t *testing.T) {
	noLeaks(t)
	var wire []byte
	for _, frames := range [][]string{
		{"one"}, {"", "12345678"}, {"", "1234567", "p"}, {"", "123456789", "p"}, {"", "", "p"}, {"a", "b", "c", "d"},
	} {
		for i, b := range frames {
			flags := byte(flagMore)
			if i == len(frames)-1 {
				flags = 0
			}
			wire = appendFrame(wire, flags, []byte(b))
		}
	}
	wire = append(wire, messageOf("kv@a2", 4, "foreign")...)
	wire = append(wire, messageOf("kv@a", 5, "own")...)
	tap := subscribe(t, SubscriberConfig{Topic: "kv@a", Endpoint: peers(t, func(c net.Conn) {
		if greet(c, "PUB", 1) {
			c.Write(wire)
			hold(c)
		}
	})})
	tap.untilMessages(1)
	st := tap.sub.Stats()
	if st.Malformed != 6 || st.ForeignTopic != 1 || st.Messages != 1 || st.Bytes != 3 || tap.seqs[0] != 5 {
		t.Errorf("%+v, seqs %v; want 6 malformed, 1 foreign, 1 message of 3 bytes with seq 5", st, tap.seqs)
	}
}
