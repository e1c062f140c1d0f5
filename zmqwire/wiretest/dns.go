package wiretest

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
)

// Nameserver answers every A query with the same addresses.
type Nameserver struct {
	conn net.PacketConn

	mu     sync.Mutex
	addrs  []netip.Addr
	asking []net.Conn
	closed bool
}

// NewNameserver answers with addrs, which are of IPv4, until the test's end. Then
// it ends its resolvers' questions, too: net.Resolver does not when its context
// ends, but waits five seconds for an answer that nobody sends any more.
func NewNameserver(tb testing.TB, addrs ...string) *Nameserver {
	tb.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	s := &Nameserver{conn: conn}
	s.Move(addrs...)
	var wg sync.WaitGroup
	wg.Go(s.serve)
	tb.Cleanup(func() { s.close(); wg.Wait() })
	return s
}

// Move answers with other addresses from now on.
func (s *Nameserver) Move(addrs ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addrs = nil
	for _, a := range addrs {
		s.addrs = append(s.addrs, netip.MustParseAddr(a))
	}
}

// Resolver asks this nameserver.
func (s *Nameserver) Resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.closed {
			return nil, net.ErrClosed
		}
		conn, err := new(net.Dialer).DialContext(ctx, "udp", s.conn.LocalAddr().String())
		if err == nil {
			s.asking = append(s.asking, conn)
		}
		return conn, err
	}}
}

func (s *Nameserver) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.conn.Close()
	for _, c := range s.asking {
		c.Close()
	}
}

func (s *Nameserver) serve() {
	for buf := make([]byte, 512); ; {
		n, from, err := s.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		_, _ = s.conn.WriteTo(s.answer(buf[:n]), from)
	}
}

// answer is a response with the query's question and an A record per address.
func (s *Nameserver) answer(query []byte) []byte {
	s.mu.Lock()
	addrs := s.addrs
	s.mu.Unlock()
	end := 12
	for query[end] != 0 {
		end += 1 + int(query[end])
	}
	end += 5
	if binary.BigEndian.Uint16(query[end-4:]) != 1 {
		addrs = nil
	}
	out := slices.Clone(query[:end])
	binary.BigEndian.PutUint16(out[2:], 0x8180)
	copy(out[6:12], []byte{0, byte(len(addrs)), 0, 0, 0, 0})
	for _, a := range addrs {
		out = append(out, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
		out = append(out, a.AsSlice()...)
	}
	return out
}
