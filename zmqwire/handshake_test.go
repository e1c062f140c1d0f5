package zmqwire

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

// shake runs our handshake against a peer that sends in, and closes unless it is
// to stay.
func shake(in []byte, sock zmq4.SocketType, server, stay bool) (byte, error) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	go io.Copy(io.Discard, theirs)
	go func() {
		theirs.Write(in)
		if !stay {
			theirs.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return handshake(ctx, ours, sock, server, 0)
}

func TestHandshakeTellsMinor(t *testing.T) {
	f := func(minor byte, sock zmq4.SocketType, peer string, server bool) {
		t.Helper()
		got, err := shake(append(greetingOf(minor), readyOf(peer)...), sock, server, true)
		if err != nil || got != minor {
			t.Errorf("%s with a %s of 3.%d: minor %d, err %v", sock, peer, minor, got, err)
		}
	}
	f(0, zmq4.Sub, "PUB", false)
	f(1, zmq4.Sub, "XPUB", true)
	f(0, zmq4.Pub, "SUB", true)
	f(1, zmq4.Pub, "XSUB", false)
	f(1, zmq4.Dealer, "ROUTER", false)
	f(1, zmq4.Router, "DEALER", true)
	f(1, zmq4.Router, "REQ", true)
}

// FuzzHandshake: no bytes of a peer panic or hang, and who is no publisher is
// refused.
func FuzzHandshake(f *testing.F) {
	f.Add(append(greetingOf(1), readyOf("PUB")...), false)
	f.Add(append(greetingOf(0), readyOf("XPUB")...), true)
	f.Add(append(greetingOf(1), appendCommand(nil, "READY", property(property(nil, "Identity", ""), "socket-type", "PUB"))...), false)
	f.Add(append(greetingOf(1), appendCommand(nil, "READY", []byte("\x0bSocket-Type\x00"))...), false)
	f.Add(append(greetingOf(1), appendCommand(nil, "ERROR", []byte("x"))...), false)
	f.Add(append(greetingOf(1), longFrame(flagCommand, 64<<30)...), true)
	f.Add(greetingOf(1)[:20], false)
	f.Fuzz(func(t *testing.T, in []byte, server bool) {
		_, err := shake(in, zmq4.Sub, server, false)
		if err == nil && !bytes.Contains(in, []byte("PUB")) {
			t.Fatal("a handshake with a peer that is no publisher")
		}
	})
}
