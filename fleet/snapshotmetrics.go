package fleet

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvindexd/kvindexd/store"
)

// snapshotMetrics are read at any time, and written by whoever writes a
// snapshot.
type snapshotMetrics struct {
	failed, refused, restored, peerFailed atomic.Uint64
	snapshots                             atomic.Uint64
	loaded                                atomic.Int64
	created                               atomic.Int64 // of the standing generation, ns since the epoch; 0: none
	generation                            atomic.Uint64
	bytes, disk                           atomic.Int64
	lastTook, lastFreeze                  atomic.Int64 // ns
	total, finished                       atomic.Int64 // streams of the one under way; total 0: none is

	descs struct {
		age, duration, freeze, bytes, disk, generation, progress, inProgress *prometheus.Desc
		written, failures, streams, peerFailures                             *prometheus.Desc
	}
}

func (m *snapshotMetrics) init() {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvindexd_snapshot_"+name, help, labels, nil)
	}
	m.descs.age = d("age_seconds", "Time since the standing snapshot was taken.")
	m.descs.duration = d("duration_seconds", "What the last snapshot took.")
	m.descs.freeze = d("longest_freeze_seconds", "The longest that one stream's messages waited for the last snapshot.")
	m.descs.bytes = d("bytes", "Size of the standing snapshot as stored.")
	m.descs.disk = d("disk_bytes", "What the snapshot directory occupies.")
	m.descs.generation = d("generation", "Number of the standing snapshot.")
	m.descs.inProgress = d("in_progress", "1 while a snapshot is being written.")
	m.descs.progress = d("progress_ratio", "Streams of the snapshot under way that are done.")
	m.descs.written = d("written_total", "Snapshots written since the start.")
	m.descs.failures = d("failures_total", "Snapshots that could not be written, or read, since the start.")
	m.descs.streams = d("streams", "Streams of the snapshot or dump loaded at the start, by what became of them.", "result")
	m.descs.peerFailures = d("peer_failures_total", "Peers that gave nothing at the start.")
}

func (m *snapshotMetrics) begin(total int) {
	m.finished.Store(0)
	m.total.Store(int64(max(total, 1)))
}

func (m *snapshotMetrics) done(n int) { m.finished.Store(int64(n)) }
func (m *snapshotMetrics) end()       { m.total.Store(0) }

// written notes which generation stands.
func (m *snapshotMetrics) written(info store.Info, st store.Stats) {
	m.created.Store(info.Created.UnixNano())
	m.generation.Store(info.Generation)
	m.bytes.Store(st.StoredBytes)
	m.disk.Store(st.DiskBytes)
}

func (m *snapshotMetrics) took(all, freeze time.Duration) {
	m.snapshots.Add(1)
	m.lastTook.Store(int64(all))
	m.lastFreeze.Store(int64(freeze))
}

// Describe and Collect make Snapshots a prometheus.Collector.
func (s *Snapshots) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(s, ch) }

// Collect implements prometheus.Collector.
func (s *Snapshots) Collect(ch chan<- prometheus.Metric) {
	m, d := &s.m, &s.m.descs
	gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
	}
	counter := func(desc *prometheus.Desc, v uint64) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(v))
	}
	if at := m.created.Load(); at != 0 {
		gauge(d.age, time.Since(time.Unix(0, at)).Seconds())
		gauge(d.generation, float64(m.generation.Load()))
		gauge(d.bytes, float64(m.bytes.Load()))
		gauge(d.disk, float64(m.disk.Load()))
	}
	gauge(d.duration, time.Duration(m.lastTook.Load()).Seconds())
	gauge(d.freeze, time.Duration(m.lastFreeze.Load()).Seconds())
	total := m.total.Load()
	gauge(d.inProgress, float64(min(total, 1)))
	gauge(d.progress, float64(m.finished.Load())/float64(max(total, 1)))
	counter(d.written, m.snapshots.Load())
	counter(d.failures, m.failed.Load())
	counter(d.peerFailures, m.peerFailed.Load())
	gauge(d.streams, float64(m.loaded.Load()), "loaded")
	gauge(d.streams, float64(m.restored.Load()), "restored")
	gauge(d.streams, float64(m.refused.Load()), "refused")
}
