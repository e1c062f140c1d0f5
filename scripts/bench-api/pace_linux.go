package main

import (
	"syscall"
	"time"
)

// nap sleeps in the kernel: the runtime's own timers may end a millisecond late
// in a process that waits for sockets.
func nap(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil) // an early end makes a request early by as much
}
