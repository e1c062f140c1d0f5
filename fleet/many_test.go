package fleet

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// crowd is many publishers, each with content of its own.
type crowd []*engine

func newCrowd(t testing.TB, n int) crowd {
	t.Helper()
	var c crowd
	for i := range n {
		e := newHost(t, "127.0.0.1", nil)
		e.life = uint32(i)
		c = append(c, e)
	}
	return c
}

func (c crowd) name(i int) string { return fmt.Sprintf("w%03d", i) }

func (c crowd) specs() (specs []WorkerSpec) {
	for i, e := range c {
		specs = append(specs, WorkerSpec{ID: c.name(i), Model: "m", Endpoint: e.pub.Addr(), ReplayEndpoint: e.pub.ReplayAddr()})
	}
	return specs
}

// hostile are workers that want more than their share, until the test ends:
// floods of unreadable batches and of batches of 64 Ki removals, replay endpoints that say nothing
// or one batch at a time, publishers that accept and are silent, or are not
// there.
func hostile(t testing.TB) []WorkerSpec {
	t.Helper()
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mute.Close() })
	silent := "tcp://" + mute.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var floods sync.WaitGroup
	t.Cleanup(func() { cancel(); floods.Wait() })
	publisher := func() *zmqwire.Publisher {
		p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{
			Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*",
			RingSize: 100, HWM: 100, Linger: time.Millisecond, Logger: quiet,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		return p
	}
	flood := func(payload []byte) *zmqwire.Publisher {
		p := publisher()
		floods.Go(func() {
			for ctx.Err() == nil {
				p.Publish(payload)
				if dropped := p.Stats().Dropped; dropped%64 == 63 {
					time.Sleep(time.Millisecond) // its own processor time is not the point
				}
			}
		})
		return p
	}
	all := make([]zmqwire.EngineHash, 64<<10)
	for i := range all {
		all[i] = zmqwire.EngineHash(i) + 1<<63
	}
	endless := (&engine{t: t, rank: -1}).encode(zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: all, Group: zmqwire.NoGroup})
	trickle := publisher()
	for range 100 {
		trickle.Publish(endless[:64])
	}
	slow := wiretest.NewProxy(t, hostOf(trickle.ReplayAddr()))
	slow.Delay(50 * time.Millisecond)

	junk, giant := flood([]byte{0xc1}), flood(endless)
	return []WorkerSpec{
		{ID: "junk", Model: "m", Endpoint: junk.Addr(), ReplayEndpoint: junk.ReplayAddr()},
		{ID: "giant", Model: "m", Endpoint: giant.Addr(), ReplayEndpoint: silent},
		{ID: "trickle", Model: "m", Endpoint: trickle.Addr(), ReplayEndpoint: "tcp://" + slow.Addr()},
		{ID: "silent", Model: "m", Endpoint: silent},
		{ID: "nobody", Model: "m", Endpoint: "tcp://127.0.0.2:1"},
	}
}

// TestManyStreams: 256 publishers are followed, each exactly, beside some that
// would have all the attention. Some of the batches come by replay alone.
func TestManyStreams(t *testing.T) {
	noLeaks(t)
	c := newCrowd(t, 256)
	for _, e := range c {
		e.churn(5)
	}
	f := running(t, Options{Timing: Timing{}.withDefaults(), Workers: slices.Concat(c.specs(), hostile(t))})
	for range 20 {
		for _, e := range c {
			e.churn(1)
		}
	}
	for i, e := range c {
		if i%8 == 0 {
			e.pub.Hold(e.seq, e.encode(e.storeEvent(1)))
			e.seq++
			e.churn(1)
		}
	}
	for i, e := range c {
		e.truth(f, c.name(i)+"/0", Live)
	}
	for i := range c {
		if n := countsOf(f, c.name(i)+"/0"); n.Lost != 0 || n.Restarts != 0 {
			t.Errorf("%s: %+v", c.name(i), n)
		}
	}
}

// BenchmarkManyStreams is one batch on each of 256 streams a round, published in
// turn by this process too. The delays are from a batch's making to its being in
// the index: the median of all, the worst of a hundred, and the medians of the
// streams that were served best and worst.
func BenchmarkManyStreams(b *testing.B) {
	for _, beside := range []string{"alone", "beside hostile ones"} {
		b.Run(strings.ReplaceAll(beside, " ", "_"), func(b *testing.B) {
			c := newCrowd(b, 256)
			specs := c.specs()
			if beside != "alone" {
				specs = append(specs, hostile(b)...)
			}
			f := running(b, Options{Timing: Timing{}.withDefaults(), Workers: specs})
			manyStreams(b, c, f)
		})
	}
}

func manyStreams(b *testing.B, c crowd, f *Fleet) {
	pubs := make([]*publisher, len(c))
	for i, e := range c {
		pubs[i] = publisherOf(b, f, c.name(i))
		e.churn(1)
	}
	caughtUp := func() {
		for i, e := range c {
			for st := pubs[i].currentStatus(); !st.HasSeq || st.Seq < e.seq-1; st = pubs[i].currentStatus() {
				time.Sleep(50 * time.Microsecond)
			}
		}
	}
	caughtUp()
	delays := make([][]time.Duration, len(c))
	b.ResetTimer()
	for range b.N {
		for _, e := range c {
			e.churn(1)
		}
		caughtUp()
		for i, p := range pubs {
			delays[i] = append(delays[i], time.Duration(p.n.lag.Load()))
		}
	}
	b.StopTimer()
	var medians []time.Duration
	for _, d := range delays {
		medians = append(medians, quantile(d, 0.5))
	}
	all := slices.Concat(delays...)
	for unit, d := range map[string]time.Duration{
		"p50-us": quantile(all, 0.5), "p99-us": quantile(all, 0.99),
		"best-us": quantile(medians, 0), "worst-us": quantile(medians, 1),
	} {
		b.ReportMetric(float64(d.Microseconds()), unit)
	}
}

func quantile(d []time.Duration, q float64) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[int(q*float64(len(d)-1))]
}
