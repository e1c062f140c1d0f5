package fleet

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// BenchmarkSnapshot: 5 M memberships of 32 streams in chains of 128 blocks, and
// 20 M with KVINDEXD_LONG=1; unique content, and content that all streams hold
// under different engine hashes. What a snapshot costs of one core and by the
// clock, its bytes a membership on disk, the longest that one stream was held
// back, what the next start costs until every stream is restored, and how far
// the directory grows past one generation over the rewrites.
func BenchmarkSnapshot(b *testing.B) {
	sizes := []int{5_000_000}
	if os.Getenv("KVINDEXD_LONG") == "1" {
		sizes = append(sizes, 20_000_000)
	}
	for _, n := range sizes {
		b.Run(fmt.Sprintf("%dM-unique", n/1_000_000), func(b *testing.B) { benchSnapshots(b, n, false) })
		b.Run(fmt.Sprintf("%dM-shared32", n/1_000_000), func(b *testing.B) { benchSnapshots(b, n, true) })
	}
}

const benchStreams = 32

func benchSnapshots(b *testing.B, memberships int, shared bool) {
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{}}
	for i := range benchStreams {
		h.Streams[fmt.Sprint("s", i)] = zmqwire.CaptureStream{Worker: fmt.Sprintf("w%02d", i), Model: "m", BlockSize: 16}
	}
	off, err := NewOffline(h, Replies{}, Options{Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	fillFleet(b, off, memberships, shared)
	o := SnapshotOptions{Dir: b.TempDir(), Logger: quiet, Interval: -1}
	sn, err := OpenSnapshots(b.Context(), o)
	if err != nil {
		b.Fatal(err)
	}
	rewrites := 1
	if os.Getenv("KVINDEXD_LONG") == "1" && memberships < 10_000_000 {
		rewrites = 50
	}
	for b.Loop() {
		var most int64
		var w Written
		for range rewrites {
			cpu := processTime()
			if w, err = sn.Write(b.Context(), off.Fleet); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric((processTime() - cpu).Seconds(), "write-cpu-s")
			most = max(most, w.DiskBytes)
		}
		b.ReportMetric(w.Took.Seconds(), "write-s")
		b.ReportMetric(float64(w.Freeze.Microseconds()), "longest-freeze-µs")
		b.ReportMetric(float64(w.Bytes)/float64(w.Blocks), "B/membership")
		b.ReportMetric(float64(most)/float64(w.Bytes), "disk/generation")
		b.ReportMetric(float64(w.Blocks), "memberships")
		if err := sn.Close(context.Background(), nil); err != nil {
			b.Fatal(err)
		}
		runtime.GC()
		start, cpu := time.Now(), processTime()
		if sn, err = OpenSnapshots(b.Context(), o); err != nil {
			b.Fatal(err)
		}
		warm, err := NewOffline(h, Replies{}, Options{Logger: quiet, Restore: sn.Restore})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(time.Since(start).Seconds(), "load-s")
		b.ReportMetric((processTime() - cpu).Seconds(), "load-cpu-s")
		if n := warm.Sets()[0].Index.Stats().Memberships; n != int64(w.Blocks) {
			b.Fatalf("%d memberships of %d", n, w.Blocks)
		}
	}
	b.ReportMetric(0, "ns/op")
	if err := sn.Close(context.Background(), nil); err != nil {
		b.Fatal(err)
	}
}

// fillFleet gives every stream a position, and blocks past the wire.
func fillFleet(b *testing.B, off *Offline, memberships int, shared bool) {
	const blocks, perEvent, size = 128, 8, 16
	norm, batch := normalize.NewNormalizer(normalize.View{}), new(normalize.Batch)
	tokens, hashes := make([]uint32, blocks*size), make([]zmqwire.EngineHash, blocks)
	x := uint64(1)
	next := func() uint64 { x ^= x << 13; x ^= x >> 7; x ^= x << 17; return x }
	for i, m := range off.Sets()[0].Members {
		feed(b, off, m.pub.at.endpoint, 0, payloadOf(b, nil))
		if shared {
			x = 1
		} else {
			x = uint64(i + 1)
		}
		for range memberships / benchStreams / blocks {
			for k := range tokens {
				tokens[k] = uint32(next())
			}
			for k := range hashes {
				hashes[k] = zmqwire.EngineHash(next() * uint64(2*i+1))
			}
			for from := 0; from < blocks; from += perEvent {
				ev := zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: hashes[from : from+perEvent],
					Tokens: tokens[from*size : (from+perEvent)*size], BlockSize: size, Group: zmqwire.NoGroup}
				if from > 0 {
					ev.HasParent, ev.Parent = true, hashes[from-1]
				}
				norm.Normalize(batch, &zmqwire.Batch{Events: []zmqwire.Event{ev}})
				m.stream.Apply(batch)
			}
		}
	}
}

// processTime is what the process has used of all cores.
func processTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
