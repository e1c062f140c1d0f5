package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// patience with a stream that is not applied yet.
const patience = 10 * time.Second

// stage is a scenario with engines. Its methods panic with a setback where the
// scenario cannot go on.
type stage struct {
	ctx     context.Context
	p       *pair
	model   string
	next    int
	engines []*engine
}

type setback struct{ err error }

// onStage makes a scenario of a play with engines in a model of its own.
func onStage(model string, first int, play func(s *stage)) func(context.Context, *pair) {
	return func(ctx context.Context, p *pair) {
		s := &stage{ctx: ctx, p: p, model: model, next: first}
		defer func() {
			for _, e := range s.engines {
				e.pub.Close()
			}
			switch r := recover().(type) {
			case nil:
			case setback:
				p.fail("the scenario stops", r.err)
			default:
				panic(r)
			}
		}()
		play(s)
	}
}

func (s *stage) must(err error) {
	if err != nil {
		panic(setback{err})
	}
}

// engine is a new instance of one rank, not registered yet.
func (s *stage) engine() *engine {
	e, err := newEngine(s.model, fmt.Sprint(s.next), 0, 4)
	s.must(err)
	s.next++
	s.engines = append(s.engines, e)
	return e
}

// joined is a new instance of one rank that both are connected to.
func (s *stage) joined() *engine {
	e := s.engine()
	s.must(s.p.join(s.ctx, e))
	return e
}

// rankOf is a further rank of an instance.
func (s *stage) rankOf(of *engine, rank int) *engine {
	e, err := newEngine(s.model, of.instance, rank, 4)
	s.must(err)
	e.group = of.group
	s.engines = append(s.engines, e)
	s.must(s.p.join(s.ctx, e))
	return e
}

// settle publishes the engine's events and waits until both have them.
func (s *stage) settle(e *engine) {
	behind, err := s.p.settle(s.ctx, e, patience)
	s.must(err)
	if behind != nil {
		s.must(fmt.Errorf("%v: has not applied what was published", behind))
	}
}

// follows is settle as a comparison of its own.
func (s *stage) follows(name string, e *engine, may ...*deviation) {
	behind, err := s.p.settle(s.ctx, e, 3*time.Second)
	s.must(err)
	s.p.follows(name, behind, may)
}

// ask asks both who holds p; kvindexd's answer must be what the engines hold.
func (s *stage) ask(name string, p prompt, may ...*deviation) {
	s.p.ask(s.ctx, post(name, "/query", s.engines[0].query(p), is(200, truth(s.engines, p)), may...))
}

var plays = []scenario{
	{"scores", onStage("scores", 1000, scores)},
	{"handles", onStage("handles", 1100, handles)},
	{"ranks", onStage("ranks", 1200, ranks)},
	{"groups of routing", onStage("routing", 1300, routingGroups)},
	{"tiers", onStage("tiers", 1400, tiers)},
	{"adapters", onStage("adapters", 1500, adapters)},
	{"salts", onStage("salts", 1600, salts)},
	{"images", onStage("images", 1700, images)},
	{"forms", onStage("forms", 1800, forms)},
	{"copies", onStage("copies", 1900, copies)},
	{"cache groups", onStage("cache-groups", 2000, cacheGroups)},
	{"speculation", onStage("speculation", 2100, speculation)},
	{"odd events", onStage("odd", 2200, odd)},
	{"block sizes", onStage("sizes", 2300, blockSizes)},
	{"hashes", onStage("hashes", 2400, hashes)},
	{"joining late", onStage("late", 2500, joiningLate)},
	{"a gap", onStage("gap", 2550, gap)},
	{"restart", onStage("restart", 2600, restart)},
	{"leaving", onStage("leaving", 2700, leaving)},
	{"dump", onStage("dump", 2800, dumps)},
}

