package fleet

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
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

	// The watermark: last is the newest applied batch, digest its payload's,
	// recent the digests of the newest few, by seq.
	has    bool
	last   uint64
	digest uint64
	recent [16]stamp
	lost   uint64
	// ahead are the digests of what replays brought since the connection began
	// and its live messages have not reached yet: those still come. Ascending.
	ahead []stamp
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

// stamp is the digest of one applied batch.
type stamp struct {
	seq, digest uint64
	ok          bool
}

func (st stamp) compare(seq uint64) int { return cmp.Compare(st.seq, seq) }

// maxAhead bounds stream.ahead: more than three of vLLM's rings. A live message
// that lags behind a replay by more is taken for another process's.
const maxAhead = 1 << 15

// passAhead forgets what live messages have reached.
func (s *stream) passAhead(seq uint64) {
	n := 0
	for n < len(s.ahead) && s.ahead[n].seq <= seq {
		n++
	}
	if s.ahead = s.ahead[n:]; len(s.ahead) == 0 {
		s.ahead = nil
	}
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
	s.recent[m.Seq%uint64(len(s.recent))] = stamp{m.Seq, m.Digest, true}
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

// canFill reports whether a replay may still bring the next batch.
func (s *stream) canFill() bool {
	if s.cfg.fillable != nil {
		return s.cfg.fillable(s.next())
	}
	return s.cfg.replay && !s.liar
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
	s.hasHead, s.ahead, s.givenUp = false, nil, zmqwire.SeqRange{}
	s.attempts, s.notBefore = 0, time.Time{}
}

// beginFill starts to wait for a replay.
func (s *stream) beginFill(now time.Time) {
	if !s.filling {
		s.filling = true
		s.attempts, s.notBefore = 0, now
	}
}

// live takes one message of the PUB socket.
func (s *stream) live(now time.Time, seq uint64, payload []byte) {
	s.quietSince, s.probeWait = now, 0
	d := xxh3.Hash(payload)
	defer s.passAhead(seq)
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
	if st := s.recent[seq%uint64(len(s.recent))]; st.ok && st.seq == seq {
		return st.digest, true
	}
	if i, ok := slices.BinarySearchFunc(s.ahead, seq, stamp.compare); ok {
		return s.ahead[i].digest, true
	}
	return 0, false
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
	s.recent[seq%uint64(len(s.recent))] = stamp{seq, digest, true}
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

// skipTo gives up the batches before seq, using what waits between.
func (s *stream) skipTo(now time.Time, seq uint64, why string) {
	for s.next() < seq {
		to, waits := s.pending.first()
		if !waits || to > seq {
			to, waits = seq, false
		}
		s.giveUp(to, why)
		if !waits {
			return
		}
		p, _ := s.pending.take(to)
		s.applyOne(now, to, p.digest, p.payload)
		s.drain(now)
	}
}

// giveUp counts next..to-1 as lost. The caller applies to.
func (s *stream) giveUp(to uint64, why string) {
	n := to - s.next()
	if n == 0 {
		return
	}
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
	s.recent = [16]stamp{}
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
		s.ahead = nil // so long a silence: nothing is on its way
	default:
		return r, false
	}
	s.inflight, s.asked, s.anyReply = true, r, false
	s.began, s.beganHas = s.last, s.has
	return r, true
}

func (s *stream) due(now, at time.Time) bool { return !at.IsZero() && !now.Before(at) }

// probeAt is when silence has lasted long enough to ask. The wait doubles while
// nothing comes.
func (s *stream) probeAt() time.Time {
	return s.quietSince.Add(max(s.probeWait, s.cfg.IdleProbe))
}

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
	s.ahead = append(s.ahead[max(0, len(s.ahead)+1-maxAhead):], stamp{seq, digest, true})
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
	for {
		to, ok := s.pending.first()
		if !ok {
			break
		}
		s.skipTo(now, to, why)
		s.drain(now)
	}
	// What overflowed is found by the next live message or probe.
	s.hasHead = s.hasHead && s.has && s.head <= s.last
	s.filling, s.attempts = false, 0
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

// recheck gives up a gap that a capture will not fill.
func (s *stream) recheck(now time.Time) {
	if s.filling && !s.canFill() {
		s.unfilled(now, "the capture has no replay of them")
	}
	s.show(now, "")
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
