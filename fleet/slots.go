package fleet

import "context"

// slots bound the replays that run at once in the whole process. Probes have
// slots of their own, so that many silent endpoints, each waited for, do not
// keep a gap open elsewhere.
type slots struct {
	gaps, probes chan struct{}
}

func newSlots(n int) slots {
	return slots{make(chan struct{}, n), make(chan struct{}, n)}
}

// acquire waits for a slot; release gives it back.
func (s slots) acquire(ctx context.Context, probe bool) (release func(), err error) {
	ch := s.gaps
	if probe {
		ch = s.probes
	}
	select {
	case ch <- struct{}{}:
		return func() { <-ch }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