func scores(s *stage) {
	a, b := s.joined(), s.joined()
	p := text(1, 32)
	a.store(p, 0, 8, onDevice)
	b.store(p, 0, 3, onDevice)
	s.settle(a)
	s.settle(b)
	s.ask("both hold it, one less", p)
	s.ask("a shorter prompt", prompt{tokens: p.tokens[:17]})
	s.ask("exactly its blocks", prompt{tokens: p.tokens[:16]})
	s.ask("leaves after five blocks", p.then(20, 2))
	s.ask("leaves at once", p.then(0, 2))
	s.ask("leaves inside of the first block", p.then(3, 2))
	s.ask("longer than what is held", prompt{tokens: append(p.tokens[:32:32], 1, 2, 3, 4)})
	b.store(p.then(8, 3), 2, 6, onDevice)
	s.settle(b)
	s.ask("a second branch, first branch asked", p)
	s.ask("a second branch, second branch asked", p.then(8, 3))
	b.store(p, 3, 6, onDevice)
	s.settle(b)
	s.ask("grown", p)
	a.remove(p, 6, 8, onDevice)
	s.settle(a)
	s.ask("its end removed", p)
	a.remove(p, 2, 3, onDevice)
	s.settle(a)
	s.ask("a hole", p)
	a.store(p, 2, 3, onDevice)
	s.settle(a)
	s.ask("the hole healed", p, hole)
	b.remove(p, 0, 1, onDevice)
	s.settle(b)
	s.ask("no beginning", p, hole)
	b.store(p, 0, 1, onDevice)
	s.settle(b)
	s.ask("the beginning again", p, hole)
	a.clear()
	s.settle(a)
	s.ask("cleared", p, hole)
	a.store(p, 0, 2, onDevice)
	s.settle(a)
	s.ask("stored again", p, hole)
}

// Engines whose hashes differ for equal content, as those of vLLM do unless
// they are started with one PYTHONHASHSEED.
func handles(s *stage) {
	a, b := s.joined(), s.joined()
	a.seed, b.seed = "a", "b"
	p := text(1, 24)
	a.store(p, 0, 6, onDevice)
	s.settle(a)
	b.store(p, 0, 3, onDevice)
	s.settle(b)
	s.ask("other hashes, equal content", p)
	b.store(p, 3, 5, onDevice)
	s.settle(b)
	s.ask("other hashes, grown", p, otherHandles)
	b.remove(p, 2, 5, onDevice)
	s.settle(b)
	s.ask("other hashes, removed", p, otherHandles)
}

func ranks(s *stage) {
	a := s.joined()
	a1 := s.rankOf(a, 1)
	p := text(1, 24)
	a.store(p, 0, 6, onDevice)
	a1.store(p, 0, 2, onDevice)
	s.settle(a)
	s.settle(a1)
	s.ask("two ranks", p)
	a.clear()
	s.settle(a)
	s.ask("one cleared", p)
	a1.batchRank = 1
	a1.store(p, 2, 4, onDevice)
	s.settle(a1)
	s.ask("the batch says its rank", p)
	a2 := s.rankOf(a, 2)
	a2.store(p, 0, 3, onHost)
	s.settle(a2)
	s.ask("a rank that joins later, in host memory", p)
}

func routingGroups(s *stage) {
	blue := s.engine()
	blue.group = "blue"
	s.must(s.p.join(s.ctx, blue))
	green := s.engine()
	green.group = "green"
	s.must(s.p.join(s.ctx, green))
	p, q := text(1, 16), text(2, 16)
	blue.store(p, 0, 4, onDevice)
	green.store(q, 0, 3, onDevice)
	s.settle(blue)
	s.settle(green)
	for _, e := range []*engine{blue, green} {
		for _, of := range []prompt{p, q} {
			name := fmt.Sprintf("%s is asked about what %s holds", e.group, map[bool]string{true: "blue", false: "green"}[of.tokens[0] == p.tokens[0]])
			s.p.ask(s.ctx, post(name, "/query", e.query(of), is(200, truth([]*engine{e}, of))))
		}
	}
	s.p.ask(s.ctx, post("no group is named", "/query", with(blue.query(p), "routing_group", gone), refused(404)))
}

