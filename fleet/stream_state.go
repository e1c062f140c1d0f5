package fleet

import (
	"fmt"
	"time"
)

// probeAt is when silence has lasted long enough to ask. The wait doubles while
// nothing comes.
func (s *stream) probeAt() time.Time {
	return s.quietSince.Add(max(s.probeWait, s.cfg.IdleProbe))
}

// tick lets time pass: grace periods end.
func (s *stream) tick(now time.Time) {
	if s.trust == Restored && s.due(now, s.restoredAt.Add(s.cfg.RestoreGrace)) {
		s.expireRestored(now)
	}
	if !s.up && s.everUp && !s.forgotten && s.due(now, s.downSince.Add(s.cfg.ForgetAfter)) {
		s.begin(Connecting)
		s.forgotten = true
	}
	s.forgotten = s.forgotten && !s.up
	s.show(now, "time passed")
}

// expireRestored clears what nothing confirmed; what waits begins the stream.
func (s *stream) expireRestored(now time.Time) {
	held := s.pending.detach()
	s.begin(Connecting)
	s.lastErr = "nothing confirmed the snapshot in time"
	s.pending = held
	if s.pending.len() > 0 {
		s.unfilled(now, "the replay endpoint does not answer")
		s.laterResync(now)
	} else if s.up && s.cfg.replay {
		s.beginFill(now)
	}
}

// deadline is when tick or want should be called next; false: at the next input.
func (s *stream) deadline() (at time.Time, ok bool) {
	sooner := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if s.trust == Restored {
		sooner(s.restoredAt.Add(s.cfg.RestoreGrace))
	}
	if !s.up {
		if s.everUp && s.shown != Disconnected {
			sooner(s.downSince.Add(s.cfg.DisconnectGrace))
		}
		if s.everUp && !s.forgotten {
			sooner(s.downSince.Add(s.cfg.ForgetAfter))
		}
		return at, ok
	}
	if s.inflight || !s.cfg.replay || s.liar {
		return at, ok
	}
	if s.filling {
		sooner(s.notBefore)
		return at, ok
	}
	if !s.resyncAt.IsZero() {
		sooner(s.resyncAt)
	}
	sooner(s.probeAt())
	return at, ok
}

// state is the visible state.
func (s *stream) state(now time.Time) State {
	switch {
	case !s.up && s.everUp && (s.shown == Disconnected || !now.Before(s.downSince.Add(s.cfg.DisconnectGrace))):
		return Disconnected
	case s.trust == Restored:
		return Restored
	case s.trust == Connecting && !s.has && !s.hasHead:
		return Connecting
	case s.filling || s.unconfirmed && s.up:
		return Replaying
	}
	return s.trust
}

// show tells a transition of the visible state, once.
func (s *stream) show(now time.Time, why string) {
	to := s.state(now)
	if to == s.shown {
		return
	}
	from := s.shown
	s.shown = to
	if why == "" || to == Suspect || to == Partial {
		why = s.reason(to)
	}
	if s.cfg.changed != nil {
		s.cfg.changed(from, to, why)
	}
}

// reason is why a state was reached that no single input explains.
func (s *stream) reason(to State) string {
	switch {
	case to == Live:
		return "nothing is missing"
	case to == Replaying && s.hasHead:
		return fmt.Sprintf("waiting for batch %d, the newest is %d", s.next(), s.head)
	case to == Replaying:
		return "waiting for the end of the replay"
	}
	return s.lastErr
}
