package zmqwire

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"golang.org/x/sys/unix"
)

// TestConnectSocketOptions: a peer that is silently gone is noticed by TCP, too;
// a subscriber that is slow is not taken for one.
func TestConnectSocketOptions(t *testing.T) {
	noLeaks(t)
	get := func(c net.Conn, level, opt int) (v int) {
		t.Helper()
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if ctlErr := raw.Control(func(fd uintptr) { v, err = unix.GetsockoptInt(int(fd), level, opt) }); err != nil || ctlErr != nil {
			t.Fatal(err, ctlErr)
		}
		return v
	}
	check := func(what string, c net.Conn, wantUserTimeout int) {
		t.Helper()
		for _, o := range []struct {
			name             string
			level, opt, want int
		}{
			{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 5},
			{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 2},
			{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3},
			{"TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, wantUserTimeout},
		} {
			if got := get(c, o.level, o.opt); got != o.want {
				t.Errorf("%s: %s is %d, want %d", what, o.name, got, o.want)
			}
		}
	}
	ep := Endpoint{Network: "tcp", Address: "127.0.0.1:0"}
	ln, err := listen(ep)
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan net.Conn, 1)
	a := acceptor{
		sock: zmq4.Pub, timeout: time.Minute, maxPending: 1, maxPeers: 1,
		serve:   func(ctx context.Context, c net.Conn, _ byte) { accepted <- c; <-ctx.Done() },
		refused: func(err error) { t.Error(err) },
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); a.run(ctx, ln) }()
	defer func() { cancel(); <-done }()

	ep.Address = ln.Addr().String()
	tg := target{ep: ep, sock: zmq4.Sub, timeout: time.Minute, options: receiving}
	c, _, err := tg.dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	check("dialled by a subscriber", c, 11_000)
	check("accepted by a publisher", <-accepted, 0)
}