func tiers(s *stage) {
	a := s.joined()
	p := text(1, 48)
	a.store(p, 0, 4, onDevice)
	a.store(p, 4, 8, onHost)
	a.store(p, 8, 10, onDisk)
	s.settle(a)
	s.ask("device, host, disk", p)
	a.store(p, 4, 5, onDevice)
	s.settle(a)
	s.ask("a block on two tiers", p)
	a.remove(p, 5, 8, onHost)
	s.settle(a)
	s.ask("host part shortened", p)
	a.store(p, 5, 6, onDisk)
	s.settle(a)
	s.ask("disk in between", p)
	b := s.joined()
	q := text(2, 24)
	b.store(q, 0, 6, onHost)
	s.settle(b)
	s.ask("host memory only", q)
	b.store(q, 0, 2, onDevice)
	s.settle(b)
	s.ask("its beginning on the device too", q)
	b.remove(q, 0, 2, onDevice)
	s.settle(b)
	s.ask("and gone from there", q)
	b.clear()
	s.settle(b)
	s.ask("cleared: all tiers", q)
	c := s.joined()
	r := text(3, 24)
	c.store(r, 0, 2, onDevice)
	c.store(r, 2, 4, onHost)
	c.store(r, 4, 6, onDevice)
	s.settle(c)
	s.ask("device, host, device", r, tierReturn)
	d := s.joined()
	t := text(4, 24)
	d.store(t, 0, 2, onDisk)
	d.store(t, 2, 4, onHost)
	s.settle(d)
	s.ask("disk, then host", t)
}

func adapters(s *stage) {
	a := s.joined()
	p := text(1, 16)
	a.store(p.withLora("sql"), 0, 4, onDevice)
	s.settle(a)
	s.ask("asked with it", p.withLora("sql"))
	s.ask("asked without", p)
	s.ask("another asked", p.withLora("other"))
	a.store(p, 0, 2, onDevice)
	s.settle(a)
	s.ask("both held, asked with it", p.withLora("sql"))
	s.ask("both held, asked without", p)
	a.remove(p.withLora("sql"), 1, 4, onDevice)
	s.settle(a)
	s.ask("removed under it, asked with it", p.withLora("sql"))
	s.ask("removed under it, asked without", p)
}

func salts(s *stage) {
	a := s.joined()
	p := text(1, 16)
	a.store(p.withSalt("tenant-a"), 0, 3, onDevice)
	s.settle(a)
	s.ask("asked with it", p.withSalt("tenant-a"), saltUnread)
	s.ask("asked without", p, saltUnread)
	s.ask("another asked", p.withSalt("tenant-b"))
	a.store(p.withSalt("tenant-a"), 3, 4, onDevice)
	s.settle(a)
	s.ask("grown in a later event", p.withSalt("tenant-a"), saltUnread)
	q := text(2, 16).withLora("sql").withSalt("tenant-a")
	a.store(q, 0, 2, onDevice)
	s.settle(a)
	s.ask("salt and adapter", q, saltUnread)
	s.ask("salt and adapter, asked without the salt", q.withSalt(""), saltUnread)
	// As Dynamo's own workers write it.
	marked := text(3, 16).withSalt("dynamo-cache-salt:tenant-a")
	a.store(marked, 0, 4, onDevice)
	s.settle(a)
	asked := is(200, truth(s.engines, marked))
	s.p.ask(s.ctx, post("with Dynamo's mark", "/query", a.query(marked.withSalt("tenant-a")), asked))
	s.ask("with Dynamo's mark, asked without", marked.withSalt(""))
}

func images(s *stage) {
	a := s.joined()
	img := text(1, 24)
	img.image, img.imageAt, img.imageEnd = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", 6, 10
	a.store(img, 0, 6, onDevice)
	s.settle(a)
	plain := img
	plain.image = ""
	s.ask("asked as text", plain, imageUnread)
}

