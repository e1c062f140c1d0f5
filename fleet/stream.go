package fleet

import (
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// sink is what a stream acts on: the index behind one publisher.
type sink interface {
	// apply decodes and indexes one payload. The payload is the caller's.
	apply(now time.Time, payload []byte) outcome
	// clear drops everything that is held.
	clear()
}

// outcome says what a payload did beyond storing and removing.
type outcome struct {
	// unreadable: the batch as a whole could not be decoded.
	unreadable bool
	// cleared: the batch held an AllBlocksCleared.
	cleared bool
	// lostRemovals of the batch could not be read: blocks may be gone that
	// still look held.
	lostRemovals int
	// conflicted: a burst of content conflicts, the sign of a restart that
	// nothing else showed.
	conflicted bool
}

// streamConfig is what a stream needs to know of its surroundings.
type streamConfig struct {
	Timing
	// replay: there is a replay endpoint to ask.
	replay bool
	// onGapClear empties the stream at a gap that stays.
	onGapClear bool
	// fillable, where set, replaces replay: whether the batch of that number
	// will still come as a reply (a capture is read, nobody can be asked).
	fillable func(seq uint64) bool
	// budget is shared by all streams of the process; nil is no bound.
	budget *byteBudget
	// changed is called once per transition of the visible state, restarted
	// once per restart of the publisher.
	changed   func(from, to State, why string)
	restarted func(why string)
}

// stream is the state machine of one publisher. It decides what a sequence
// number means and when to ask for a replay; it opens no socket and reads no
// clock. One caller at a time; it belongs to its publisher's lock.
//
// Two facts make its state: trust, which is Connecting, Live, Partial, Suspect
// or Restored and says what the applied batches are worth, and filling, which
// says that batches before the next live one are being waited for. The visible
// state is derived from these and the transport's.
type stream struct {
	cfg  streamConfig
	sink sink
	n    *counters

	trust   State
	filling bool
	// unconfirmed: nothing proves that the publisher is still the process that
	// sent batch last: the transport was interrupted, or a snapshot was
	// restored. Nothing is applied until that is settled.
	unconfirmed bool

	// The watermark: last is the newest applied batch, digest its payload's.
	has     bool
	last    uint64
	digest  uint64
	digests digests
	lost    uint64
	// givenUp are the numbers that were given up since the connection began,
	// and what lies between them: a live message of one may still come.
	givenUp zmqwire.SeqRange

	// head is the newest live seq of this incarnation, where hasHead.
	head    uint64
	hasHead bool
	pending pending

	up, everUp bool
	downSince  time.Time
	forgotten  bool
	restoredAt time.Time
	// afterRestore is the trust that the restored mark carried.
	afterRestore State

	epoch    uint64
	inflight bool
	asked    replayRequest
	// began is the watermark when the running replay began, hadAny whether
	// any reply of it came.
	began     uint64
	beganHas  bool
	anyReply  bool
	attempts  int
	notBefore time.Time

	quietSince time.Time
	probeWait  time.Duration

	// resyncAt is when to try the whole history again; zero: there is no
	// reason to. conflictResync: it was tried because of conflicts already.
	resyncAt       time.Time
	resyncWait     time.Duration
	conflictResync bool

	// contradictions of replays with live messages on this connection; a liar
	// is not asked any more until the next one.
	contradictions int
	liar           bool

	shown   State
	lastErr string
}

func newStream(cfg streamConfig, s sink, n *counters, now time.Time) *stream {
	cfg.Timing = cfg.Timing.withDefaults()
	st := &stream{cfg: cfg, sink: s, n: n, quietSince: now}
	st.pending.budget = cfg.budget
	return st
}

// restore begins the stream from a snapshot's mark, before anything else.
func (s *stream) restore(now time.Time, m Mark) {
	if !m.HasSeq {
		return
	}
	s.has, s.last, s.digest, s.lost, s.lastErr = true, m.Seq, m.Digest, m.Lost, m.Why
	s.digests.applied(m.Seq, m.Digest)
	s.trust, s.afterRestore, s.unconfirmed = Restored, m.State, true
	if m.State != Live && m.State != Partial {
		s.afterRestore = Suspect
	}
	s.restoredAt = now
	s.show(now, "restored from a snapshot")
}

// mark is the stream's position, for a snapshot.
func (s *stream) mark() Mark {
	st := s.trust
	switch {
	case st == Restored:
		st = s.afterRestore
	case s.unconfirmed:
		st = Suspect
	}
	return Mark{Seq: s.last, HasSeq: s.has, Digest: s.digest, State: st, Lost: s.lost}
}

// next is the seq that would continue the stream.
func (s *stream) next() uint64 {
	if s.has {
		return s.last + 1
	}
	return 0
}

// connected: the transport is up, as of now. What was published before is not
// coming by it.
func (s *stream) connected(now time.Time) {
	s.up, s.everUp = true, true
	s.quietSince, s.probeWait = now, 0
	s.endLive()
	s.unconfirmed = s.has
	s.liar, s.contradictions = false, 0
	switch {
	case s.cfg.replay:
		s.beginFill(now)
	case s.has && s.trust != Restored:
		s.unproven(now)
	}
	s.show(now, "connected")
}

// disconnected: the transport is down. What waited comes again by replay.
func (s *stream) disconnected(now time.Time, err error) {
	if s.up || s.downSince.IsZero() {
		s.downSince = now
	}
	if err != nil {
		s.lastErr = err.Error()
	}
	if s.up {
		s.up = false
		s.endLive()
	}
	s.show(now, "connection down")
}

// endLive forgets what hangs on one connection.
func (s *stream) endLive() {
	s.epoch++
	s.pending.drop()
	s.hasHead, s.givenUp = false, zmqwire.SeqRange{}
	s.digests.settled()
	s.attempts, s.notBefore = 0, time.Time{}
}

// live takes one message of the PUB socket.
func (s *stream) live(now time.Time, seq uint64, payload []byte) {
	s.quietSince, s.probeWait = now, 0
	d := xxh3.Hash(payload)
	defer s.digests.reached(seq)
	_, waits := s.pending.get(seq)
	switch {
	case s.backwards(seq, d):
		s.restart(now, fmt.Sprintf("the live sequence went back from %d to %d", s.newest(), seq))
		s.live(now, seq, payload)
		return
	case waits || s.has && seq <= s.last:
		s.n.duplicates.Add(1)
		s.heard(seq)
	default:
		s.heard(seq)
		s.admit(now, seq, d, payload)
	}
	s.show(now, "")
}

// newest is the newest seq that is known of.
func (s *stream) newest() uint64 {
	if s.hasHead {
		return max(s.head, s.last)
	}
	return s.last
}

// known returns the digest of a batch that was applied or waits.
func (s *stream) known(seq uint64) (uint64, bool) {
	if p, ok := s.pending.get(seq); ok {
		return p.digest, true
	}
	return s.digests.get(seq)
}

// heard notes a live message's number.
func (s *stream) heard(seq uint64) {
	if !s.hasHead || seq > s.head {
		s.head, s.hasHead = seq, true
	}
}

// backwards: the seq cannot come from the process that sent the newest one. A
// batch that is known may come again, and a replay may have overtaken live
// messages of the same connection, with their batches or without.
func (s *stream) backwards(seq, digest uint64) bool {
	if d, ok := s.known(seq); ok {
		return d != digest
	}
	if s.hasHead && seq <= s.head {
		return true
	}
	overtaken := s.givenUp.From <= seq && seq < s.givenUp.To
	return s.has && seq <= s.last && !overtaken
}

// admit takes a live message that is neither old nor repeated.
func (s *stream) admit(now time.Time, seq, digest uint64, payload []byte) {
	if s.unconfirmed && s.has && !s.canFill() {
		s.unproven(now)
	}
	if !s.unconfirmed && seq == s.next() {
		s.applyLive(now, seq, digest, payload)
		return
	}
	if !s.filling && !s.unconfirmed {
		s.n.gaps.Add(1)
	}
	if s.canFill() {
		s.beginFill(now)
		if !s.pending.put(seq, digest, payload) {
			s.n.overflows.Add(1)
		}
		return
	}
	s.skipTo(now, seq, "no replay to ask")
	s.applyLive(now, seq, digest, payload)
}

// unproven settles a doubt that nobody can be asked about. A restored stream
// begins anew; any other goes on as suspect.
func (s *stream) unproven(now time.Time) {
	if s.trust == Restored {
		s.begin(Connecting)
		s.show(now, "the snapshot cannot be confirmed")
		return
	}
	s.unconfirmed = false
	s.distrust("reconnected, and nothing tells whether the publisher is the same process")
}

// distrust makes the stream suspect, or empties it by policy.
func (s *stream) distrust(why string) {
	s.lastErr = why
	if s.cfg.onGapClear {
		s.sink.clear()
		s.trust = Partial
		return
	}
	s.trust = Suspect
}

// applyLive applies a live batch and whatever it was waited for.
func (s *stream) applyLive(now time.Time, seq, digest uint64, payload []byte) {
	s.applyOne(now, seq, digest, payload)
	s.drain(now)
	s.settle(now)
}

// applyOne moves the watermark to seq.
func (s *stream) applyOne(now time.Time, seq, digest uint64, payload []byte) {
	if s.trust == Connecting {
		s.trust = Live
	}
	s.has, s.last, s.digest = true, seq, digest
	s.pending.take(seq)
	s.digests.applied(seq, digest)
	o := s.sink.apply(now, payload)
	s.n.applied.Add(1)
	switch {
	case o.unreadable:
		s.lose(1)
		s.distrust(fmt.Sprintf("batch %d cannot be read", seq))
	case o.cleared:
		s.trust, s.lost, s.resyncAt, s.lastErr = Live, 0, time.Time{}, ""
	}
	if o.lostRemovals > 0 {
		s.distrust(fmt.Sprintf("batch %d has removals that cannot be read: %d", seq, o.lostRemovals))
	}
	if o.conflicted {
		s.conflicts(now)
	}
}

// conflicts: the content says what the sequence did not.
func (s *stream) conflicts(now time.Time) {
	s.distrust("known content came again under other hashes, many times in a row: the publisher may have restarted")
	if !s.conflictResync {
		s.conflictResync = true
		s.resyncAt = now
	}
}

// lose counts batches that nothing will bring back.
func (s *stream) lose(n uint64) {
	s.lost += n
	s.n.lost.Add(n)
}

// restart: the publisher is another process. Its history begins at 0.
func (s *stream) restart(now time.Time, why string) {
	s.n.restarts.Add(1)
	s.begin(Live)
	s.lastErr = ""
	if s.cfg.restarted != nil {
		s.cfg.restarted(why)
	}
	if s.canFill() && s.cfg.fillable == nil {
		s.beginFill(now)
	}
}

// begin empties the stream.
func (s *stream) begin(trust State) {
	s.sink.clear()
	s.endLive()
	s.has, s.last, s.digest, s.lost = false, 0, 0, 0
	s.digests = digests{}
	s.unconfirmed, s.filling = false, false
	s.trust = trust
	s.resyncAt, s.resyncWait, s.conflictResync = time.Time{}, 0, false
}

// reset is by hand: drop what is held and start again from the replay.
func (s *stream) reset(now time.Time) {
	s.begin(Connecting)
	s.lastErr = ""
	s.liar, s.contradictions = false, 0
	if s.up && s.cfg.replay {
		s.beginFill(now)
	}
	s.show(now, "reset by hand")
}
