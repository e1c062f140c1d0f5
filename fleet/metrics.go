package fleet

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvindexd/kvindexd/normalize"
)

// Labels are bounded by the configuration: no prompt, salt, request's adapter or
// path is one. Unknown media are at most a handful of names per stream.
var (
	streamLabels = []string{"namespace", "model", "role", "worker", "rank"}
	setLabels    = []string{"namespace", "model", "role"}
)

func streamDesc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvindexd_"+name, help, append(append([]string(nil), streamLabels...), more...), nil)
}

func setDesc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvindexd_"+name, help, append(append([]string(nil), setLabels...), more...), nil)
}

var (
	descState       = streamDesc("stream_state", "1 for the state that the stream is in.", "state")
	descConnected   = streamDesc("stream_connected", "Whether the subscription's transport is up.")
	descSeq         = streamDesc("stream_last_seq", "Sequence number of the last applied batch.")
	descTransitions = streamDesc("stream_transitions_total", "Transitions into a state.", "to")
	descMessages    = streamDesc("stream_messages_total", "Messages by what became of them.", "result")
	descEvents      = streamDesc("stream_events_total", "Events of applied batches by type.", "type")
	descSkipped     = streamDesc("stream_events_skipped_total", "Events, or their content, that do not count as they stand.", "reason")
	descMedia       = streamDesc("stream_unknown_medium_total", "Events of media that are no tier.", "medium")
	descGaps        = streamDesc("stream_gaps_total", "Gaps seen in the live sequence.")
	descLost        = streamDesc("stream_batches_lost_total", "Batches known lost and not recovered.")
	descLostNow     = streamDesc("stream_batches_lost", "Batches lost since the last start, restart, clear or reset.")
	descBurnt       = streamDesc("stream_batches_burnt_total", "Numbers that the publisher used up without a batch.")
	descOverflows   = streamDesc("stream_pending_overflows_total", "Live batches that found no room while a gap was being filled.")
	descReplays     = streamDesc("stream_replays_total", "Replays by result.", "result")
	descReplayed    = streamDesc("stream_batches_replayed_total", "Batches applied from replays.")
	descRestarts    = streamDesc("stream_restarts_total", "Publisher restarts that were noticed.")
	descConnects    = streamDesc("stream_connections_total", "Connections by what became of the attempt.", "result")
	descResident    = streamDesc("stream_resident_blocks", "Blocks held, by tier.", "tier")
	descOrphans     = streamDesc("stream_orphan_blocks", "Blocks whose parent is not known.")
	descConflicts   = streamDesc("stream_conflicts_total", "Blocks that came again: with another parent or content, or under another engine hash.", "kind")
	descMismatch    = streamDesc("stream_mismatches_total", "Events and batches that contradict the configuration.", "field")
	descUndeclared  = streamDesc("stream_undeclared", "1 for a rank that nobody declared and a batch named.")
	descLag         = streamDesc("stream_lag_seconds", "Now minus the publisher's timestamp, of the last applied batch.")
	descAge         = streamDesc("stream_age_seconds", "Time since the last message.")

	descNodes     = setDesc("set_tree_nodes", "Nodes of the worker set's trees.")
	descBlocks    = setDesc("set_blocks", "Distinct blocks held.")
	descBytes     = setDesc("set_bytes", "Memory of the worker set's index, retained capacity included.")
	descBlockSize = setDesc("set_block_size", "1 for each block size that stands in the set.", "block_size")
	descMembers   = setDesc("set_members", "Streams of admitted workers.")
	descRejected  = setDesc("set_rejected", "Workers that wait because their configuration differs.")
	descProblems  = prometheus.NewDesc("kvindexd_config_problems", "Entries of sources that are not in force.", nil, nil)
)

// Describe tells nothing: which metrics there are depends on the fleet.
func (f *Fleet) Describe(chan<- *prometheus.Desc) {}

// Collect reads the counters as they stand; no stream waits for it.
func (f *Fleet) Collect(ch chan<- prometheus.Metric) {
	for _, p := range f.Sets() {
		collectSet(ch, p)
		for _, m := range p.Members {
			m.collect(ch)
		}
	}
	f.mu.Lock()
	n := len(f.problems)
	f.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(descProblems, prometheus.GaugeValue, float64(n))
}

// emitter sends metrics of one label set.
type emitter struct {
	ch     chan<- prometheus.Metric
	labels []string
}

func (e emitter) gauge(d *prometheus.Desc, v float64, more ...string) {
	e.ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append(e.labels[:len(e.labels):len(e.labels)], more...)...)
}