func forms(s *stage) {
	for i, f := range []struct {
		name string
		form zmqwire.EncodeOptions
		may  []*deviation
	}{
		{"maps", zmqwire.EncodeOptions{Maps: true}, nil},
		{"maps with a three-byte head", zmqwire.EncodeOptions{Maps: true, Map16: true}, nil},
		{"arrays of 12", zmqwire.EncodeOptions{}, nil},
		{"arrays of 8", zmqwire.EncodeOptions{Slots: 8}, nil},
		{"arrays of 6", zmqwire.EncodeOptions{Slots: 6}, nil},
		{"maps, byte hashes", zmqwire.EncodeOptions{Maps: true, BytesHashes: true}, []*deviation{byteHashes}},
		{"arrays, byte hashes", zmqwire.EncodeOptions{BytesHashes: true}, []*deviation{byteHashes}},
	} {
		e := s.joined()
		e.form = f.form
		p := text(10+i, 24)
		at := onDevice
		at.unnamed = f.form.Slots == 6
		e.store(p, 0, 2, at)
		s.must(e.publish())
		e.store(p, 2, 6, at)
		s.settle(e)
		s.ask(f.name, p, f.may...)
		e.remove(p, 4, 6, at)
		s.settle(e)
		s.ask(f.name+", a removal", p, f.may...)
	}
}

func copies(s *stage) {
	a := s.joined()
	p := text(1, 16)
	a.store(p, 0, 4, onDevice)
	a.store(p, 2, 4, onDevice)
	s.settle(a)
	s.ask("two copies", p)
	a.remove(p, 2, 4, onDevice)
	s.settle(a)
	s.ask("one copy removed", p, copyCount)
	a.remove(p, 2, 4, onDevice)
	s.settle(a)
	s.ask("the other too", p)
	a.remove(p, 1, 2, onDevice)
	a.store(p, 1, 2, onDevice)
	s.settle(a)
	s.ask("removed and stored in one batch", p)
	a.store(p, 2, 3, onDevice)
	a.remove(p, 2, 3, onDevice)
	s.settle(a)
	s.ask("stored and removed in one batch", p)
}

func cacheGroups(s *stage) {
	a := s.joined()
	p := text(1, 24)
	a.store(p, 0, 6, inFull)
	a.store(p, 0, 6, inWindow)
	s.settle(a)
	s.ask("full attention and a window", p)
	a.remove(p, 0, 3, inWindow)
	s.settle(a)
	s.ask("the window moves on", p)
	a.remove(p, 4, 6, inFull)
	s.settle(a)
	s.ask("removed from full attention", p)
	b := s.joined()
	q := text(2, 24)
	b.store(q, 0, 6, inFull)
	b.store(q, 0, 4, inFull2)
	s.settle(b)
	s.ask("two groups of full attention, one holds less", q, everyGroup)
	b.store(q, 4, 6, inFull2)
	s.settle(b)
	s.ask("both hold all", q)
	b.remove(q, 1, 2, inFull2)
	s.settle(b)
	s.ask("removed from the second", q)
	c := s.joined()
	r := text(3, 24)
	c.store(r, 0, 4, inFull)
	c.store(r, 0, 6, inMamba)
	s.settle(c)
	s.ask("full attention and mamba", r)
	c.remove(r, 0, 6, inMamba)
	s.settle(c)
	s.ask("removed from mamba", r)
}

func speculation(s *stage) {
	for i, f := range []struct {
		name      string
		lookahead int
		pairs     bool
		may       *deviation
	}{
		{"pairs of tokens (EAGLE)", 1, true, pairsUnread},
		{"a token of lookahead", 1, false, lookahead},
		{"three tokens of lookahead", 3, false, lookahead},
	} {
		e := s.joined()
		e.lookahead, e.pairs = f.lookahead, f.pairs
		p := text(1+i, 24)
		e.store(p, 0, 5, onDevice)
		s.settle(e)
		var may []*deviation
		if f.pairs {
			may = []*deviation{f.may}
		}
		s.ask(f.name, p, may...)
		s.ask(f.name+", the prompt ends with a block", prompt{tokens: p.tokens[:16]}, f.may)
		s.ask(f.name+", leaves right behind a block", p.then(12, 50), f.may)
	}
}

