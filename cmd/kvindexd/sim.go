package main

import (
	"container/list"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// simEngine is a vLLM engine as far as the outside can see its prefix cache: it
// takes prompts, keeps full blocks, evicts the least recently used, and
// publishes what it did. What it says of cached tokens is the truth that
// answers are held against.
type simEngine struct {
	pub    *zmqwire.Publisher
	encode zmqwire.EncodeOptions
	bs     int
	max    int // blocks
	rank   int32

	mu     sync.Mutex
	next   uint64 // seq
	lossy  bool   // batches get lost on the way to the subscribers
	blocks map[zmqwire.EngineHash]*list.Element
	lru    list.List // of zmqwire.EngineHash, the most recent in front
}

// simPrompt is a request as an engine sees it.
type simPrompt struct {
	Tokens []uint32
	Images []simImage
	Lora   string
	Salt   string
}

// simImage is where an image's placeholder tokens stand, and its identifier.
type simImage struct {
	Offset, Length int
	Identifier     string
}

func newSimEngine(pub *zmqwire.Publisher, blockSize, maxBlocks int, encode zmqwire.EncodeOptions) *simEngine {
	return &simEngine{pub: pub, bs: blockSize, max: maxBlocks, encode: encode, rank: -1, blocks: map[zmqwire.EngineHash]*list.Element{}}
}

// rebind makes a publisher in the place of one that was closed. Its port is one
// of those that outgoing connections take too, so it may be somebody's for a
// moment.
func rebind(ctx context.Context, cfg zmqwire.PublisherConfig) (*zmqwire.Publisher, error) {
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(5 * time.Second); ; {
		pub, err := zmqwire.NewPublisher(cfg)
		if err == nil || zmqwire.ReasonOf(err) != zmqwire.ReasonBind || time.Now().After(deadline) {
			return pub, err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// serve computes a prompt and returns how many of its tokens came from the
// cache. As vLLM does, it always computes the last token anew.
func (e *simEngine) serve(p *simPrompt) (cached int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	chain := e.chain(p)
	hit := 0
	for hit < len(chain) && e.blocks[chain[hit]] != nil {
		hit++
	}
	cached = min(hit, (len(p.Tokens)-1)/e.bs) * e.bs
	events := e.evict(chain, hit)
	if hit < len(chain) {
		events = append(events, e.stored(p, chain, hit))
	}
	for i := len(chain) - 1; i >= 0; i-- {
		e.touch(chain[i])
	}
	if len(events) == 0 {
		return cached, nil
	}
	return cached, e.send(events)
}

// cachedTokens is what serve would return now.
func (e *simEngine) cachedTokens(p *simPrompt) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	hit := 0
	for _, h := range e.chain(p) {
		if e.blocks[h] == nil {
			break
		}
		hit++
	}
	return min(hit, (len(p.Tokens)-1)/e.bs) * e.bs
}

func (e *simEngine) touch(h zmqwire.EngineHash) {
	if el := e.blocks[h]; el != nil {
		e.lru.MoveToFront(el)
		return
	}
	e.blocks[h] = e.lru.PushFront(h)
}

// evict makes room for what is missing of the chain, never at the cost of its
// own blocks.
func (e *simEngine) evict(chain []zmqwire.EngineHash, hit int) []zmqwire.Event {
	for i := hit - 1; i >= 0; i-- {
		e.touch(chain[i])
	}
	var gone []zmqwire.EngineHash
	for len(e.blocks)+len(chain)-hit > e.max && e.lru.Len() > hit {
		last := e.lru.Back()
		h := e.lru.Remove(last).(zmqwire.EngineHash)
		delete(e.blocks, h)
		gone = append(gone, h)
	}
	if len(gone) == 0 {
		return nil
	}
	return []zmqwire.Event{{Kind: zmqwire.BlockRemoved, Hashes: gone, Medium: []byte("GPU"), Group: zmqwire.NoGroup}}
}

// stored announces the blocks of a chain from hit on.
func (e *simEngine) stored(p *simPrompt, chain []zmqwire.EngineHash, hit int) zmqwire.Event {
	ev := zmqwire.Event{
		Kind: zmqwire.BlockStored, Hashes: chain[hit:], Tokens: p.Tokens[hit*e.bs : len(chain)*e.bs],
		BlockSize: uint32(e.bs), Medium: []byte("GPU"), Group: zmqwire.NoGroup,
	}
	if hit > 0 {
		ev.Parent, ev.HasParent = chain[hit-1], true
	}
	if p.Lora != "" {
		ev.LoraName = []byte(p.Lora)
	}
	for i := hit; i < len(chain); i++ {
		ev.Extra = append(ev.Extra, e.extra(p, i)...)
		ev.ExtraEnd = append(ev.ExtraEnd, len(ev.Extra))
	}
	if len(ev.Extra) == 0 {
		ev.ExtraEnd = nil
	}
	return ev
}

// extra are the extra keys of block i in vLLM's order: the adapter, the images,
// the salt on the first block.
func (e *simEngine) extra(p *simPrompt, i int) (keys []zmqwire.ExtraKey) {
	begin := i * e.bs
	if p.Lora != "" {
		keys = append(keys, zmqwire.ExtraText(p.Lora))
	}
	for _, m := range p.Images {
		if m.Offset < begin+e.bs && m.Offset+m.Length > begin {
			keys = append(keys, zmqwire.ExtraMM(m.Identifier, int64(m.Offset-begin)))
		}
	}
	if p.Salt != "" && i == 0 {
		keys = append(keys, zmqwire.ExtraText(p.Salt))
	}
	return keys
}

// chain are the prompt's engine hashes: of the parent, the tokens and the extra
// keys. The scheme is the engine's own business; nothing depends on it.
func (e *simEngine) chain(p *simPrompt) []zmqwire.EngineHash {
	out := make([]zmqwire.EngineHash, 0, len(p.Tokens)/e.bs)
	var parent zmqwire.EngineHash
	var b []byte
	for i := range len(p.Tokens) / e.bs {
		b = binary.LittleEndian.AppendUint64(b[:0], uint64(parent))
		for _, t := range p.Tokens[i*e.bs : (i+1)*e.bs] {
			b = binary.LittleEndian.AppendUint32(b, t)
		}
		for _, k := range e.extra(p, i) {
			b = append(b, k.Raw...)
		}
		parent = zmqwire.EngineHash(xxh3.HashSeed(b, uint64(e.bs)))
		out = append(out, parent)
	}
	return out
}

func (e *simEngine) send(events []zmqwire.Event) error {
	batch := zmqwire.Batch{Timestamp: float64(time.Now().UnixNano()) / 1e9, Rank: e.rank, Events: events}
	payload, err := zmqwire.AppendBatch(nil, &batch, e.encode)
	if err != nil {
		return fmt.Errorf("simulated engine: %w", err)
	}
	if e.lossy {
		e.pub.Hold(e.next, payload)
	} else {
		e.pub.Publish(payload)
	}
	e.next++
	return nil
}

// lose says whether the next batches are lost on the way: the replay socket
// alone has them.
func (e *simEngine) lose(on bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lossy = on
}

// published is the number of batches so far, lost ones included.
func (e *simEngine) published() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.next
}

// simWorkload makes prompts as a chat service sees them: few beginnings that
// many share, and ends of their own.
type simWorkload struct {
	rng      *rand.Rand
	prefixes [][]uint32
	tokens   int
	images   float64 // share of the prompts that have one
	imageID  uint32
	vocab    uint32
	pictures []string
}

const imageTokens = 64 // placeholder tokens of a simulated image

func newSimWorkload(seed uint64, prefixes, prefixTokens, tokens int, images float64, imageID uint32) *simWorkload {
	w := &simWorkload{rng: rand.New(rand.NewPCG(seed, 0)), tokens: tokens, images: images, imageID: imageID, vocab: 100_000}
	for range prefixes {
		w.prefixes = append(w.prefixes, w.text(prefixTokens))
		w.pictures = append(w.pictures, w.identifier())
	}
	return w
}

// text is n tokens, none of them an image's.
func (w *simWorkload) text(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		if out[i] = w.rng.Uint32N(w.vocab); out[i] == w.imageID {
			out[i]++
		}
	}
	return out
}

// identifier is a new image's: 64 hex digits, as vLLM's hashes are.
func (w *simWorkload) identifier() string {
	return fmt.Sprintf("%016x%016x%016x%016x", w.rng.Uint64(), w.rng.Uint64(), w.rng.Uint64(), w.rng.Uint64())
}

// next is one more prompt.
func (w *simWorkload) next() *simPrompt {
	n := w.rng.IntN(len(w.prefixes))
	p := &simPrompt{Tokens: append([]uint32(nil), w.prefixes[n]...)}
	if w.rng.Float64() < w.images {
		p.addImage(w.imageID, imageTokens, w.pictures[w.rng.IntN(len(w.pictures))])
	}
	if rest := w.tokens - len(p.Tokens); rest > 0 {
		p.Tokens = append(p.Tokens, w.text(rest)...)
	}
	return p
}

// addImage appends an image's placeholder to the prompt.
func (p *simPrompt) addImage(token uint32, length int, identifier string) {
	p.Images = append(p.Images, simImage{Offset: len(p.Tokens), Length: length, Identifier: identifier})
	for range length {
		p.Tokens = append(p.Tokens, token)
	}
}

// features are the prompt's images as requests to vLLM declare them, nil for
// none.
func (p *simPrompt) features() map[string]any {
	if len(p.Images) == 0 {
		return nil
	}
	var hashes []string
	var places []map[string]int
	for _, m := range p.Images {
		hashes = append(hashes, m.Identifier)
		places = append(places, map[string]int{"offset": m.Offset, "length": m.Length})
	}
	return map[string]any{
		"mm_hashes":       map[string]any{"image": hashes},
		"mm_placeholders": map[string]any{"image": places},
	}
}
