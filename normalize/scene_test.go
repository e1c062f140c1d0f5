package normalize

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvindexd/kvindexd/zmqwire"
)

const (
	sceneImage = 99
	sceneVideo = 98
)

// placed is one image or video of a scene: where its placeholder stands and
// which of its positions embed it.
type placed struct {
	ident  string
	offset int
	mask   []bool // nil: all
	length int
	video  bool
}

// scene is one prompt, as a frontend would send it and as a worker would cache
// it.
type scene struct {
	tokens     []uint32
	items      []placed
	lora, salt string
	shape      Shape
	view       View
	split      int // blocks of the first of two events
}

// drawScene draws a prompt of text and images over a small vocabulary, so that
// blocks, runs and placeholders meet in every way.
func drawScene(t *rapid.T) *scene {
	s := &scene{
		lora: rapid.SampledFrom([]string{"", "", "adapter"}).Draw(t, "lora"),
		salt: rapid.SampledFrom([]string{"", "", "tenant"}).Draw(t, "salt"),
		shape: Shape{
			BlockSize: rapid.Uint32Range(1, 6).Draw(t, "block size"),
			Window:    rapid.SampledFrom([]Window{Plain, Plain, Pairs, 1, 2}).Draw(t, "window"),
		},
	}
	s.view.IDs.Image, s.view.IDs.Video = sceneImage, sceneVideo
	s.view.IDs.HasImage = rapid.IntRange(0, 4).Draw(t, "image id") > 0
	s.view.IDs.HasVideo = rapid.Bool().Draw(t, "video id")
	s.view.ExtraKeys = rapid.SampledFrom([]ExtraKeysMode{Native, Native, Native, BareMM, None}).Draw(t, "extra keys")
	text := rapid.SliceOfN(rapid.Uint32Range(1, 5), 0, 8)
	stray := rapid.IntRange(0, 9).Draw(t, "stray") == 0
	for i := range rapid.IntRange(0, 6).Draw(t, "pieces") {
		if rapid.Bool().Draw(t, "item") {
			s.drawItem(t, fmt.Sprintf("item-%d", i))
			continue
		}
		s.tokens = append(s.tokens, text.Draw(t, "text")...)
		if stray && rapid.Bool().Draw(t, "here") {
			s.tokens = append(s.tokens, sceneImage)
		}
	}
	s.split = rapid.IntRange(0, 8).Draw(t, "split")
	return s
}

// drawItem appends an image or a video: tokens of its own around and between
// runs of its placeholder token.
func (s *scene) drawItem(t *rapid.T, name string) {
	it := placed{offset: len(s.tokens), ident: fmt.Sprintf("%016x%048x", MMHash(len(name))*0x9e3779b97f4a7c15^MMHash(seedOf(name)), 0)}
	it.video = s.view.IDs.HasVideo && rapid.Bool().Draw(t, "video")
	id := uint32(sceneImage)
	if it.video {
		id = sceneVideo
	}
	for range rapid.IntRange(1, 3).Draw(t, "runs") {
		for range rapid.IntRange(0, 2).Draw(t, "own tokens") {
			s.tokens, it.mask = append(s.tokens, 7), append(it.mask, false)
		}
		for range rapid.IntRange(1, 4).Draw(t, "run") {
			s.tokens, it.mask = append(s.tokens, id), append(it.mask, true)
		}
	}
	if rapid.Bool().Draw(t, "own tail") {
		s.tokens, it.mask = append(s.tokens, 8), append(it.mask, false)
	}
	it.length = len(it.mask)
	if !slices.Contains(it.mask, false) && rapid.Bool().Draw(t, "no mask") {
		it.mask = nil
	}
	s.items = append(s.items, it)
}

// prompt is the scene as a request.
func (s *scene) prompt() *Prompt {
	p := &Prompt{Tokens: s.tokens, LoraName: s.lora, CacheSalt: s.salt}
	if len(s.items) == 0 {
		return p
	}
	hashes, spans := map[string]any{}, map[string]any{}
	for _, it := range s.items {
		kind := modImage
		if it.video {
			kind = modVideo
		}
		span := map[string]any{"offset": it.offset, "length": it.length}
		if it.mask != nil {
			mask := make([]any, len(it.mask))
			for i, b := range it.mask {
				mask[i] = b
			}
			span["is_embed"] = mask
		}
		hs, _ := hashes[kind].([]any)
		ss, _ := spans[kind].([]any)
		hashes[kind], spans[kind] = append(hs, it.ident), append(ss, span)
	}
	p.Features = ParseFeatures(map[string]any{membHashes: hashes, membSpans: spans})
	return p
}

