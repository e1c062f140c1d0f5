package fleet

import (
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"
)

// errStopReplay ends a replay whose remaining replies are of no use.
var errStopReplay = errors.New("replay no longer wanted")

// purpose is why a replay is asked for.
type purpose uint8

const (
	// toFill a known gap, or to confirm after a reconnect.
	toFill purpose = iota
	// toProbe whether silence hides a lost last batch.
	toProbe
	// toResync a stream that is suspect or partial only because the replay
	// endpoint did not answer at the time.
	toResync
)

// replayRequest is one replay that the stream wants made.
type replayRequest struct {
	from    uint64
	purpose purpose
	// epoch is given back with the replies: those of a past one are ignored.
	epoch uint64
}

// canFill reports whether a replay may still bring the next batch.
func (s *stream) canFill() bool {
	if s.cfg.fillable != nil {
		return s.cfg.fillable(s.next())
	}
	return s.cfg.replay && !s.liar
}

// beginFill starts to wait for a replay.
func (s *stream) beginFill(now time.Time) {
	if !s.filling {
		s.filling = true
		s.attempts, s.notBefore = 0, now
	}
}

// drain applies what waits and now continues the stream.
func (s *stream) drain(now time.Time) {
	for !s.unconfirmed {
		p, ok := s.pending.take(s.next())
		if !ok {
			break
		}
		s.applyOne(now, s.next(), p.digest, p.payload)
	}
}

// settle ends the filling where nothing is missing any more.
func (s *stream) settle(now time.Time) {
	if !s.filling || s.unconfirmed || s.pending.len() > 0 || !s.has {
		return
	}
	if s.hasHead && s.last < s.head || s.inflight && s.asked.epoch == s.epoch && !s.hasHead {
		return
	}
	s.filled()
}

// filled: nothing is missing.
func (s *stream) filled() {
	s.filling, s.attempts = false, 0
	if s.trust == Live {
		s.lastErr = ""
	}
}

// skipTo gives up what is missing before seq, and uses what waits up to it.
func (s *stream) skipTo(now time.Time, seq uint64, why string) {
	for _, at := range s.pending.upTo(seq) {
		p, ok := s.pending.take(at)
		if !ok {
			continue // it continued the one before
		}
		s.giveUp(at, why)
		s.applyOne(now, at, p.digest, p.payload)
		s.drain(now)
	}
	s.giveUp(seq, why)
}

// giveUp counts next..to-1 as lost. The caller applies to.
func (s *stream) giveUp(to uint64, why string) {
	if to <= s.next() {
		return
	}
	n := to - s.next()
	s.lose(n)
	if s.givenUp.To == 0 {
		s.givenUp.From = s.next()
	}
	s.givenUp.To = to
	if !s.has {
		s.trust = Partial
		s.lastErr = fmt.Sprintf("the first %d batches are lost: %s", n, why)
		return
	}
	s.distrust(fmt.Sprintf("batches %d..%d are lost: %s", s.next(), to-1, why))
}

// want returns the replay to make now, if any, and counts on its being made.
func (s *stream) want(now time.Time) (replayRequest, bool) {
	if s.inflight || !s.up || !s.cfg.replay || s.liar {
		return replayRequest{}, false
	}
	r := replayRequest{purpose: toFill, epoch: s.epoch}
	if s.has {
		r.from = s.last
	}
	switch {
	case s.filling:
		if now.Before(s.notBefore) {
			return r, false
		}
	case s.due(now, s.resyncAt):
		r.purpose, r.from = toResync, 0
	case !now.Before(s.probeAt()):
		r.purpose = toProbe
		s.digests.settled() // after so long a silence
	default:
		return r, false
	}
	s.inflight, s.asked, s.anyReply = true, r, false
	s.began, s.beganHas = s.last, s.has
	return r, true
}

func (s *stream) due(now, at time.Time) bool { return !at.IsZero() && !now.Before(at) }

// replied takes one batch of the replay r. skipped is how many numbers before
// it are proven not to come; 0 where that is not known. An error says that the
// rest of the replay is of no use.
func (s *stream) replied(now time.Time, r replayRequest, seq uint64, payload []byte, skipped uint64) error {
	if r.epoch != s.epoch {
		return errStopReplay
	}
	d := xxh3.Hash(payload)
	first := !s.anyReply
	s.anyReply = true
	if r.purpose == toResync && first {
		if seq > 0 {
			s.resyncAt, s.resyncWait = time.Time{}, 0
			s.quietSince = now
			return errStopReplay
		}
		s.resync(now)
	}
	err := s.merge(now, seq, d, payload, skipped)
	s.show(now, "")
	return err
}

// resync begins the stream anew under the replay that is running: it has the
// whole history.
func (s *stream) resync(now time.Time) {
	head, hasHead, tried := s.head, s.hasHead, s.conflictResync
	s.begin(Live)
	s.epoch = s.asked.epoch
	s.head, s.hasHead, s.conflictResync = head, hasHead, tried
	s.began, s.beganHas = 0, false
	s.lastErr = ""
	s.filling = true
	s.show(now, "the publisher still has its whole history: starting again from it")
}

// merge puts a replied batch into its place.
func (s *stream) merge(now time.Time, seq, digest uint64, payload []byte, skipped uint64) error {
	if d, ok := s.known(seq); ok && d != digest {
		s.contradicted(now, seq)
		return errStopReplay
	}
	switch {
	case s.has && seq == s.last:
		s.confirm(now)
	case s.has && seq < s.last:
	case s.unconfirmed && s.has && s.trust == Restored:
		s.begin(Connecting)
		s.lastErr = "the publisher no longer has the batch that the snapshot ends with"
		s.beginFill(now)
		return errStopReplay
	default:
		s.fill(now, seq, digest, payload, skipped)
	}
	return nil
}

