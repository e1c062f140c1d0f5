package zmqwire

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/go-zeromq/zmq4"
)

// Defaults of every kind of connection.
const (
	defaultHandshakeTimeout = 5 * time.Second
	defaultMaxMessage       = 16 << 20
	defaultMaxFrames        = 8
	// writeTimeout bounds one write to a peer that may not read. What we
	// write to it is small, so a socket buffer takes it unless the peer has
	// not read for long.
	writeTimeout = time.Second
	// userTimeout is how long sent bytes may stay unacknowledged: as long as
	// keepAlive takes to give an idle connection up.
	userTimeout = 11 * time.Second
	// maxCommands a second are heartbeats of a peer with an interval of one
	// millisecond, the shortest that libzmq can be set to.
	maxCommands = 1024
	// maxMalformed messages in a row end a connection: no publisher of ours is
	// there, and to read on costs the other streams.
	maxMalformed = 1000
	// silentIntervals is how many ping intervals without a byte make a peer
	// dead.
	silentIntervals = 3
)

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3}

// target is what a connection is dialled to, and as what.
type target struct {
	endpoint string
	ep       Endpoint
	sock     zmq4.SocketType
	announce byte
	// timeout is the budget of connect and handshake together.
	timeout  time.Duration
	options  socketOptions
	control  func(network, address string) error
	resolver *net.Resolver // nil: the system's
}

// socketOptions are those that Go has no name for.
type socketOptions struct {
	// userTimeout ends a connection whose peer does not take what was sent
	// for so long. Not for a publisher: to it that is a slow subscriber,
	// which ZeroMQ keeps.
	userTimeout bool
	// recvBuffer asks for a receive buffer of so many bytes, 0 for the
	// system's own sizing.
	recvBuffer int
}

// receiving are the options of connections that mostly receive.
var receiving = socketOptions{userTimeout: true}

// dial tries all addresses of the target's name, each with connect and
// handshake, within the budget; every address has its share of what is left.
// The error is a *ConnError of the first address that failed.
func (t *target) dial(ctx context.Context) (net.Conn, byte, error) {
	budget, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	addrs, err := t.resolve(budget)
	if err != nil {
		return nil, 0, t.fail(ctx, "", ReasonResolve, err)
	}
	var first error
	for i, addr := range addrs {
		share, done := t.share(budget, len(addrs)-i)
		conn, minor, err := t.dialAddr(ctx, share, addr)
		done()
		if err == nil {
			return conn, minor, nil
		}
		if first == nil {
			first = err
		}
		if budget.Err() != nil {
			break
		}
	}
	return nil, 0, first
}

func (t *target) share(budget context.Context, left int) (context.Context, context.CancelFunc) {
	deadline, _ := budget.Deadline()
	return context.WithTimeout(budget, time.Until(deadline)/time.Duration(left))
}

// resolve gives the addresses to dial, as they are to be given to net.Dialer.
func (t *target) resolve(ctx context.Context) ([]string, error) {
	if t.ep.Network != "tcp" {
		return []string{t.ep.Address}, nil
	}
	host, port, err := net.SplitHostPort(t.ep.Address)
	if err != nil {
		return nil, err
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return []string{t.ep.Address}, nil
	}
	ips, err := t.resolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	addrs := make([]string, len(ips))
	for i, ip := range ips {
		addrs[i] = net.JoinHostPort(ip.Unmap().String(), port)
	}
	return addrs, nil
}

func (t *target) dialAddr(parent, ctx context.Context, addr string) (net.Conn, byte, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive, Control: t.prepare}
	conn, err := d.DialContext(ctx, t.ep.Network, addr)
	if err != nil {
		return nil, 0, t.fail(parent, addr, dialReason(err), err)
	}
	minor, err := handshake(ctx, conn, t.sock, false, t.announce)
	if err != nil {
		conn.Close()
		return nil, 0, t.fail(parent, addr, ioReason(err, ReasonHandshakeTimeout), err)
	}
	return conn, minor, nil
}

// prepare runs on the socket before it connects, with the resolved address.
func (t *target) prepare(network, address string, c syscall.RawConn) error {
	if t.control != nil {
		if err := t.control(network, address); err != nil {
			return &fault{ReasonDenied, err}
		}
	}
	return t.options.set(network, c)
}

func (t *target) fail(ctx context.Context, peer string, r Reason, err error) error {
	if ctx.Err() != nil {
		r = ReasonStopped
	}
	return &ConnError{Reason: r, Endpoint: t.endpoint, Peer: peer, Err: err}
}

