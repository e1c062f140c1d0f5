package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// maxUndeclared bounds the ranks that the batches of one publisher may name
// beside its own: a hostile one could name any number.
const maxUndeclared = 64

// publisher is one subscription: a rank of a worker, its stream, and the index
// streams that it feeds.
type publisher struct {
	fleet  *Fleet
	worker *worker
	at     rankEndpoint
	n      *counters
	log    *slog.Logger

	sub  *zmqwire.Subscriber // nil offline
	wake chan struct{}

	// mu guards what follows. Nothing that blocks runs under it but the index
	// itself.
	mu     sync.Mutex
	st     *stream
	ranks  []*rankStream // the declared one first
	byRank map[int32]*rankStream
	// armed is when the control loop wakes by itself, where alarm.
	armed  time.Time
	alarm  bool
	cancel context.CancelFunc
	warned map[string]bool
	fault  string // the last contradiction between content and configuration

	// members are this publisher's, immutable, sorted by rank.
	members atomic.Pointer[[]*Member]
	status  liveStatus
}

// rankStream is the index stream of one rank. It hangs on the publisher's lock.
type rankStream struct {
	rank       int
	undeclared bool
	stream     *index.Stream
	norm       *normalize.Normalizer
}

// liveStatus is what queries read of a publisher, without its lock.
type liveStatus struct {
	state     atomic.Uint32
	seq       atomic.Uint64
	hasSeq    atomic.Bool
	lost      atomic.Uint64
	connected atomic.Bool
	settled   atomic.Bool
	// heard is when the last message came, in nanoseconds since the fleet's
	// start + 1; 0 for never.
	heard   atomic.Int64
	lastErr atomic.Pointer[string]
}

// newPublisher makes the declared rank's stream and subscribes to nothing yet.
func newPublisher(w *worker, at rankEndpoint, now time.Time) *publisher {
	p := &publisher{
		fleet: w.fleet, worker: w, at: at, n: new(counters),
		wake: make(chan struct{}, 1), byRank: map[int32]*rankStream{}, warned: map[string]bool{},
		log: w.fleet.log.With("worker", w.life.spec.ID, "rank", at.rank),
	}
	cfg := streamConfig{
		Timing: w.fleet.o.Timing, replay: at.replay != "", budget: &w.fleet.budget,
		onGapClear: w.life.spec.OnGap == OnGapClear, changed: p.changed,
		restarted: func(why string) { p.log.Warn("publisher restarted", "reason", why) },
	}
	p.st = newStream(cfg, p, p.n, now)
	p.addRank(at.rank, false)
	p.restore(now)
	p.publish(now)
	return p
}

// restore asks the snapshot for the declared rank's entries.
func (p *publisher) restore(now time.Time) {
	f := p.fleet.o.Restore
	if f == nil || p.worker.generation != 1 {
		return
	}
	if m, ok := f(p.worker.life.key.set, p.worker.life.spec.ID, p.at.rank, p.worker.life.view, p.ranks[0].stream); ok {
		p.st.restore(now, m)
	}
}

// addRank begins the index stream of one rank.
func (p *publisher) addRank(rank int, undeclared bool) *rankStream {
	rs := &rankStream{
		rank: rank, undeclared: undeclared,
		stream: p.worker.set.index.NewStream(index.StreamConfig{
			Name:      fmt.Sprintf("%s/%d", p.worker.life.spec.ID, rank),
			EagleDrop: p.worker.life.spec.EagleDrop,
			BlockSize: p.worker.life.blockSize,
		}),
		norm: normalize.NewNormalizer(p.worker.life.view),
	}
	p.ranks = append(p.ranks, rs)
	p.byRank[int32(rank)] = rs
	p.listMembers()
	return rs
}

// listMembers makes the members anew, from the ranks.
func (p *publisher) listMembers() {
	l := p.worker.life
	ms := make([]*Member, 0, len(p.ranks))
	for _, rs := range p.ranks {
		ms = append(ms, &Member{
			Worker: l.spec.ID, Rank: rs.rank, Undeclared: rs.undeclared, Generation: p.worker.generation,
			Key: l.key.set, View: l.view, ExactMM: l.exact(), BlockSize: l.blockSize,
			stream: rs.stream, pub: p,
		})
	}
	slices.SortFunc(ms, func(a, b *Member) int { return a.Rank - b.Rank })
	p.members.Store(&ms)
}

// run subscribes until ctx ends.
func (p *publisher) run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { _ = p.sub.Run(ctx, p.onMessage, p.onConn) })
	wg.Go(func() { p.control(ctx, &wg) })
	wg.Wait()
}

// control makes the replays that the stream wants, and lets time pass for it.
func (p *publisher) control(ctx context.Context, wg *sync.WaitGroup) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-timer.C:
		}
		if d := p.step(ctx, wg); d >= 0 {
			timer.Reset(d)
		} else {
			timer.Stop()
		}
	}
}

// step does what is due and returns how long nothing will be, -1 for until
// something comes.
func (p *publisher) step(ctx context.Context, wg *sync.WaitGroup) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.st.tick(now)
	if r, ok := p.st.want(now); ok {
		rctx, cancel := context.WithCancel(ctx)
		p.cancel = cancel
		wg.Go(func() {
			defer cancel()
			p.replay(rctx, r)
		})
	}
	p.publish(now)
	if p.armed, p.alarm = p.st.deadline(); !p.alarm {
		return -1
	}
	return max(p.armed.Sub(now), time.Millisecond)
}

