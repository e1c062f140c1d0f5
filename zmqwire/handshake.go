package zmqwire

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

const (
	greetingBytes = 64
	// maxHandshakeFrame bounds a peer's READY. libzmq's has about 40 bytes.
	maxHandshakeFrame = 4 << 10
	zmtpMajor         = 3
)

// handshake makes conn a ZMTP connection of our socket type and returns the
// minor version of ZMTP 3 that the peer speaks. announce is the minor version
// that we claim. ctx's deadline bounds it and ctx's end cuts it at once by
// closing conn. On an error conn is of no further use.
//
// go-zeromq's Open does it, behind a guard that lets through only what the
// library can take: it panics on a malformed READY and allocates whatever
// length a frame claims.
func handshake(ctx context.Context, conn net.Conn, sock zmq4.SocketType, server bool, announce byte) (minor byte, err error) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return 0, err
		}
	}
	g := &guard{Conn: conn, sock: sock, announce: announce}
	err = open(g, sock, server)
	if g.err != nil {
		err = g.err // The library's words for it say less.
	}
	if !stop() {
		return 0, context.Cause(ctx)
	}
	if err != nil {
		return 0, err
	}
	return g.peerMinor(), conn.SetDeadline(time.Time{})
}

func open(g *guard, sock zmq4.SocketType, server bool) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = faultf(ReasonMalformedReady, "handshake panicked: %v", p)
		}
	}()
	_, err = zmq4.Open(g, null.Security(), sock, nil, server, nil)
	return err
}

// guard stands between the library and the connection during the handshake. It
// reads the peer's greeting and READY itself, each in whole, and passes them on
// after it has checked them.
type guard struct {
	net.Conn
	sock     zmq4.SocketType
	announce byte

	greeted  bool
	greeting [greetingBytes]byte
	pending  []byte // checked and not yet read by the library
	done     bool   // READY was read
	err      error  // the first
}

func (g *guard) Read(p []byte) (int, error) {
	if len(g.pending) == 0 && g.err == nil {
		g.pending, g.err = g.advance()
	}
	if g.err != nil {
		return 0, g.err
	}
	n := copy(p, g.pending)
	g.pending = g.pending[n:]
	return n, nil
}

// Write sets the version in our greeting, which the library fixes at 3.0.
func (g *guard) Write(p []byte) (int, error) {
	if g.announce > 0 && len(p) == greetingBytes && p[0] == 0xff {
		p = slices.Clone(p)
		p[11] = g.announce
		g.announce = 0
	}
	n, err := g.Conn.Write(p)
	if err != nil && g.err == nil {
		g.err = err
	}
	return n, err
}

func (g *guard) advance() ([]byte, error) {
	switch {
	case !g.greeted:
		g.greeted = true
		return g.readGreeting()
	case !g.done:
		g.done = true
		return g.readReady()
	}
	return nil, faultf(ReasonMalformedReady, "more than one command in the handshake")
}

// readGreeting reads 0xff, 8 bytes of padding, 0x7f, the version (2), the
// mechanism (20), as-server (1) and filler.
func (g *guard) readGreeting() ([]byte, error) {
	b := g.greeting[:]
	// A peer that speaks something else may have sent all it ever sends:
	// look at the first bytes before waiting for 64.
	for have := 0; have < len(b); {
		n, err := g.Conn.Read(b[have:])
		have += n
		if have > 0 && b[0] != 0xff || have > 9 && b[9] != 0x7f {
			return nil, faultf(ReasonMalformedGreeting, "no ZMTP signature in %x", b[:min(have, 10)])
		}
		if have > 10 && b[10] < zmtpMajor {
			return nil, faultf(ReasonMalformedGreeting, "peer speaks ZMTP %d, expected 3", b[10])
		}
		if err != nil && have < len(b) {
			return nil, fmt.Errorf("greeting cut after %d of %d bytes: %w", have, len(b), eof(err))
		}
	}
	if m := string(bytes.TrimRight(b[12:32], "\x00")); m != string(zmq4.NullSecurity) {
		return nil, faultf(ReasonSecurity, "peer wants security mechanism %q, expected NULL", m)
	}
	if b[32] > 1 {
		return nil, faultf(ReasonMalformedGreeting, "as-server is %#02x, expected 0 or 1", b[32])
	}
	return b, nil
}

