package fleet

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestMain makes the test's own binary the publisher of BenchmarkFollow, in a
// process that shares nothing with the one that is measured.
func TestMain(m *testing.M) {
	if rate := os.Getenv(followRate); rate != "" {
		if err := publishAt(rate); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// followRate names the variable with the publisher's messages per second.
const followRate = "KVINDEXD_TEST_PUBLISHER"

// publishAt prints the endpoints, and publishes as many messages as each line on
// stdin says, at the rate, until stdin ends. It answers with the messages that
// its subscriber was too slow for.
func publishAt(rate string) error {
	perSecond, err := strconv.Atoi(rate)
	if err != nil {
		return err
	}
	p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://0.0.0.0:0", ReplayEndpoint: "tcp://0.0.0.0:0", Logger: quiet})
	if err != nil {
		return err
	}
	defer p.Close()
	fmt.Println(p.Addr(), p.ReplayAddr())
	payloads, err := followPayloads()
	if err != nil {
		return err
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		n, err := strconv.Atoi(in.Text())
		if err != nil {
			return err
		}
		began := time.Now()
		for i := range n {
			if i%64 == 0 {
				time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second / time.Duration(perSecond))))
			}
			p.Publish(payloads[i%len(payloads)])
		}
		fmt.Println(p.Stats().Dropped)
	}
	return nil
}

// BenchmarkFollow is live messages of 4 KB at a steady rate, over loopback from
// a publisher in another process into the index. Where the stream was followed,
// gaps and lost are 0 and msgs/s is the rate; behind/ms is what it lagged when
// the last message was published. cpu-us/msg is of this process alone.
func BenchmarkFollow(b *testing.B) {
	for _, rate := range []int{25_000, 50_000, 100_000, 200_000} {
		b.Run(fmt.Sprintf("rate=%d", rate), func(b *testing.B) { follow(b, rate) })
	}
}

// publisherAt starts this binary as a publisher and returns its stdin, its
// stdout by line and its endpoints.
func publisherAt(b *testing.B, rate int) (in io.Writer, lines *bufio.Scanner, events, replay string) {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), followRate+"="+strconv.Itoa(rate))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { stdin.Close(); _ = cmd.Wait() })
	lines = bufio.NewScanner(stdout)
	lines.Scan()
	events, replay, _ = strings.Cut(lines.Text(), " ")
	return stdin, lines, at("127.0.0.1", events), at("127.0.0.1", replay)
}

func follow(b *testing.B, rate int) {
	in, lines, events, replay := publisherAt(b, rate)
	f := running(b, Options{Timing: Timing{}.withDefaults(), Workers: []WorkerSpec{{ID: "w", Model: "m", Endpoint: events, ReplayEndpoint: replay}}})
	eventually(b, func() string {
		if st := statusOf(f, "w/0"); st.State != Live {
			return st.State.String()
		}
		return ""
	})
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime(b)
	fmt.Fprintln(in, b.N)
	lines.Scan()
	published := time.Now()
	for st := statusOf(f, "w/0"); !st.HasSeq || st.Seq < uint64(b.N-1); st = statusOf(f, "w/0") {
		time.Sleep(time.Millisecond)
	}
	b.StopTimer()
	c := countsOf(f, "w/0")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
	b.ReportMetric(float64((cpuTime(b)-cpu).Microseconds())/float64(b.N), "cpu-us/msg")
	b.ReportMetric(float64(time.Since(published).Milliseconds()), "behind/ms")
	b.ReportMetric(float64(c.Gaps), "gaps")
	b.ReportMetric(float64(c.Lost), "lost")
}

// cpuTime is what this process has used.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// followPayloads are batches of about 4 KB each: nine chains of four blocks of
// 16 tokens are stored, and the nine that came before them are removed.
func followPayloads() (payloads [][]byte, err error) {
	const chains, batches = 9, 64
	name := func(batch, c, i int) zmqwire.EngineHash { // as even as the hashes of an engine
		return zmqwire.EngineHash(xxh3.HashString(fmt.Sprint(batch, c, i)))
	}
	for n := range batches {
		batch := zmqwire.Batch{Timestamp: now(), Rank: -1}
		for c := range chains {
			stored := zmqwire.Event{Kind: zmqwire.BlockStored, BlockSize: 16, Group: zmqwire.NoGroup}
			removed := zmqwire.Event{Kind: zmqwire.BlockRemoved, Group: zmqwire.NoGroup}
			for i := range 4 {
				stored.Hashes = append(stored.Hashes, name(n, c, i))
				removed.Hashes = append(removed.Hashes, name((n+batches/2)%batches, c, i))
			}
			for i := range 64 {
				stored.Tokens = append(stored.Tokens, uint32(1000+(n*chains+c)*64+i))
			}
			batch.Events = append(batch.Events, removed, stored)
		}
		raw, err := zmqwire.AppendBatch(nil, &batch, zmqwire.EncodeOptions{Maps: true})
		if err != nil {
			return nil, err
		}
		payloads = append(payloads, raw)
	}
	return payloads, nil
}

// BenchmarkIdleStream is what one more subscription costs while nothing comes:
// 256 of them, to a publisher in another process under 256 addresses.
func BenchmarkIdleStream(b *testing.B) {
	const n = 256
	_, _, events, replay := publisherAt(b, 1)
	var specs []WorkerSpec
	for i := range n {
		addr := fmt.Sprintf("127.0.%d.%d", 1+i/128, 1+i%128)
		specs = append(specs, WorkerSpec{ID: fmt.Sprint("w", i), Model: "m", Endpoint: at(addr, events), ReplayEndpoint: at(addr, replay)})
	}
	goroutines, heap := runtime.NumGoroutine(), heapAlloc()
	f := running(b, Options{Timing: Timing{}.withDefaults(), Workers: specs})
	eventually(b, func() string {
		if r := f.Ready(); r.Settled != n {
			return fmt.Sprintf("%d of %d streams are followed", r.Settled, n)
		}
		return ""
	})
	b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/stream")
	b.ReportMetric(float64(heapAlloc()-heap)/n/1024, "KB/stream")
	for range b.N { // There is nothing to do.
		runtime.Gosched()
	}
}

func heapAlloc() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