// contradicted: the replay has another batch of a number than we have. That is
// a restart, unless it happens again and again on one connection: then the
// replay endpoint is not this publisher's.
func (s *stream) contradicted(now time.Time, seq uint64) {
	s.contradictions++
	s.liar = s.contradictions >= maxContradictions
	s.restart(now, fmt.Sprintf("replay has another batch %d", seq))
	if s.liar {
		s.trust = Partial
		s.lastErr = "the replay endpoint contradicts the live messages again and again: is it another publisher's?"
	}
}

// maxContradictions is how often one connection's replays may differ from its
// live messages. Once is a restart that the replay saw first.
const maxContradictions = 3

// fill applies a replied batch beyond the watermark, or lets it wait.
func (s *stream) fill(now time.Time, seq, digest uint64, payload []byte, skipped uint64) {
	if s.unconfirmed && s.has {
		s.unconfirmed = false
		s.distrust(fmt.Sprintf("the publisher no longer has batch %d: nothing tells whether it is the same process", s.last))
	}
	if seq > s.next() && skipped == 0 {
		s.beginFill(now)
		if !s.pending.put(seq, digest, payload) {
			s.n.overflows.Add(1)
		}
		return
	}
	s.skipTo(now, seq, "the publisher no longer has them")
	if s.has && seq <= s.last {
		return // it waited, and was applied on the way
	}
	s.n.replayed.Add(1)
	s.digests.replayed(seq, digest)
	s.applyOne(now, seq, digest, payload)
	s.drain(now)
	s.settle(now)
}

// confirm: the publisher has batch last exactly as we applied it.
func (s *stream) confirm(now time.Time) {
	if s.trust == Restored {
		s.trust = s.afterRestore
	}
	s.unconfirmed, s.contradictions = false, 0
	s.drain(now)
	s.settle(now)
}

// replayDone ends the replay r. err is nil where its end marker came.
func (s *stream) replayDone(now time.Time, r replayRequest, err error) {
	s.inflight = false
	stale := r.epoch != s.epoch
	switch {
	case err == nil:
		s.n.replays.Add(1)
	case !errors.Is(err, errStopReplay):
		s.n.replayFailures.Add(1)
	}
	if stale || errors.Is(err, errStopReplay) {
		s.show(now, "")
		return
	}
	if r.purpose == toProbe && !s.filling {
		s.probeWait = min(2*max(s.probeWait, s.cfg.IdleProbe), s.cfg.MaxIdleProbe)
		if s.has && (!s.beganHas || s.last > s.began) {
			s.n.gaps.Add(1) // silence hid something
			s.probeWait = 0
		}
		s.quietSince = now
	}
	if err != nil {
		s.lastErr = err.Error()
		s.failed(now, r)
	} else {
		s.answered(now)
	}
	s.show(now, "")
}

// answered: a replay came to its end.
func (s *stream) answered(now time.Time) {
	if s.beganHas && !s.anyReply && s.has && s.last == s.began {
		s.restart(now, fmt.Sprintf("it has no batch %d", s.began))
		return
	}
	if s.trust == Connecting && !s.has && s.pending.len() == 0 {
		s.trust = Live
	}
	s.drain(now)
	if s.missing() {
		s.again(now)
		return
	}
	if !s.unconfirmed {
		s.filled()
	}
}

// missing: something is known to have been published that was not applied.
func (s *stream) missing() bool {
	return s.pending.len() > 0 || s.hasHead && (!s.has || s.last < s.head)
}

// failed: a replay ended before its end marker.
func (s *stream) failed(now time.Time, r replayRequest) {
	if r.purpose == toResync && !s.filling {
		s.laterResync(now)
		return
	}
	if s.filling {
		s.again(now)
	}
}

// again asks once more after a pause, or gives up. Progress makes the count
// start anew.
func (s *stream) again(now time.Time) {
	if s.has && (!s.beganHas || s.last > s.began) {
		s.attempts = 0
	}
	s.attempts++
	if s.attempts < s.cfg.ReplayAttempts || s.trust == Restored {
		s.notBefore = now.Add(min(s.cfg.ReplayBackoff<<min(s.attempts-1, 10), s.cfg.MaxReplayBackoff))
		return
	}
	s.unfilled(now, "replay failed: "+s.lastErr)
	s.laterResync(now)
}

// laterResync plans to try the whole history again.
func (s *stream) laterResync(now time.Time) {
	if s.trust != Suspect && s.trust != Partial {
		s.resyncAt = time.Time{}
		return
	}
	s.resyncWait = min(max(2*s.resyncWait, s.cfg.Resync), s.cfg.MaxResync)
	s.resyncAt = now.Add(s.resyncWait)
}

// unfilled gives the gap up and goes on with what waits.
func (s *stream) unfilled(now time.Time, why string) {
	if s.unconfirmed && s.has {
		s.unproven(now)
	}
	s.unconfirmed = false
	if to, ok := s.pending.last(); ok {
		s.skipTo(now, to, why)
	}
	// What overflowed is found by the next live message or probe.
	s.hasHead = s.hasHead && s.has && s.head <= s.last
	s.filling, s.attempts = false, 0
}

// recheck gives up a gap that a capture will not fill.
func (s *stream) recheck(now time.Time) {
	if s.filling && !s.canFill() {
		s.unfilled(now, "the capture has no replay of them")
	}
	s.show(now, "")
}
