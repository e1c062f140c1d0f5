package fleet

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// BenchmarkFollow is live messages of about 4 KB, from a publisher in the same
// process over loopback into the index: the publisher's work is in the figure.
// gaps and lost must be 0 for the stream to have been followed.
func BenchmarkFollow(b *testing.B) {
	p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*", Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	t := Timing{IdleProbe: time.Hour}
	f := running(b, Options{Timing: t, Workers: []WorkerSpec{{ID: "w", Model: "m", Endpoint: p.Addr(), ReplayEndpoint: p.ReplayAddr()}}})
	ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
	defer cancel()
	if err := p.WaitSubscribers(ctx, 1); err != nil {
		b.Fatal(err)
	}
	store, remove := followPayloads(b)
	b.SetBytes(int64(len(store)+len(remove)) / 2)
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		if i%2 == 0 {
			p.Publish(store)
		} else {
			p.Publish(remove)
		}
		if i%4096 == 4095 { // a window: the publisher drops at its mark
			waitSeq(b, f, uint64(i-2048))
		}
	}
	waitSeq(b, f, uint64(b.N-1))
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
	c := countsOf(f, "w/0")
	b.ReportMetric(float64(c.Gaps), "gaps")
	b.ReportMetric(float64(c.Lost), "lost")
}

func waitSeq(b *testing.B, f *Fleet, seq uint64) {
	for {
		if st := statusOf(f, "w/0"); st.HasSeq && st.Seq >= seq {
			return
		}
		runtime.Gosched()
	}
}

// followPayloads are a batch that stores 8 chains of 4 blocks of 16 tokens, and
// one that removes them.
func followPayloads(b *testing.B) (store, remove []byte) {
	var in, out zmqwire.Batch
	in.Rank, out.Rank = -1, -1
	for c := range 8 {
		ev := zmqwire.Event{Kind: zmqwire.BlockStored, BlockSize: 16, Group: zmqwire.NoGroup}
		for i := range 4 {
			ev.Hashes = append(ev.Hashes, zmqwire.EngineHash(1<<60+c*4+i))
		}
		for i := range 64 {
			ev.Tokens = append(ev.Tokens, uint32(100_000+c*64+i))
		}
		in.Events = append(in.Events, ev)
		out.Events = append(out.Events, zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: ev.Hashes, Group: zmqwire.NoGroup})
	}
	var err error
	if store, err = zmqwire.AppendBatch(nil, &in, zmqwire.EncodeOptions{Maps: true}); err != nil {
		b.Fatal(err)
	}
	if remove, err = zmqwire.AppendBatch(nil, &out, zmqwire.EncodeOptions{Maps: true}); err != nil {
		b.Fatal(err)
	}
	return store, remove
}

// BenchmarkIdleStream is what one more subscription costs while nothing comes,
// the publisher's side of its connection included.
func BenchmarkIdleStream(b *testing.B) {
	const n = 256
	var publishers []*zmqwire.Publisher
	var specs []WorkerSpec
	for i := range n {
		p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", Logger: quiet})
		if err != nil {
			b.Fatal(err)
		}
		defer p.Close()
		publishers = append(publishers, p)
		specs = append(specs, WorkerSpec{ID: fmt.Sprint("w", i), Model: "m", Endpoint: p.Addr()})
	}
	goroutines, heap := runtime.NumGoroutine(), heapAlloc()
	running(b, Options{Workers: specs})
	ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
	defer cancel()
	for _, p := range publishers {
		if err := p.WaitSubscribers(ctx, 1); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/stream")
	b.ReportMetric(float64(heapAlloc()-heap)/n/1024, "KB/stream")
}

func heapAlloc() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
