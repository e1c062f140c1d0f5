package fleet

import (
	"sync"
	"sync/atomic"

	"github.com/kvindexd/kvindexd/normalize"
)

// counters are one publisher's, since the worker's life began. They are read at
// any time and written by whoever holds the publisher's lock.
type counters struct {
	messages, applied, duplicates atomic.Uint64
	unreadable                    atomic.Uint64
	gaps, lost, burnt, overflows  atomic.Uint64
	replays, replayFailures       atomic.Uint64
	replayed                      atomic.Uint64
	restarts                      atomic.Uint64
	malformedMessages             atomic.Uint64
	foreignTopics                 atomic.Uint64

	stored, removed, cleared         atomic.Uint64 // events
	malformedEvents, unknownEvents   atomic.Uint64
	lostRemovals                     atomic.Uint64 // malformed, and removals
	conflicts, contentConflicts      atomic.Uint64
	blockSizeMismatch, rankConflicts atomic.Uint64
	skips                            [normalize.NumSkipReasons]atomic.Uint64
	transitions                      [numStates]atomic.Uint64

	// lag is now - the batch's timestamp, in nanoseconds, of the last batch
	// that had one.
	lag atomic.Int64

	mediaMu sync.Mutex
	media   normalize.SkipCounts
}

// skipped adds what a batch left out. Most batches leave out nothing.
func (c *counters) skipped(s *normalize.SkipCounts) {
	if s.Total() == 0 {
		return
	}
	for i, n := range s.ByReason {
		if n > 0 {
			c.skips[i].Add(n)
		}
	}
	if s.ByReason[normalize.SkipUnknownMedium] > 0 {
		c.mediaMu.Lock()
		c.media.Add(s)
		c.mediaMu.Unlock()
	}
}

// skipCounts are all that were skipped.
func (c *counters) skipCounts() (s normalize.SkipCounts) {
	for i := range s.ByReason {
		s.ByReason[i] = c.skips[i].Load()
	}
	s.Media = c.unknownMedia()
	return s
}

// unknownMedia are the media that are no tier, by name.
func (c *counters) unknownMedia() []normalize.MediumCount {
	c.mediaMu.Lock()
	defer c.mediaMu.Unlock()
	return append([]normalize.MediumCount(nil), c.media.Media...)
}

// add spares the atomic operation for the counts that are nearly always 0.
func add(c *atomic.Uint64, n uint64) {
	if n > 0 {
		c.Add(n)
	}
}
