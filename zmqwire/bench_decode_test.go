package zmqwire

import (
	"math/rand/v2"
	"testing"
)

// storesBatch is a batch of n stores of four blocks of 16 tokens, whose ids are
// as wide on the wire as those of the recorded captures: of 100, 57 take three
// bytes, 42 take five and one takes two.
func storesBatch(n int, seed uint64) *Batch {
	r := rand.New(rand.NewPCG(seed, 2))
	b := &Batch{Timestamp: 1790000000.25, Rank: 0}
	for range n {
		ev := Event{
			Kind: BlockStored, Group: 0, BlockSize: 16, Parent: EngineHash(r.Uint64()), HasParent: true,
			Medium: []byte("GPU"), Spec: []byte("full_attention"),
		}
		for range 4 {
			ev.Hashes = append(ev.Hashes, EngineHash(r.Uint64()))
			ev.ExtraEnd = append(ev.ExtraEnd, 0)
		}
		for range 64 {
			ev.Tokens = append(ev.Tokens, 200+r.Uint32N(112_000))
		}
		b.Events = append(b.Events, ev)
	}
	return b
}

func BenchmarkDecode(b *testing.B) {
	for _, form := range []struct {
		name    string
		options EncodeOptions
	}{
		{"array/int", EncodeOptions{}},
		{"array/bytes", EncodeOptions{BytesHashes: true}},
		{"map/int", EncodeOptions{Maps: true}},
		{"map/bytes", EncodeOptions{Maps: true, BytesHashes: true}},
	} {
		b.Run(form.name, func(b *testing.B) {
			// So many payloads that the branch predictor cannot learn them: it
			// makes one payload a third faster than it ever is in service.
			const events = 16
			payloads := make([][]byte, 256)
			for i := range payloads {
				var err error
				if payloads[i], err = AppendBatch(nil, storesBatch(events, uint64(i)), form.options); err != nil {
					b.Fatal(err)
				}
			}
			var d Decoder
			b.ReportAllocs()
			b.SetBytes(int64(len(payloads[0])))
			for i := 0; b.Loop(); i++ {
				batch, err := d.Decode(payloads[i%len(payloads)])
				if err != nil || len(batch.Events) != events {
					b.Fatal(batch, err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*events), "ns/event")
		})
	}
}