func (g *guard) readReady() ([]byte, error) {
	var h [maxFrameHeader]byte
	head := h[:2]
	if _, err := io.ReadFull(g.Conn, head); err != nil {
		return nil, fmt.Errorf("no READY: %w", eof(err))
	}
	size := uint64(h[1])
	if h[0]&flagLong != 0 {
		head = h[:]
		if _, err := io.ReadFull(g.Conn, head[2:]); err != nil {
			return nil, fmt.Errorf("READY cut in its header: %w", eof(err))
		}
		size = binary.BigEndian.Uint64(h[1:])
	}
	if size > maxHandshakeFrame {
		return nil, faultf(ReasonOversizedFrame, "handshake frame of %d bytes, at most %d are read", size, maxHandshakeFrame)
	}
	if h[0]&^flagLong != flagCommand {
		return nil, faultf(ReasonMalformedReady, "frame flags %#02x, expected a command", h[0])
	}
	frame := make([]byte, len(head)+int(size))
	copy(frame, head)
	body := frame[len(head):]
	if _, err := io.ReadFull(g.Conn, body); err != nil {
		return nil, fmt.Errorf("READY cut: %w", eof(err))
	}
	return frame, checkReady(body, g.sock)
}

// checkReady reads a READY command as far as the library will, and more
// carefully: its properties are a name (1-byte length) and a value (4-byte
// length) each.
func checkReady(body []byte, sock zmq4.SocketType) error {
	name, data, ok := splitCommand(body)
	switch {
	case ok && string(name) == zmq4.CmdError:
		return faultf(ReasonRejected, "peer refused the handshake: %q", data)
	case !ok || string(name) != zmq4.CmdReady:
		return faultf(ReasonMalformedReady, "command %.16q, expected READY", name)
	}
	peer := ""
	for len(data) > 0 {
		n := 1 + int(data[0])
		if n == 1 || len(data) < n+4 {
			return faultf(ReasonMalformedReady, "property name of %d bytes in %d bytes", n-1, len(data))
		}
		size := binary.BigEndian.Uint32(data[n:])
		if uint64(size) > uint64(len(data)-n-4) {
			return faultf(ReasonMalformedReady, "property value of %d bytes in %d bytes", size, len(data)-n-4)
		}
		end := n + 4 + int(size)
		if bytes.EqualFold(data[1:n], []byte("Socket-Type")) {
			peer = string(data[n+4 : end])
		}
		data = data[end:]
	}
	if want := partners(sock); !slices.Contains(want, zmq4.SocketType(peer)) {
		return faultf(ReasonSocketType, "peer is a %.16q socket, expected one of %v", peer, want)
	}
	return nil
}

// partners are the socket types that ours can talk to.
func partners(sock zmq4.SocketType) []zmq4.SocketType {
	switch sock {
	case zmq4.Sub:
		return []zmq4.SocketType{zmq4.Pub, zmq4.XPub}
	case zmq4.Pub:
		return []zmq4.SocketType{zmq4.Sub, zmq4.XSub}
	case zmq4.Dealer:
		return []zmq4.SocketType{zmq4.Router}
	case zmq4.Router:
		return []zmq4.SocketType{zmq4.Dealer, zmq4.Req}
	}
	return nil
}

// peerMinor is the peer's minor version; a newer major can do all of 3.1.
func (g *guard) peerMinor() byte {
	if g.greeting[10] > zmtpMajor {
		return 1
	}
	return g.greeting[11]
}

// eof makes one error of the two ends of a stream, so that a cut handshake is
// not mistaken for a clean one.
func eof(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
