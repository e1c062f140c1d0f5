package index

import (
	"time"

	"golang.org/x/sys/unix"
)

// threadTime is the CPU time of the calling thread: unlike the clock, it does
// not count what other programs of the machine take. Call it with the goroutine
// locked to its thread.
func threadTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}
