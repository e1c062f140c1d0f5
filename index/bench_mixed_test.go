package index

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
)

// BenchmarkMixed: eight query goroutines against eight streams that ingest at
// full speed. p99 is a lookup's own time, by the clock, so it holds what the
// scheduler does to sixteen goroutines on few cores. kept is what ingestion
// reaches beside the queries, of what it reaches alone.
func BenchmarkMixed(b *testing.B) {
	const phase = time.Second
	set, streams, queries := residentPrompts(8, true)
	roster := set.NewRoster(streams, nil)
	for b.Loop() {
		alone, _ := mix16(streams, roster, queries, 0, phase)
		beside, latencies := mix16(streams, roster, queries, 8, phase)
		slices.Sort(latencies)
		n := len(latencies)
		b.ReportMetric(float64(latencies[n/2].Nanoseconds())/1e3, "p50-µs")
		b.ReportMetric(float64(latencies[n*99/100].Nanoseconds())/1e3, "p99-µs")
		b.ReportMetric(float64(latencies[n*999/1000].Nanoseconds())/1e3, "p999-µs")
		b.ReportMetric(float64(n)/phase.Seconds()/1e3, "klookups/s")
		b.ReportMetric(alone/1e6, "Mops/s-alone")
		b.ReportMetric(100*beside/alone, "%-kept")
	}
}

// mix16 runs writers and readers for a while: block operations a second, and
// the time of every lookup.
func mix16(streams []*Stream, roster *Roster, queries []*Query, readers int, d time.Duration) (float64, []time.Duration) {
	var stop atomic.Bool
	var ops atomic.Int64
	var wg sync.WaitGroup
	for i, s := range streams {
		wg.Go(func() { ops.Add(churn(s, uint64(i), &stop)) })
	}
	all := make([][]time.Duration, readers)
	for r := range readers {
		wg.Go(func() { all[r] = look(roster, queries, r, &stop) })
	}
	time.Sleep(d)
	stop.Store(true)
	wg.Wait()
	return float64(ops.Load()) / d.Seconds(), slices.Concat(all...)
}

// churn stores chains of 16 blocks and removes them again, 8 blocks a batch.
func churn(s *Stream, id uint64, stop *atomic.Bool) (ops int64) {
	l := newLoader()
	var rounds [64][]*normalize.Batch
	for k := range rounds {
		c := newChain(id<<32+uint64(k), 16, 0)
		rounds[k] = append(rounds[k], l.prepare(c.store(0, 8)), l.prepare(c.store(8, 16)))
		for from := 15; from > 0; from -= 8 {
			b := c.remove(from)
			for i := 1; i < 8; i++ {
				b.Hashes = append(b.Hashes[:len(b.Hashes):len(b.Hashes)], c.hashes[from-i])
			}
			rounds[k] = append(rounds[k], l.prepare(b))
		}
	}
	for k := 0; !stop.Load(); k = (k + 1) % len(rounds) {
		for _, b := range rounds[k] {
			a := s.Apply(b)
			ops += int64(a.Stored + a.Removed)
		}
	}
	return ops
}

func look(roster *Roster, queries []*Query, r int, stop *atomic.Bool) (latencies []time.Duration) {
	rows := make([]Row, roster.Len())
	for n := r; !stop.Load(); n++ {
		start := time.Now()
		roster.Match(queries[n%len(queries)], rows)
		latencies = append(latencies, time.Since(start))
	}
	return latencies
}

// TestChurnReturns: memory after many turnovers of every stream is that of the
// first, and nothing stays when the last stream goes.
func TestChurnReturns(t *testing.T) {
	turnovers := 100
	if testing.Short() {
		turnovers = 10
	}
	const streams, chains, blocks = 8, 60, 24
	x := New(Options{})
	l := newLoader()
	var all []*Stream
	for range streams {
		all = append(all, x.NewStream(StreamConfig{}))
	}
	put := func(s int, id uint64, seed uint64) {
		c := newChain(id, blocks, seed)
		for from := 0; from < blocks; from += 8 {
			all[s].Apply(l.prepare(c.store(from, from+8)))
		}
	}
	drop := func(s int, id uint64, seed uint64) {
		c := newChain(id, blocks, seed)
		for i := blocks - 1; i >= 0; i-- {
			all[s].Apply(l.prepare(c.remove(i)))
		}
	}
	var first int64
	for turn := range turnovers {
		for s := range all {
			seed := uint64(s % 2 * (s + 1)) // every other stream calls its blocks its own way
			for c := range chains {
				id := uint64(turn*chains + c)
				if s%4 != 0 {
					id += uint64(s) << 32
				}
				put(s, id, seed)
				if turn > 0 {
					drop(s, id-chains, seed)
				}
			}
		}
		if turn == 1 { // the rings of forgotten handles are full
			first = x.Stats().Bytes
		}
	}
	if last := x.Stats().Bytes; float64(last) > 1.2*float64(first) {
		t.Errorf("%d bytes after %d turnovers, %d after the first", last, turnovers, first)
	}
	if err := x.check(); err != nil {
		t.Error(err)
	}
	for _, s := range all {
		s.Close()
	}
	if err := x.empty(); err != nil {
		t.Error(err)
	}
}
