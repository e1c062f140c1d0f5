//go:build !linux

package zmqwire

import "syscall"

// set sets what every system knows: nothing. Keepalive and the PING of the
// connection stand for TCP_USER_TIMEOUT.
func (socketOptions) set(string, syscall.RawConn) error { return nil }