// blocks is the number of complete windows.
func (s *scene) blocks() int {
	w := windows{}
	w.shape(s.shape)
	return blocksIn(len(s.tokens), &w)
}

// extraKeys are those that vLLM gives a block: adapter, items in prompt order,
// salt at the root.
func (s *scene) extraKeys(block int) []zmqwire.ExtraKey {
	if s.view.ExtraKeys == None {
		return nil
	}
	var keys []zmqwire.ExtraKey
	if s.lora != "" {
		keys = append(keys, zmqwire.ExtraText(s.lora))
	}
	begin := block * int(s.shape.BlockSize)
	end := begin + int(s.shape.BlockSize) + max(0, int(s.shape.Window))
	for _, it := range s.items {
		switch {
		case it.offset >= end || it.offset+it.length <= begin:
		case s.view.ExtraKeys == BareMM:
			keys = append(keys, zmqwire.ExtraText(it.ident))
		default:
			keys = append(keys, zmqwire.ExtraMM(it.ident, int64(it.offset-begin)))
		}
	}
	if block == 0 && s.salt != "" {
		keys = append(keys, zmqwire.ExtraText(s.salt))
	}
	return keys
}

// store is the event that announces blocks from to to.
func (s *scene) store(from, to int) zmqwire.Event {
	bs := int(s.shape.BlockSize)
	ev := zmqwire.Event{
		Kind: zmqwire.BlockStored, Group: zmqwire.NoGroup, BlockSize: s.shape.BlockSize,
		LoraName: []byte(s.lora), Pairs: s.shape.Window == Pairs, ExtraEnd: []int{},
		Lookahead: max(0, int(s.shape.Window)),
	}
	if from > 0 {
		ev.Parent, ev.HasParent = zmqwire.EngineHash(from), true
	}
	end := to * bs
	if ev.Pairs {
		end++
	}
	ev.Tokens = s.tokens[from*bs : end]
	for i := from; i < to; i++ {
		ev.Hashes = append(ev.Hashes, zmqwire.EngineHash(i+1))
		ev.LookaheadTokens = append(ev.LookaheadTokens, s.tokens[(i+1)*bs:(i+1)*bs+ev.Lookahead]...)
		ev.Extra = append(ev.Extra, s.extraKeys(i)...)
		ev.ExtraEnd = append(ev.ExtraEnd, len(ev.Extra))
	}
	return ev
}

// eventLocals sends the scene's blocks over the wire and returns the local
// hashes that the index would see.
func (s *scene) eventLocals(t testing.TB) []LocalHash {
	n := s.blocks()
	if n == 0 {
		return nil
	}
	b := zmqwire.Batch{Rank: -1}
	if cut := min(s.split, n); cut == 0 || cut == n {
		b.Events = append(b.Events, s.store(0, n))
	} else {
		b.Events = append(b.Events, s.store(0, cut), s.store(cut, n))
	}
	payload, err := zmqwire.AppendBatch(nil, &b, zmqwire.EncodeOptions{Maps: true})
	if err != nil {
		t.Fatal(err)
	}
	var d zmqwire.Decoder
	events, err := d.Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	var ops Batch
	NewNormalizer(s.view).Normalize(&ops, events)
	var locals []LocalHash
	for i := range ops.Ops {
		if ops.Ops[i].Form != Placed || ops.Ops[i].Shape != s.shape {
			t.Fatalf("operation %+v, want a placed store of %+v", ops.Ops[i], s.shape)
		}
		locals = ops.Locals(locals, &ops.Ops[i], ops.Ops[0].Salt)
	}
	if len(locals) != n {
		t.Fatalf("%d local hashes, want %d", len(locals), n)
	}
	return locals
}

// chain is the scene's chain as a request, and its projection.
func (s *scene) chain() (Chain, Projection) {
	p := s.prompt()
	pr := p.Project(s.view, s.shape)
	var c Chain
	p.Chain(&c, &pr, s.view, s.shape)
	return c, pr
}