func odd(s *stage) {
	a := s.joined()
	p := text(1, 24)
	a.store(p, 3, 5, onDevice)
	s.settle(a)
	s.ask("children without a parent", p)
	a.store(p, 0, 3, onDevice)
	s.settle(a)
	s.ask("the parent comes later", p, orphans)

	b := s.joined()
	q := text(2, 24)
	b.store(q, 0, 2, onDevice)
	s.event(b, q, 2, 4, func(ev *zmqwire.Event) { ev.Medium = []byte("TAPE") })
	s.settle(b)
	s.ask("a medium nobody knows", q)
	s.event(b, q, 2, 4, func(ev *zmqwire.Event) { ev.Locality = []byte("REMOTE") })
	s.settle(b)
	s.ask("held elsewhere (locality)", q)
	s.event(b, q, 2, 4, func(ev *zmqwire.Event) { ev.Hashes[1] = ev.Hashes[0] })
	s.settle(b)
	s.ask("a hash twice in one event", q)

	c := s.joined()
	r := text(3, 16)
	c.store(r, 0, 2, onDevice)
	s.must(c.publish())
	s.must(c.batch(`[1.5, [{"type": "BlockStored", "block_hashes": "no list", "token_ids": [1], "block_size": 4}, {"type": "BlockMoved"}, 7], null]`))
	c.pub.Publish([]byte("\xc1 no msgpack"))
	c.store(r, 2, 4, onDevice)
	s.settle(c)
	s.ask("after events and a batch that nobody can read", r)
}

// event publishes a store that puts nothing where it counts, changed by odd.
func (s *stage) event(e *engine, p prompt, from, to int, odd func(*zmqwire.Event)) {
	ev := e.stored(p, from, to, onDevice)
	odd(&ev)
	e.events = append(e.events, ev)
}

func blockSizes(s *stage) {
	a := s.joined()
	p := text(1, 32)
	a.blockSize = 8
	a.store(p, 0, 3, onDevice)
	s.must(a.publish())
	a.blockSize = 4
	b := s.joined()
	q := text(2, 16)
	b.store(q, 0, 4, onDevice)
	s.settle(a)
	s.settle(b)
	s.ask("registered with 4, events of 4", q)
	a.blockSize = 8
	s.ask("registered with 4, events of 8", p, eventSize)
}

func hashes(s *stage) {
	a := s.joined()
	p := text(1, 24)
	a.store(p, 0, 5, onDevice)
	l := text(2, 24).withLora("sql")
	a.store(l, 0, 4, onDevice)
	s.settle(a)
	for _, c := range []struct {
		name string
		of   prompt
	}{{"of a prompt", p}, {"of a prompt under an adapter", l}, {"of a prompt that leaves", p.then(8, 3)}} {
		local, rolling := hashesOf(c.of, 4)
		want := is(200, truth(s.engines, c.of))
		body := func(field string, v any) obj { return obj{"model_name": s.model, field: v} }
		s.p.all(s.ctx,
			post("local hashes "+c.name, "/query_by_hash", body("block_hashes", signed(local)), want),
			post("rolling hashes "+c.name, "/query_by_hash", body("seq_hashes", signed(rolling)), want, moreLanguages),
		)
	}
	local, _ := hashesOf(p, 4)
	s.p.ask(s.ctx, post("unsigned hashes", "/query_by_hash", obj{"model_name": s.model, "block_hashes": local}, is(200, truth(s.engines, p)), moreLanguages))
}

// hashesOf are the local and rolling hashes of the public XXH3 scheme.
func hashesOf(p prompt, blockSize uint32) (local, rolling []uint64) {
	ask := normalize.Prompt{Tokens: p.tokens, LoraName: p.lora, CacheSalt: p.salt}
	shape := normalize.Shape{BlockSize: blockSize}
	projection := ask.Project(normalize.View{}, shape)
	var chain normalize.Chain
	ask.Chain(&chain, &projection, normalize.View{}, shape)
	for i := range chain.Locals {
		local, rolling = append(local, uint64(chain.Locals[i])), append(rolling, uint64(chain.Seqs[i]))
	}
	return local, rolling
}

