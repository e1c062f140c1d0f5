//go:build !linux

package index

import "time"

var started = time.Now()

// threadTime is the clock here: the system tells no CPU time of a thread.
func threadTime() time.Duration { return time.Since(started) }