// after ends every input to the stream: under mu.
func (p *publisher) after(now time.Time) {
	if p.st.inflight && p.st.asked.epoch != p.st.epoch && p.cancel != nil {
		p.cancel()
	}
	p.publish(now)
	if at, ok := p.st.deadline(); ok && (!p.alarm || at.Before(p.armed)) {
		p.armed, p.alarm = at, true
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
}

// publish shows the stream's position to readers: under mu.
func (p *publisher) publish(time.Time) {
	s := &p.status
	s.state.Store(uint32(p.st.shown))
	s.seq.Store(p.st.last)
	s.hasSeq.Store(p.st.has)
	s.lost.Store(p.st.lost)
	s.connected.Store(p.st.up)
	switch p.st.shown {
	case Live, Partial, Suspect:
		s.settled.Store(true)
	}
	e := p.st.lastErr
	if e == "" {
		e = p.fault
	}
	if old := s.lastErr.Load(); old == nil || *old != e {
		s.lastErr.Store(&e)
	}
}

// currentStatus needs no lock.
func (p *publisher) currentStatus() Status {
	s := &p.status
	st := Status{
		State: State(s.state.Load()), Seq: s.seq.Load(), HasSeq: s.hasSeq.Load(),
		Age: -1, Lost: s.lost.Load(), Connected: s.connected.Load(), Settled: s.settled.Load(),
	}
	if at := s.heard.Load(); at != 0 {
		st.Age = max(0, time.Since(p.fleet.start)-time.Duration(at-1))
	}
	if e := s.lastErr.Load(); e != nil {
		st.LastError = *e
	}
	return st
}

func (p *publisher) freeze(f func(Mark)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.st.mark()
	if len(p.ranks) > 1 {
		// The position is the publisher's, and a snapshot that does not bring
		// back all its ranks must not be taken for whole.
		m.HasSeq = false
	}
	f(m)
}

func (p *publisher) onMessage(m zmqwire.Message) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n.messages.Add(1)
	p.status.heard.Store(int64(now.Sub(p.fleet.start)) + 1)
	p.st.live(now, m.Seq, m.Payload)
	p.after(now)
}

func (p *publisher) onConn(e zmqwire.ConnEvent) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e.State {
	case zmqwire.Connected:
		p.st.connected(now)
	case zmqwire.Disconnected:
		if e.Peers > 0 {
			break // bind mode: a stranger left, a publisher is still there
		}
		p.st.disconnected(now, e.Err)
	}
	p.after(now)
}

// replay makes one replay, behind those of other streams.
func (p *publisher) replay(ctx context.Context, r replayRequest) {
	release, err := p.fleet.slots.acquire(ctx, r.purpose == toProbe)
	if err == nil {
		err = p.ask(ctx, r)
		release()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.st.replayDone(time.Now(), r, err)
	p.cancel = nil
	p.after(time.Now())
}

// replayRequests in a row without anything new end one replay. It takes two to
// tell a burnt number from a lost reply.
const replayRequests = 2

func (p *publisher) ask(ctx context.Context, r replayRequest) error {
	t := p.fleet.o.Timing
	ctx, cancel := context.WithTimeout(ctx, t.ReplayBudget)
	defer cancel()
	cfg := zmqwire.ReplayConfig{
		Endpoint: p.at.replay, From: r.from, InactivityTimeout: t.ReplayInactivity, HandshakeTimeout: t.ReplayInactivity,
		Attempts: replayRequests,
		Control:  p.worker.control(p.at.replay), Resolver: p.fleet.dialResolver(), Logger: p.log,
	}
	_, err := zmqwire.ReplayAll(ctx, cfg, func(m zmqwire.Replayed) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		now := time.Now()
		p.n.burnt.Add(m.Burnt)
		err := p.st.replied(now, r, m.Seq, m.Payload, m.Lost+m.Burnt)
		p.after(now)
		return err
	})
	return err
}

// changed is called by the stream, under mu.
func (p *publisher) changed(from, to State, why string) {
	p.n.transitions[to].Add(1)
	args := []any{"from", from.String(), "to", to.String(), "reason", why, "seq", p.st.last, "lost", p.st.lost}
	if to == Suspect || to == Disconnected {
		p.log.Warn("stream state", args...)
		return
	}
	p.log.Info("stream state", args...)
}

// warn logs a fault of the content once per life and shows it.
func (p *publisher) warn(kind, format string, args ...any) {
	if p.warned[kind] {
		return
	}
	p.warned[kind] = true
	p.fault = fmt.Sprintf(format, args...)
	p.log.Warn(kind, "reason", p.fault)
}

// reset drops what is held and starts again from the replay.
func (p *publisher) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.st.reset(now)
	p.after(now)
}

func (p *publisher) setOnGap(clear bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.st.cfg.onGapClear = clear
}

// close ends the index streams; late events of this life change nothing.
func (p *publisher) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.st.pending.drop()
	for _, rs := range p.ranks {
		rs.stream.Close()
	}
}