func signed(hs []uint64) []int64 {
	out := make([]int64, len(hs))
	for i, h := range hs {
		out[i] = int64(h)
	}
	return out
}

func joiningLate(s *stage) {
	a := s.engine()
	a.replay = true
	p := text(1, 24)
	for b := range 3 {
		a.store(p, b, b+1, onDevice)
		s.must(a.publish())
	}
	s.must(s.p.join(s.ctx, a))
	a.store(p, 3, 4, onDevice)
	s.settle(a)
	s.ask("with a replay endpoint", p)
	b := s.engine()
	q := text(2, 24)
	b.store(q, 0, 2, onDevice)
	s.must(b.publish())
	s.must(s.p.join(s.ctx, b))
	r := text(3, 24)
	b.store(r, 0, 4, onDevice)
	s.settle(b)
	s.ask("without one, what was published since", r)
	b.forget(q)
	s.ask("without one, what was published before", q)
}

// A batch that a subscriber missed: the publisher keeps it for those who ask.
func gap(s *stage) {
	a := s.engine()
	a.replay = true
	s.must(s.p.join(s.ctx, a))
	p := text(1, 24)
	a.store(p, 0, 2, onDevice)
	s.settle(a)
	a.store(p, 2, 4, onDevice)
	s.must(a.miss())
	a.store(p, 4, 5, onDevice)
	s.settle(a)
	s.ask("a store is missed, with a replay endpoint", p)
	a.remove(p, 3, 5, onDevice)
	s.must(a.miss())
	s.settle(a)
	s.ask("a removal is missed, with a replay endpoint", p)
	b := s.joined()
	q := text(2, 24)
	b.store(q, 0, 2, onDevice)
	s.settle(b)
	b.store(q, 2, 4, onDevice)
	s.must(b.miss())
	b.forget(q)
	b.store(q, 0, 2, onDevice)
	s.settle(b)
	s.ask("a store is missed, without one", q)
}

func restart(s *stage) {
	a := s.joined()
	p, q := text(1, 24), text(2, 24)
	for b := range 5 {
		a.store(p, b, b+1, onDevice)
		s.must(a.publish())
	}
	s.settle(a)
	s.ask("before", p)
	s.must(a.restart())
	s.must(s.p.connected(s.ctx, a))
	a.store(q, 0, 4, onDevice)
	s.follows("the new process is followed", a, newProcess)
	s.ask("what the old process held", p, newProcess)
	s.ask("what the new process holds", q, newProcess)
}

func leaving(s *stage) {
	a := s.joined()
	a1 := s.rankOf(a, 1)
	b := s.joined()
	p := text(1, 16)
	for _, e := range []*engine{a, a1, b} {
		e.store(p, 0, 4, onDevice)
		s.settle(e)
	}
	s.ask("three streams", p)
	un := func(name string, body obj, left ...*engine) {
		s.engines = left
		s.p.ask(s.ctx, post(name, "/unregister", body, is(200, ok)))
		who := post("who is left", "/query", b.query(p), is(200, truth(left, p)))
		s.p.agree(s.ctx, who)
		s.p.ask(s.ctx, who)
	}
	body := obj{"instance_id": json.Number(a.instance), "model_name": s.model, "routing_group": "default"}
	un("one rank leaves", with(body, "dp_rank", 1), a, b)
	un("its instance leaves", body, b)
	s.p.ask(s.ctx, post("it leaves again", "/unregister", body, refused(404)))
	s.must(s.p.join(s.ctx, a))
	a.forget(p)
	s.engines = []*engine{a, b}
	s.ask("it comes back: what it held is forgotten", p)
	a.store(p, 0, 3, onDevice)
	s.settle(a)
	s.ask("it stores again", p)
	a1.pub.Close()
}
