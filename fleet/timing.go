package fleet

import "time"

// Timing are the patience and the pauses of the fleet. Zero values mean the
// defaults named at each field.
type Timing struct {
	// DisconnectGrace is how long a transport may be down before its stream
	// says so, 10 s.
	DisconnectGrace time.Duration
	// ForgetAfter is how long the entries of a disconnected stream stay,
	// 10 min.
	ForgetAfter time.Duration
	// RestoreGrace is how long a restored stream may wait for its publisher to
	// confirm it, 1 min.
	RestoreGrace time.Duration

	// Reconnect and MaxReconnect bound the wait between two attempts to
	// connect; the defaults are zmqwire's.
	Reconnect, MaxReconnect time.Duration

	// IdleProbe is the silence after which the replay endpoint is asked for a
	// lost last batch, 2 s; it doubles up to MaxIdleProbe, 1 min.
	IdleProbe, MaxIdleProbe time.Duration

	// ReplayAttempts bounds the replays in a row that bring nothing new before
	// a gap is given up, 3; ReplayBackoff, doubling from 100 ms to 2 s, lies
	// between them.
	ReplayAttempts                  int
	ReplayBackoff, MaxReplayBackoff time.Duration
	// ReplayInactivity ends a replay that connects to or brings nothing, 2 s; ReplayBudget
	// any replay, 1 min: what is left is asked for again, behind the others.
	ReplayInactivity, ReplayBudget time.Duration

	// Resync is the pause before a stream whose gap no replay endpoint
	// answered for tries to start again from the whole history, 5 s; it
	// doubles up to MaxResync, 5 min.
	Resync, MaxResync time.Duration

	// Poll is how often files are looked at, whatever their watch says, 10 s.
	Poll time.Duration
	// Resolve is how often a DNS source is looked up, 10 s.
	Resolve time.Duration
}

func (t Timing) withDefaults() Timing {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&t.DisconnectGrace, 10*time.Second)
	def(&t.ForgetAfter, 10*time.Minute)
	def(&t.RestoreGrace, time.Minute)
	def(&t.IdleProbe, 2*time.Second)
	def(&t.MaxIdleProbe, time.Minute)
	t.MaxIdleProbe = max(t.MaxIdleProbe, t.IdleProbe)
	if t.ReplayAttempts <= 0 {
		t.ReplayAttempts = 3
	}
	def(&t.ReplayBackoff, 100*time.Millisecond)
	def(&t.MaxReplayBackoff, 2*time.Second)
	def(&t.ReplayInactivity, 2*time.Second)
	def(&t.ReplayBudget, time.Minute)
	def(&t.Resync, 5*time.Second)
	def(&t.MaxResync, 5*time.Minute)
	def(&t.Poll, 10*time.Second)
	def(&t.Resolve, 10*time.Second)
	return t
}
