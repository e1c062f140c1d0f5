package zmqwire

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// setSocketOptions sets TCP_USER_TIMEOUT, and a receive buffer where one is
// asked for. A limit of the system below the buffer is no error.
func setSocketOptions(network string, c syscall.RawConn, recvBuffer int) error {
	var err error
	ctlErr := c.Control(func(fd uintptr) {
		if strings.HasPrefix(network, "tcp") {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		}
		if recvBuffer > 0 && err == nil {
			setReceiveBuffer(int(fd), recvBuffer)
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