func dialReason(err error) Reason {
	if r := ReasonOf(err); r != "" {
		return r
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT):
		return ReasonRefused
	case errors.Is(err, syscall.ETIMEDOUT), isTimeout(err), errors.Is(err, context.DeadlineExceeded):
		return ReasonConnectTimeout
	}
	return ReasonUnreachable
}

// listen binds ep. The file of an ipc endpoint whose owner is gone is replaced,
// as libzmq does.
func listen(ep Endpoint) (net.Listener, error) {
	if ep.Network == "unix" {
		return listenUnix(ep)
	}
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	return lc.Listen(context.Background(), ep.Network, ep.Address)
}

func listenUnix(ep Endpoint) (net.Listener, error) {
	path := ep.Address
	if ep.Wildcard {
		path = filepath.Join(os.TempDir(), fmt.Sprintf("kvindexd-%016x", rand.Uint64()))
	}
	ln, err := net.Listen("unix", path)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return ln, err
	}
	if conn, dialErr := net.Dial("unix", path); dialErr == nil {
		conn.Close()
		return nil, err
	}
	if st, statErr := os.Lstat(path); statErr != nil || st.Mode()&os.ModeSocket == 0 {
		return nil, err
	}
	if removeErr := os.Remove(path); removeErr != nil {
		return nil, err
	}
	return net.Listen("unix", path)
}

// acceptor makes connections of a bound endpoint: one goroutine accepts, each
// peer has its own for handshake and life.
type acceptor struct {
	endpoint string
	sock     zmq4.SocketType
	announce byte
	timeout  time.Duration
	options  socketOptions
	control  func(network, address string) error
	// maxPending and maxPeers bound the handshakes in flight and the peers
	// that have finished theirs. Who comes on top is closed: ZeroMQ peers
	// come again by themselves.
	maxPending, maxPeers int

	// serve owns a connection whose handshake is done; refused tells of one
	// that did not get there. Both are called from the peer's goroutine.
	serve   func(ctx context.Context, conn net.Conn, minor byte)
	refused func(error)
}

// run accepts until ctx ends, then closes ln and waits for every peer. Peers'
// connections are closed by ctx too.
func (a *acceptor) run(ctx context.Context, ln net.Listener) {
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	pending := make(chan struct{}, a.maxPending)
	peers := make(chan struct{}, a.maxPeers)
	var wg sync.WaitGroup
	defer wg.Wait()
	for ctx.Err() == nil {
		conn, err := ln.Accept()
		if err != nil {
			pause(ctx, 20*time.Millisecond) // Out of descriptors, or closed.
			continue
		}
		select {
		case pending <- struct{}{}:
			wg.Go(func() { a.peer(ctx, conn, pending, peers) })
		default:
			conn.Close()
			a.refused(a.fail(ctx, conn, faultf(ReasonTooManyPeers, "%d handshakes in flight", a.maxPending)))
		}
	}
}

func (a *acceptor) peer(ctx context.Context, conn net.Conn, pending, peers chan struct{}) {
	defer conn.Close()
	minor, err := a.greet(ctx, conn)
	<-pending
	if err != nil {
		a.refused(a.fail(ctx, conn, err))
		return
	}
	select {
	case peers <- struct{}{}:
	default:
		a.refused(a.fail(ctx, conn, faultf(ReasonTooManyPeers, "%d peers are connected", a.maxPeers)))
		return
	}
	defer func() { <-peers }()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	a.serve(ctx, conn, minor)
}

func (a *acceptor) greet(ctx context.Context, conn net.Conn) (byte, error) {
	if a.control != nil {
		addr := conn.RemoteAddr()
		if err := a.control(addr.Network(), addr.String()); err != nil {
			return 0, &fault{ReasonDenied, err}
		}
	}
	if sc, ok := conn.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			if err := a.options.set(conn.RemoteAddr().Network(), raw); err != nil {
				return 0, err
			}
		}
	}
	budget, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	return handshake(budget, conn, a.sock, true, a.announce)
}

func (a *acceptor) fail(ctx context.Context, conn net.Conn, err error) error {
	r := ioReason(err, ReasonHandshakeTimeout)
	if ctx.Err() != nil {
		r = ReasonStopped
	}
	return &ConnError{Reason: r, Endpoint: a.endpoint, Peer: conn.RemoteAddr().String(), Err: err}
}

