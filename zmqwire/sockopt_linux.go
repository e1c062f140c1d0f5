package zmqwire

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// set sets the options on a socket of the network. A limit of the system below
// the receive buffer is no error.
func (o socketOptions) set(network string, c syscall.RawConn) error {
	var err error
	ctlErr := c.Control(func(fd uintptr) {
		if o.userTimeout && strings.HasPrefix(network, "tcp") {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		}
		if o.recvBuffer > 0 && err == nil {
			setReceiveBuffer(int(fd), o.recvBuffer)
		}
	})
	if ctlErr != nil {
		return ctlErr
	}
	return err
}

// setReceiveBuffer enlarges the receive buffer, unless the system's limit makes
// it smaller than what the kernel would grow it to by itself: an explicit size
// ends the kernel's own sizing, and a default rmem_max of 208 KiB is far below
// the 6 MiB that this reaches.
func setReceiveBuffer(fd, size int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size) == nil {
		return // Needs CAP_NET_ADMIN.
	}
	if receiveBufferLimit() >= size {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
	}
}

// receiveBufferLimit is net.core.rmem_max, 0 where it cannot be read.
var receiveBufferLimit = sync.OnceValue(func() int {
	b, err := os.ReadFile("/proc/sys/net/core/rmem_max")
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return n
})
