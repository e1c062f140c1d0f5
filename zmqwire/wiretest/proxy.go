package wiretest

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy stands between a client and a TCP server and does to their connection
// what networks do. It forwards the client's bytes as they come and the
// server's ZMTP frames message by message, so that whole messages can be
// dropped. Its faults may be set at any time; each holds for every connection.
type Proxy struct {
	ln     net.Listener
	server string
	wg     sync.WaitGroup

	mu     sync.Mutex
	wake   *sync.Cond
	conns  map[net.Conn]struct{}
	silent bool
	refuse bool
	closed bool
	delay  time.Duration
	drop   func(n int, frames [][]byte) bool
	cutAt  int // server bytes of a connection after which it is cut, 0: never
}

// NewProxy listens on a free port of 127.0.0.1 and dials server (host:port) for
// each connection. It closes at the test's end.
func NewProxy(tb testing.TB, server string) *Proxy {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	p := &Proxy{ln: ln, server: server, conns: make(map[net.Conn]struct{})}
	p.wake = sync.NewCond(&p.mu)
	p.wg.Go(p.accept)
	tb.Cleanup(p.Close)
	return p
}

// Addr is the proxy's host:port.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Retarget sends later connections to another server, as a name that moves.
func (p *Proxy) Retarget(server string) { p.set(func() { p.server = server }) }

// Silence stops (true) or lets go on (false) every byte in both directions,
// while the connections stay: a partition.
func (p *Proxy) Silence(on bool) { p.set(func() { p.silent = on }) }

// Refuse closes (true) new connections at once.
func (p *Proxy) Refuse(on bool) { p.set(func() { p.refuse = on }) }

// Delay holds each message of the server back for d.
func (p *Proxy) Delay(d time.Duration) { p.set(func() { p.delay = d }) }

// Drop asks f about the n-th message (from 0, of each connection) of the server
// and drops it where f says true. nil drops nothing. The frames are valid during
// the call.
func (p *Proxy) Drop(f func(n int, frames [][]byte) bool) { p.set(func() { p.drop = f }) }

// CutAfter cuts each connection after so many bytes of the server, in the
// middle of a frame if it falls there. 0 cuts none.
func (p *Proxy) CutAfter(bytes int) { p.set(func() { p.cutAt = bytes }) }

// Cut closes all connections.
func (p *Proxy) Cut() {
	p.set(func() {
		for c := range p.conns {
			c.Close()
		}
	})
}

// Close ends the proxy and waits for its goroutines.
func (p *Proxy) Close() {
	p.set(func() { p.closed = true })
	p.ln.Close()
	p.Cut()
	p.wg.Wait()
}

func (p *Proxy) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.wake.Broadcast()
}

func (p *Proxy) accept() {
	for {
		client, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

// add registers a connection, unless the proxy is closed.
func (p *Proxy) add(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		c.Close()
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) remove(c net.Conn) {
	c.Close()
	p.set(func() { delete(p.conns, c) })
}

func (p *Proxy) serve(client net.Conn) {
	if !p.add(client) {
		return
	}
	defer p.remove(client)
	p.mu.Lock()
	refuse, addr := p.refuse, p.server
	p.mu.Unlock()
	if refuse {
		return
	}
	server, err := net.Dial("tcp", addr)
	if err != nil || !p.add(server) {
		return
	}
	defer p.remove(server)
	var up sync.WaitGroup
	up.Go(func() {
		_, _ = io.Copy(&gate{p, server}, client)
		server.Close()
		client.Close()
	})
	p.forward(client, server)
	server.Close()
	client.Close()
	up.Wait()
}

// gate writes when the proxy is not silent.
type gate struct {
	p *Proxy
	w io.Writer
}

func (g *gate) Write(b []byte) (int, error) {
	if err := g.p.wait(); err != nil {
		return 0, err
	}
	return g.w.Write(b)
}

func (p *Proxy) wait() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.silent && !p.closed {
		p.wake.Wait()
	}
	if p.closed {
		return net.ErrClosed
	}
	return nil
}

// forward copies the server's greeting and then whole messages.
func (p *Proxy) forward(client io.Writer, server io.Reader) {
	out := &cutter{w: &gate{p, client}, p: p}
	if _, err := io.CopyN(out, server, 64); err != nil {
		return
	}
	for n := -1; ; { // READY is a command and counts as none.
		raw, frames, err := readMessage(server)
		if err != nil {
			return
		}
		p.mu.Lock()
		delay, drop := p.delay, p.drop
		p.mu.Unlock()
		if len(frames) > 0 {
			n++
			if drop != nil && drop(n, frames) {
				continue
			}
		}
		if delay > 0 {
			time.Sleep(delay)
		}
		if _, err := out.Write(raw); err != nil {
			return
		}
	}
}

// cutter ends a connection after Proxy.cutAt bytes.
type cutter struct {
	w    io.Writer
	p    *Proxy
	sent int
}

func (c *cutter) Write(b []byte) (int, error) {
	c.p.mu.Lock()
	cut := c.p.cutAt
	c.p.mu.Unlock()
	if cut > 0 && c.sent+len(b) > cut {
		_, _ = c.w.Write(b[:max(0, cut-c.sent)])
		return 0, io.ErrClosedPipe
	}
	c.sent += len(b)
	return c.w.Write(b)
}

// readMessage reads one message, or one command, for which frames is empty.
func readMessage(r io.Reader) (raw []byte, frames [][]byte, err error) {
	for {
		head := make([]byte, 2, 9)
		if _, err := io.ReadFull(r, head); err != nil {
			return nil, nil, err
		}
		size := uint64(head[1])
		if head[0]&2 != 0 {
			head = head[:9]
			if _, err := io.ReadFull(r, head[2:]); err != nil {
				return nil, nil, err
			}
			size = binary.BigEndian.Uint64(head[1:])
		}
		if size > 64<<20 {
			return nil, nil, io.ErrShortBuffer
		}
		body := make([]byte, size)
		if _, err := io.ReadFull(r, body); err != nil {
			return nil, nil, err
		}
		raw = append(append(raw, head...), body...)
		if head[0]&4 != 0 {
			return raw, nil, nil
		}
		frames = append(frames, body)
		if head[0]&1 == 0 {
			return raw, frames, nil
		}
	}
}
