package zmqwire

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// receiver is a Subscriber that counts, for benchmarks.
type receiver struct {
	seen chan uint64 // the seq of each message that is waited for
	want uint64
	gaps int
	last uint64
}

func (r *receiver) message(m Message) {
	if m.Seq != r.last+1 {
		r.gaps++
	}
	r.last = m.Seq
	if m.Seq >= r.want {
		r.seen <- m.Seq
	}
}

// BenchmarkReceive is one subscriber's way from the socket to onMessage, fed by
// libzmq or by our publisher on the same two cores. Messages are queued at the
// publisher in rounds while the subscriber holds its connection up, so that
// what is measured is the receiving end and the publisher's I/O, not how fast
// a script can publish.
func BenchmarkReceive(b *testing.B) {
	for _, size := range []int{200, 4096, 65536} {
		b.Run(fmt.Sprintf("%d/libzmq", size), func(b *testing.B) {
			p, events, _ := libzmqPublisher(b, "--hwm", "0")
			benchmarkReceive(b, size, events, func(n int) (next uint64) {
				fmt.Sscanf(p.Ask("send %d %d", n, size), "sent %d", &next)
				return next
			})
		})
		b.Run(fmt.Sprintf("%d/ours", size), func(b *testing.B) {
			p := publisher(b, PublisherConfig{HWM: 1 << 30, RingSize: 1})
			payload := make([]byte, size)
			benchmarkReceive(b, size, p.Addr(), func(n int) (next uint64) {
				for range n {
					next = p.Publish(payload) + 1
				}
				return next
			})
		})
	}
}

func benchmarkReceive(b *testing.B, size int, endpoint string, publish func(n int) (next uint64)) {
	s, err := NewSubscriber(SubscriberConfig{Endpoint: endpoint, Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &receiver{seen: make(chan uint64, 1<<20)}
	hold := make(chan chan struct{}) // onMessage waits for the channel it gets
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx, func(m Message) {
			select {
			case release := <-hold:
				<-release
			default:
			}
			r.message(m)
		}, nil)
	}()
	defer func() { cancel(); <-done }()

	for len(r.seen) == 0 { // Until the subscription is in effect.
		publish(1)
		time.Sleep(time.Millisecond)
	}
	round := min(200_000, 64<<20/size)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	b.StopTimer()
	for left := b.N; left > 0; {
		n := min(left, round)
		release := make(chan struct{})
		held := make(chan struct{})
		go func() { hold <- release; close(held) }()
		for held := held; held != nil; { // One more message stops it.
			publish(1)
			select {
			case <-held:
				held = nil
			case <-time.After(time.Millisecond):
			}
		}
		want := publish(n) - 1
		r.want = want
		for len(r.seen) > 0 {
			<-r.seen
		}
		b.StartTimer()
		close(release)
		for <-r.seen < want {
			continue
		}
		b.StopTimer()
		left -= n
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	if r.gaps > 1 {
		b.Errorf("%d gaps", r.gaps)
	}
}
