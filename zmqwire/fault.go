package zmqwire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
)

// Reason names in one word why a connection could not be made or ended. The
// words are stable: they stand in the worker's view and as metric labels.
// A Reason is an error so that errors.Is(err, ReasonSilent) asks for it.
type Reason string

// Before there is a connection.
const (
	// ReasonResolve: the host's name has no address.
	ReasonResolve Reason = "resolve_failed"
	// ReasonDenied: SubscriberConfig.Control refused the address.
	ReasonDenied Reason = "denied"
	// ReasonRefused: nobody listens there.
	ReasonRefused Reason = "refused"
	// ReasonConnectTimeout: no answer to the connect within the budget.
	ReasonConnectTimeout Reason = "connect_timeout"
	// ReasonUnreachable: any other failure to connect.
	ReasonUnreachable Reason = "unreachable"
	// ReasonBind: the endpoint could not be bound.
	ReasonBind Reason = "bind_failed"
)

// In the handshake.
const (
	// ReasonHandshakeTimeout: the peer accepted and then did not finish the
	// handshake within the budget.
	ReasonHandshakeTimeout Reason = "handshake_timeout"
	// ReasonMalformedGreeting: the first 64 bytes are no ZMTP 3 greeting.
	ReasonMalformedGreeting Reason = "malformed_greeting"
	// ReasonMalformedReady: the peer's READY cannot be read.
	ReasonMalformedReady Reason = "malformed_ready"
	// ReasonSecurity: the peer wants another mechanism than NULL.
	ReasonSecurity Reason = "wrong_security"
	// ReasonRejected: the peer answered with an ERROR command.
	ReasonRejected Reason = "rejected"
	// ReasonSocketType: the peer is no partner of our socket.
	ReasonSocketType Reason = "wrong_socket_type"
)

// On an established connection, the first three also in the handshake.
const (
	// ReasonClosed: the peer closed the connection.
	ReasonClosed Reason = "closed"
	// ReasonReset: the connection broke.
	ReasonReset Reason = "reset"
	// ReasonOversizedFrame: a frame or message beyond the limit.
	ReasonOversizedFrame Reason = "oversized_frame"
	// ReasonTooManyFrames: a message of more frames than the limit.
	ReasonTooManyFrames Reason = "too_many_frames"
	// ReasonMalformedFrame: flags that ZMTP does not know, or a command that
	// is none.
	ReasonMalformedFrame Reason = "malformed_frame"
	// ReasonCommandFlood: more commands in a second than any peer needs.
	ReasonCommandFlood Reason = "command_flood"
	// ReasonMalformedMessages: nothing but messages that cannot be read.
	ReasonMalformedMessages Reason = "malformed_messages"
	// ReasonSilent: nothing was read for three ping intervals although the
	// peer was asked.
	ReasonSilent Reason = "silent"
	// ReasonNotReading: the peer does not take what we write.
	ReasonNotReading Reason = "not_reading"
	// ReasonTooManyPeers: a bound endpoint has as many peers as it takes.
	ReasonTooManyPeers Reason = "too_many_peers"
	// ReasonStopped: our own side ended the connection.
	ReasonStopped Reason = "stopped"
)

// Error is the word itself.
func (r Reason) Error() string { return string(r) }

// ConnError is a connection's end or a failure to make one.
type ConnError struct {
	Reason Reason
	// Endpoint is the configured endpoint, Peer the address that it stood for
	// (empty where it never came to one).
	Endpoint, Peer string
	// Err tells more; it may be nil.
	Err error
}

// Error reads "tcp://w0:5557 (10.0.0.5:5557): handshake_timeout: ...".
func (e *ConnError) Error() string {
	s := e.Endpoint
	if e.Peer != "" {
		s += " (" + e.Peer + ")"
	}
	s += ": " + string(e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap gives both the Reason and the cause to errors.Is.
func (e *ConnError) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Reason}
	}
	return []error{e.Reason, e.Err}
}

// ReasonOf is the Reason in err's chain, "" where there is none.
func ReasonOf(err error) Reason {
	var r Reason
	if errors.As(err, &r) {
		return r
	}
	return ""
}

// faultf is an error of a Reason that needs more words.
func faultf(r Reason, format string, args ...any) error {
	return &fault{r, fmt.Errorf(format, args...)}
}

type fault struct {
	reason Reason
	err    error
}

func (f *fault) Error() string   { return f.err.Error() }
func (f *fault) Unwrap() []error { return []error{f.reason, f.err} }

// ioReason names what the operating system says of a connection. timeout is
// the Reason of a deadline that passed, which only the caller knows.
func ioReason(err error, timeout Reason) Reason {
	if r := ReasonOf(err); r != "" {
		return r
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		return timeout
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe):
		return ReasonClosed
	case errors.Is(err, syscall.ETIMEDOUT):
		return ReasonSilent
	}
	return ReasonReset
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout() && !errors.Is(err, syscall.ETIMEDOUT)
}
