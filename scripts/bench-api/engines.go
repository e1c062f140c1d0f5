package main

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire"
)

const (
	blockSize = 16
	topK      = 8
	// A batch of the load stores one chain, eight blocks an event, and removes
	// another, one block an event, as vLLM does.
	chainBlocks = 64
	eventBlocks = 8
	chains      = 16 // of each worker, in turns
)

// engines are publishers that hold one prompt each and churn other blocks.
type engines struct {
	prompt []uint32
	pubs   []*zmqwire.Publisher
	loads  [][][]byte // by worker: the batches, in turns
	seqs   []uint64   // by worker: the last that was published
}

func newEngines(s settings) (*engines, error) {
	rnd := rand.New(rand.NewPCG(1, 1))
	e := &engines{prompt: tokens(rnd, s.tokens)}
	held := zmqwire.Batch{Timestamp: 1, Rank: -1, Events: []zmqwire.Event{store(e.prompt, 1)}}
	for range s.workers {
		p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*"})
		if err != nil {
			return nil, err
		}
		e.pubs = append(e.pubs, p)
		payload, err := zmqwire.AppendBatch(nil, &held, zmqwire.EncodeOptions{Maps: true})
		if err != nil {
			return nil, err
		}
		e.seqs = append(e.seqs, p.Publish(payload))
		load, err := batches(rnd)
		if err != nil {
			return nil, err
		}
		e.loads = append(e.loads, load)
	}
	return e, nil
}

func (e *engines) close() {
	for _, p := range e.pubs {
		p.Close()
	}
}

func tokens(rnd *rand.Rand, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = rnd.Uint32N(152_000)
	}
	return out
}

// store is the event that stores whole blocks whose handles count from first.
func store(tokens []uint32, first uint64) zmqwire.Event {
	e := zmqwire.Event{Kind: zmqwire.BlockStored, BlockSize: blockSize, Medium: []byte("GPU"), Group: zmqwire.NoGroup, Tokens: tokens}
	for i := range len(tokens) / blockSize {
		e.Hashes = append(e.Hashes, zmqwire.EngineHash(first+uint64(i)))
	}
	return e
}

// batches are one worker's: each stores a chain and removes the one before.
func batches(rnd *rand.Rand) ([][]byte, error) {
	first := func(chain int) uint64 { return uint64(chain+1) << 32 }
	var out [][]byte
	for c := range chains {
		b := zmqwire.Batch{Timestamp: 1, Rank: -1}
		for from := 0; from < chainBlocks; from += eventBlocks {
			ev := store(tokens(rnd, eventBlocks*blockSize), first(c)+uint64(from))
			if from > 0 {
				ev.HasParent, ev.Parent = true, ev.Hashes[0]-1
			}
			b.Events = append(b.Events, ev)
		}
		before := first((c + chains - 1) % chains)
		for i := chainBlocks - 1; i >= 0; i-- {
			b.Events = append(b.Events, zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: []zmqwire.EngineHash{zmqwire.EngineHash(before + uint64(i))}, Medium: []byte("GPU"), Group: zmqwire.NoGroup})
		}
		payload, err := zmqwire.AppendBatch(nil, &b, zmqwire.EncodeOptions{Maps: true})
		if err != nil {
			return nil, err
		}
		out = append(out, payload)
	}
	return out, nil
}

// publish sends ops block operations a second, the workers in turns, until the
// returned function is called, which says how many it were and in what time.
func (e *engines) publish(ctx context.Context, ops int) (stop func() (sent int, took time.Duration)) {
	ctx, cancel := context.WithCancel(ctx)
	began, sent, done := time.Now(), 0, make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for n := 0; ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for due := int(time.Since(began).Seconds() * float64(ops)); sent < due; n++ {
				w := n % len(e.pubs)
				e.seqs[w] = e.pubs[w].Publish(e.loads[w][n/len(e.pubs)%chains])
				sent += 2 * chainBlocks
			}
		}
	}()
	return func() (int, time.Duration) {
		cancel()
		<-done
		return sent, time.Since(began)
	}
}
