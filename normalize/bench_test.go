package normalize

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// textTokens are n tokens without a placeholder.
func textTokens(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i)*2654435761>>15 + 1
	}
	return tokens
}

// textBatch is one store of a prompt's blocks; change may make it another.
func textBatch(tokens, bs int, change func(*zmqwire.Event)) *zmqwire.Batch {
	ev := zmqwire.Event{
		Kind: zmqwire.BlockStored, Group: zmqwire.NoGroup, Medium: []byte("GPU"),
		Tokens: textTokens(tokens), BlockSize: uint32(bs),
	}
	for i := range tokens / bs {
		ev.Hashes = append(ev.Hashes, zmqwire.EngineHash(i)*0x9e3779b97f4a7c15)
	}
	if change != nil {
		change(&ev)
	}
	return &zmqwire.Batch{Events: []zmqwire.Event{ev}}
}

// eachBlock gives every block of an event these extra keys.
func eachBlock(ev *zmqwire.Event, keys ...zmqwire.ExtraKey) {
	for range ev.Hashes {
		ev.Extra = append(ev.Extra, keys...)
		ev.ExtraEnd = append(ev.ExtraEnd, len(ev.Extra))
	}
}

func withLora(ev *zmqwire.Event) {
	ev.LoraName = []byte("adapter")
	eachBlock(ev, zmqwire.ExtraText("adapter"))
}

func withImages(ev *zmqwire.Event) {
	eachBlock(ev, zmqwire.ExtraMM(fmt.Sprintf("%064x", 7), 0))
	for i := range ev.Tokens {
		if i%16 > 3 {
			ev.Tokens[i] = 99
		}
	}
}

func withLookahead(ev *zmqwire.Event) {
	ev.Lookahead, ev.LookaheadTokens = 1, make([]uint32, len(ev.Hashes))
}

// imagePrompt is a prompt of n tokens in which every block of 16 begins with
// text and has one image behind it.
func imagePrompt(n int) *Prompt {
	tokens := textTokens(n)
	var hashes, spans []string
	for i := range n / 16 {
		for j := 4; j < 14; j++ {
			tokens[16*i+j] = 99
		}
		hashes = append(hashes, fmt.Sprintf(`"%064x"`, i))
		spans = append(spans, fmt.Sprintf(`{"offset":%d,"length":10}`, 16*i+4))
	}
	return &Prompt{Tokens: tokens, Features: ParseFeaturesJSON(fmt.Appendf(nil,
		`{"mm_hashes":{"image":[%s]},"mm_placeholders":{"image":[%s]}}`, strings.Join(hashes, ","), strings.Join(spans, ",")))}
}

func TestByteOrder(t *testing.T) {
	if got := binary.NativeEndian.Uint16([]byte{1, 0}) == 1; got != littleEndian {
		t.Errorf("little endian: %v, the constant says %v", got, littleEndian)
	}
}

// The steady state allocates nothing.
func TestAllocations(t *testing.T) {
	f := func(name string, budget float64, run func()) {
		t.Helper()
		run() // to grow what is kept
		if got := testing.AllocsPerRun(50, run); got > budget {
			t.Errorf("%s: %v allocations, want at most %v", name, got, budget)
		}
	}
	n := NewNormalizer(image99)
	var b Batch
	var locals []LocalHash
	var seqs []SequenceHash
	for name, change := range map[string]func(*zmqwire.Event){
		"text": nil, "adapter": withLora, "images": withImages, "lookahead": withLookahead,
		"unknown medium": func(ev *zmqwire.Event) { ev.Medium = []byte("tape") },
	} {
		in := textBatch(8192, 16, change)
		f("events: "+name, 0, func() {
			n.Normalize(&b, in)
			for i := range b.Ops {
				locals = b.Locals(locals[:0], &b.Ops[i], 5)
				seqs = SequenceHashes(seqs[:0], locals)
			}
		})
	}
	var c Chain
	s := Shape{BlockSize: 16}
	for name, p := range map[string]*Prompt{
		"text": {Tokens: textTokens(8192)}, "adapter": {Tokens: textTokens(8192), LoraName: "a", CacheSalt: "s"}, "images": imagePrompt(8192),
	} {
		pr := p.Project(image99, s)
		f("chain: "+name, 0, func() { p.Chain(&c, &pr, image99, s) })
	}
	text := Prompt{Tokens: textTokens(8192)}
	f("projection of text", 0, func() { text.Project(image99, s) })
}

func BenchmarkHash(b *testing.B) {
	for _, n := range []int{8192, 131072} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := Prompt{Tokens: textTokens(n)}
			s := Shape{BlockSize: 16}
			var c Chain
			pr := p.Project(View{}, s)
			b.ReportAllocs()
			for b.Loop() {
				p.Chain(&c, &pr, View{}, s)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n/16), "ns/block")
		})
	}
}

func BenchmarkProject(b *testing.B) {
	s := Shape{BlockSize: 16}
	for name, p := range map[string]*Prompt{"text": {Tokens: textTokens(8192)}, "images": imagePrompt(8192)} {
		b.Run(name, func(b *testing.B) {
			var c Chain
			b.ReportAllocs()
			for b.Loop() {
				pr := p.Project(image99, s)
				p.Chain(&c, &pr, image99, s)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*8192/16), "ns/block")
		})
	}
}

func BenchmarkNormalize(b *testing.B) {
	for _, bench := range []struct {
		name   string
		view   View
		change func(*zmqwire.Event)
	}{
		{"text", View{}, nil}, {"text, ids known", image99, nil}, {"adapter", image99, withLora},
		{"images", image99, withImages}, {"lookahead", image99, withLookahead},
	} {
		b.Run(bench.name, func(b *testing.B) {
			in := textBatch(8192, 16, bench.change)
			n := NewNormalizer(bench.view)
			var out Batch
			var locals []LocalHash
			b.ReportAllocs()
			for b.Loop() {
				n.Normalize(&out, in)
				locals = out.Locals(locals[:0], &out.Ops[0], 0)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*512), "ns/block")
		})
	}
}

func BenchmarkParseFeaturesJSON(b *testing.B) {
	mask := strings.Repeat("true,false,", 8000)
	raw := fmt.Appendf(nil, `{"mm_hashes":{"image":["%064x"]},"mm_placeholders":{"image":[{"offset":0,"length":16000,"is_embed":[%s]}]},"kwargs_data":{"image":["%s"]}}`,
		1, mask[:len(mask)-1], strings.Repeat("A", 1<<20))
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		ParseFeaturesJSON(raw)
	}
}