// pause waits for d or ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// link is an established connection as its reading goroutine sees it. Only
// that goroutine uses it, but for the connection itself, which may be closed
// and written to from elsewhere.
type link struct {
	conn     net.Conn
	endpoint string
	minor    byte
	// quietAfter is how long a read waits; then idle decides. 0: for ever.
	quietAfter time.Duration
	// idle is called when nothing came for quietAfter; its error ends the
	// link.
	idle func() error
	// send writes one command or message of ours.
	send func(frame []byte) error
	// subscription is called with SUBSCRIBE (true) and CANCEL commands.
	subscription func(subscribe bool, topic []byte) error

	reader   *frameReader
	silent   int // quietAfters in a row without a byte
	out      []byte
	commands int // since window
	window   time.Time
}

// limits of what a link reads.
type limits struct{ buffer, maxMessage, maxFrames int }

func newLink(conn net.Conn, endpoint string, minor byte, l limits) *link {
	k := &link{conn: conn, endpoint: endpoint, minor: minor}
	k.reader = newFrameReader(readerFunc(k.read), l.buffer, l.maxMessage, l.maxFrames)
	k.reader.command = k.handleCommand
	k.send = k.write
	k.idle = func() error { return nil }
	return k
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func (k *link) read(p []byte) (int, error) {
	if k.quietAfter > 0 {
		if err := k.conn.SetReadDeadline(time.Now().Add(k.quietAfter)); err != nil {
			return 0, err
		}
	}
	n, err := k.conn.Read(p)
	if n > 0 {
		k.silent = 0
	}
	return n, err
}

// receive returns the next message's frames, valid until the next call.
func (k *link) receive() ([][]byte, error) {
	for {
		frames, err := k.reader.next()
		if err == nil {
			return frames, nil
		}
		if k.quietAfter == 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, err
		}
		k.reader.trim()
		if err := k.idle(); err != nil {
			return nil, err
		}
	}
}

// heartbeat makes a link ask a silent peer for a sign of life, and give it up.
func (k *link) heartbeat(every time.Duration) {
	k.quietAfter = every
	k.idle = func() error {
		if k.minor == 0 {
			return nil // It knows no PING, so silence says nothing.
		}
		if k.silent++; k.silent >= silentIntervals {
			return faultf(ReasonSilent, "nothing read for %v, PING unanswered", silentIntervals*every)
		}
		k.out = appendCommand(k.out[:0], "PING", []byte{0, 0})
		return k.send(k.out)
	}
}

// handleCommand answers PING and counts commands. The peer's heartbeat TTL is
// not kept: a peer that wants to be pinged is, by our own interval.
func (k *link) handleCommand(body []byte) error {
	if err := k.countCommand(); err != nil {
		return err
	}
	name, data, ok := splitCommand(body)
	if !ok {
		return faultf(ReasonMalformedFrame, "command without a name in %d bytes", len(body))
	}
	switch string(name) {
	case "PING":
		if len(data) < 2 || len(data) > 2+maxPingContext {
			return faultf(ReasonMalformedFrame, "PING of %d bytes, expected a TTL of 2 and a context of up to %d", len(data), maxPingContext)
		}
		k.out = appendCommand(k.out[:0], "PONG", data[2:])
		return k.send(k.out)
	case "ERROR":
		return faultf(ReasonRejected, "peer says %.256q", data)
	case "SUBSCRIBE", "CANCEL":
		if k.subscription != nil {
			return k.subscription(string(name) == "SUBSCRIBE", data)
		}
	}
	return nil
}

// maxPingContext is the longest context that ZMTP allows.
const maxPingContext = 16

func (k *link) countCommand() error {
	now := time.Now()
	if now.Sub(k.window) > time.Second {
		k.window, k.commands = now, 0
	}
	if k.commands++; k.commands > maxCommands {
		return faultf(ReasonCommandFlood, "more than %d commands in a second", maxCommands)
	}
	return nil
}

// write sends one frame, and gives a peer up that does not take it.
func (k *link) write(frame []byte) error {
	if err := k.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if _, err := k.conn.Write(frame); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return faultf(ReasonNotReading, "%d bytes not taken in %v", len(frame), writeTimeout)
		}
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// fail makes a *ConnError of what ended the link.
func (k *link) fail(ctx context.Context, err error) *ConnError {
	r := ioReason(err, ReasonSilent)
	if ctx.Err() != nil {
		r = ReasonStopped
	}
	return &ConnError{Reason: r, Endpoint: k.endpoint, Peer: k.conn.RemoteAddr().String(), Err: err}
}