// Both sides of one prompt have the same blocks, as far as the request's go; and
// they go as far as they may.
func TestEventsAndRequestsAgree(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := drawScene(rt)
		events := s.eventLocals(t)
		c, pr := s.chain()
		if len(c.Locals) > len(events) {
			rt.Fatalf("%d blocks asked for, %d complete", len(c.Locals), len(events))
		}
		for i, l := range c.Locals {
			if l != events[i] {
				rt.Fatalf("block %d: request %x, event %x (%+v)", i, l, events[i], pr)
			}
		}
		s.checkLength(rt, &c, &pr)
	})
}

// checkLength checks where a chain ended.
func (s *scene) checkLength(t *rapid.T, c *Chain, pr *Projection) {
	w := windows{}
	w.shape(s.shape)
	at := len(c.Locals)
	if len(c.Locals) != len(c.Seqs) {
		t.Fatalf("%d local hashes, %d sequence hashes", len(c.Locals), len(c.Seqs))
	}
	first := len(s.tokens)
	if len(s.items) > 0 {
		first = s.items[0].offset
	}
	switch {
	case s.view.ExtraKeys == None && s.salt != "" && at > 0:
		t.Fatal("a salt that nobody sees was matched")
	case !pr.Exact && at*w.size > first:
		t.Fatalf("%d blocks matched without their image: %+v", at, pr)
	case pr.Exact != (pr.Reason == ""), pr.Exact && len(s.items) > 0 && s.view.ExtraKeys == None:
		t.Fatalf("exact without reason to be: %+v", pr)
	case at == s.blocks(), (at*w.size + w.window) > pr.Limit:
		return
	}
	window := s.tokens[at*w.size : at*w.size+w.window]
	if s.shape.Window != Pairs || !s.view.IDs.in(window[w.size:]) {
		t.Fatalf("%d of %d blocks, %+v", at, s.blocks(), pr)
	}
}

// Whoever shares a block shares everything that is in it: another image, salt
// or adapter is another block, from the first it touches.
func TestDifferentPromptsShareNothing(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := drawScene(rt)
		s.view.ExtraKeys, s.view.IDs.HasImage = Native, true
		other := *s
		other.items = slices.Clone(s.items)
		from := 0 // the first token that differs
		switch {
		case len(s.items) > 0 && rapid.Bool().Draw(rt, "other image"):
			i := rapid.IntRange(0, len(s.items)-1).Draw(rt, "which")
			other.items[i].ident = fmt.Sprintf("another-%d", i)
			from = s.items[i].offset
		case rapid.Bool().Draw(rt, "other salt"):
			other.salt = s.salt + "x"
		default:
			other.lora = s.lora + "x"
		}
		a, pa := s.chain()
		b, _ := other.chain()
		events := SequenceHashes(nil, other.eventLocals(t))
		w := windows{}
		w.shape(s.shape)
		for i := range a.Seqs {
			same := i*w.size+w.reach <= from
			if i < len(b.Seqs) && (a.Seqs[i] == b.Seqs[i]) != same {
				rt.Fatalf("block %d: shared by two requests: %v, want %v (%+v)", i, !same, same, pa)
			}
			if (a.Seqs[i] == events[i]) != same {
				rt.Fatalf("block %d: shared with the other's event: %v, want %v (%+v)", i, !same, same, pa)
			}
		}
	})
}

// A block whose image nobody names is matched by no request, and neither is one
// with an opaque key.
func TestUnidentifiedMatchesNobody(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := drawScene(rt)
		s.view.ExtraKeys, s.view.IDs.HasImage, s.shape.Window = None, true, Plain
		s.salt = ""
		events := SequenceHashes(nil, s.eventLocals(t))
		s.view.ExtraKeys = Native // the strictest asker: sees every image
		c, pr := s.chain()
		image := s.view.IDs.index(s.tokens)
		for i := range c.Seqs {
			touched := (i+1)*int(s.shape.BlockSize) > image
			if touched && c.Seqs[i] == events[i] {
				rt.Fatalf("block %d shared (%+v)", i, pr)
			}
		}
	})
}