func (e emitter) count(d *prometheus.Desc, v uint64, more ...string) {
	e.ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), append(e.labels[:len(e.labels):len(e.labels)], more...)...)
}

func collectSet(ch chan<- prometheus.Metric, p *Picture) {
	e := emitter{ch, []string{p.Key.Namespace, p.Key.Model, p.Key.Role}}
	s := p.Index.Stats()
	e.gauge(descNodes, float64(s.Runs))
	e.gauge(descBlocks, float64(s.Blocks))
	e.gauge(descBytes, float64(s.Bytes))
	e.gauge(descMembers, float64(len(p.Members)))
	e.gauge(descRejected, float64(len(p.Rejected)))
	seen := map[uint32]bool{}
	for _, shape := range p.Index.Shapes() {
		if !seen[shape.BlockSize] {
			seen[shape.BlockSize] = true
			e.gauge(descBlockSize, 1, strconv.FormatUint(uint64(shape.BlockSize), 10))
		}
	}
}

func (m *Member) collect(ch chan<- prometheus.Metric) {
	e := emitter{ch, []string{m.Key.Namespace, m.Key.Model, m.Key.Role, m.Worker, strconv.Itoa(m.Rank)}}
	st := m.Status()
	e.gauge(descState, 1, st.State.String())
	e.gauge(descUndeclared, b2f(m.Undeclared))
	e.gauge(descLostNow, float64(st.Lost))
	if st.HasSeq {
		e.gauge(descSeq, float64(st.Seq))
	}
	if st.Age >= 0 {
		e.gauge(descAge, st.Age.Seconds())
	}
	s := m.stream.Stats()
	for t := range normalize.NoTier {
		e.gauge(descResident, float64(s.Resident[t]), t.String())
	}
	e.gauge(descOrphans, float64(s.Orphans))
	if !m.Undeclared { // what is the publisher's stands at its declared rank
		m.pub.collect(e, st)
	}
}

func (p *publisher) collect(e emitter, st Status) {
	c := p.n
	e.gauge(descConnected, b2f(st.Connected))
	for s := range numStates {
		e.count(descTransitions, c.transitions[s].Load(), s.String())
	}
	e.count(descMessages, c.applied.Load(), "applied")
	e.count(descMessages, c.duplicates.Load(), "duplicate")
	e.count(descMessages, c.unreadable.Load(), "unreadable")
	e.count(descEvents, c.stored.Load(), "BlockStored")
	e.count(descEvents, c.removed.Load(), "BlockRemoved")
	e.count(descEvents, c.cleared.Load(), "AllBlocksCleared")
	e.count(descSkipped, c.malformedEvents.Load(), "malformed")
	e.count(descSkipped, c.lostRemovals.Load(), "malformed_removal")
	e.count(descSkipped, c.unknownEvents.Load(), "unknown_tag")
	for r := range normalize.SkipReason(normalize.NumSkipReasons) {
		e.count(descSkipped, c.skips[r].Load(), r.String())
	}
	for _, m := range c.unknownMedia() {
		e.count(descMedia, m.Count, m.Name)
	}
	e.count(descGaps, c.gaps.Load())
	e.count(descLost, c.lost.Load())
	e.count(descBurnt, c.burnt.Load())
	e.count(descOverflows, c.overflows.Load())
	e.count(descReplays, c.replays.Load(), "complete")
	e.count(descReplays, c.replayFailures.Load(), "failed")
	e.count(descReplayed, c.replayed.Load())
	e.count(descRestarts, c.restarts.Load())
	e.count(descConflicts, c.conflicts.Load(), "place")
	e.count(descConflicts, c.contentConflicts.Load(), "handle")
	e.count(descMismatch, c.blockSizeMismatch.Load(), "block_size")
	e.count(descMismatch, c.rankConflicts.Load(), "data_parallel_rank")
	if lag := c.lag.Load(); lag != 0 {
		e.gauge(descLag, time.Duration(lag).Seconds())
	}
	p.collectTransport(e)
}

func (p *publisher) collectTransport(e emitter) {
	malformed, foreign := p.n.malformedMessages.Load(), p.n.foreignTopics.Load()
	if p.sub != nil {
		s := p.sub.Stats()
		malformed, foreign = malformed+s.Malformed, foreign+s.ForeignTopic
		e.count(descConnects, s.Connects, "connected")
		e.count(descConnects, s.Failures, "failed")
		e.count(descConnects, s.Disconnects, "ended")
	}
	e.count(descMessages, malformed, "malformed")
	e.count(descMessages, foreign, "foreign_topic")
}

func b2f(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
