package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// prompt is what an engine serves and a router asks about.
type prompt struct {
	tokens     []uint32
	lora, salt string
	// image, where there is one, stands for tokens [imageAt, imageEnd).
	image             string
	imageAt, imageEnd int
}

// text is a prompt of n tokens that shares its beginning with no other seed's.
func text(seed, n int) prompt {
	p := prompt{tokens: make([]uint32, n)}
	for i := range p.tokens {
		p.tokens[i] = uint32(seed*10_000 + i)
	}
	return p
}

// then is p with its tokens from at on replaced by those of text(seed).
func (p prompt) then(at, seed int) prompt {
	other := text(seed, len(p.tokens))
	p.tokens = append(slices.Clone(p.tokens[:at]), other.tokens[at:]...)
	return p
}

func (p prompt) withLora(name string) prompt { p.lora = name; return p }
func (p prompt) withSalt(salt string) prompt { p.salt = salt; return p }

// content names the first n tokens and everything that separates them from
// equal tokens: the truth needs no hash.
func (p prompt) content(n int) string {
	image := ""
	if p.image != "" && p.imageAt < n {
		image = fmt.Sprint(p.image, p.imageAt)
	}
	return fmt.Sprintf("%q %q %q %d", p.lora, p.salt, image, p.tokens[:n])
}

// tier is where a block is, as an event's medium says.
type tier string

const (
	device   tier = ""
	host     tier = "CPU"
	disk     tier = "DISK"
	external tier = "REMOTE"
)

// place is where blocks are stored, and in which cache group.
type place struct {
	tier    tier
	group   int32
	spec    string
	window  uint32
	unnamed bool // the event does not say the medium
}

var (
	onDevice = place{group: zmqwire.NoGroup}
	onHost   = place{tier: host, group: zmqwire.NoGroup}
	onDisk   = place{tier: disk, group: zmqwire.NoGroup}
	inFull   = place{group: 0, spec: "full_attention"}
	inFull2  = place{group: 1, spec: "full_attention"}
	inWindow = place{group: 2, spec: "sliding_window", window: 8}
	inMamba  = place{group: 3, spec: "mamba"}
)

func (at place) medium() []byte {
	switch {
	case at.unnamed:
		return nil
	case at.tier == device:
		return []byte("GPU")
	}
	return []byte(at.tier)
}

// optional is a string of the wire: absent where it is empty.
func optional(s string) []byte {
	if s == "" {
		return nil
	}
	return []byte(s)
}

// held is one place of one block.
type held struct {
	tier    tier
	group   int32
	content string
}

// engine is a worker's data-parallel rank: it publishes events as vLLM does and
// knows what it holds, which is the truth that answers are held against.
type engine struct {
	model, group string
	instance     string
	rank         int
	blockSize    int
	seed         string // of its engine hashes: equal ones of two engines make equal hashes
	form         zmqwire.EncodeOptions
	batchRank    int32
	replay       bool // its registration names the replay endpoint
	// lookahead is how many tokens behind a block belong to it; pairs says
	// that events have them as bigrams (lookahead 1).
	lookahead int
	pairs     bool

	pub    *zmqwire.Publisher
	next   uint64 // number of the next batch
	events []zmqwire.Event
	copies map[held]int
	full   []int32 // groups that a block must be in to be held
	marks  int
	last   prompt // the newest mark
}

// newEngine publishes on free ports of loopback.
func newEngine(model, instance string, rank, blockSize int) (*engine, error) {
	pub, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{
		Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*",
	})
	if err != nil {
		return nil, err
	}
	return &engine{
		model: model, instance: instance, rank: rank, blockSize: blockSize,
		form: plainForm, batchRank: -1, pub: pub, copies: map[held]int{},
	}, nil
}

// plainForm is one that both read: maps with integer hashes.
var plainForm = zmqwire.EncodeOptions{Maps: true}

// restart is the engine's end and a new process on the same ports: it holds
// nothing and counts its batches from 0 again.
func (e *engine) restart() error {
	cfg := zmqwire.PublisherConfig{Endpoint: e.pub.Addr(), ReplayEndpoint: e.pub.ReplayAddr(), Bind: true}
	if err := e.pub.Close(); err != nil {
		return err
	}
	pub, err := zmqwire.NewPublisher(cfg)
	if err != nil {
		return err
	}
	e.pub, e.events, e.next = pub, nil, 0
	clear(e.copies)
	return nil
}

// handle is the engine hash of block b of p.
func (e *engine) handle(p prompt, b int) zmqwire.EngineHash {
	h := fnv.New64a()
	fmt.Fprint(h, e.seed, e.content(p, b))
	return zmqwire.EngineHash(binary.BigEndian.Uint64(h.Sum(nil)))
}

// content names block b of p and everything before it.
func (e *engine) content(p prompt, b int) string {
	return p.content((b+1)*e.blockSize + e.lookahead)
}

// stored is the event for blocks [from, to) of p.
func (e *engine) stored(p prompt, from, to int, at place) zmqwire.Event {
	bs := e.blockSize
	ev := zmqwire.Event{
		Kind: zmqwire.BlockStored, Tokens: p.tokens[from*bs : to*bs], BlockSize: uint32(bs), Medium: at.medium(),
		LoraName: optional(p.lora), Group: at.group, Spec: optional(at.spec), Window: at.window,
	}
	if from > 0 {
		ev.Parent, ev.HasParent = e.handle(p, from-1), true
	}
	for b := from; b < to; b++ {
		ev.Hashes = append(ev.Hashes, e.handle(p, b))
		ev.Extra = append(ev.Extra, p.extraKeys(b*bs, bs)...)
		ev.ExtraEnd = append(ev.ExtraEnd, len(ev.Extra))
		if e.lookahead > 0 && !e.pairs {
			ev.LookaheadTokens = append(ev.LookaheadTokens, p.tokens[(b+1)*bs:(b+1)*bs+e.lookahead]...)
		}
	}
	if len(ev.Extra) == 0 {
		ev.ExtraEnd = nil
	}
	if e.pairs {
		ev.Pairs, ev.Tokens = true, p.tokens[from*bs:to*bs+1]
	} else {
		ev.Lookahead = e.lookahead
	}
	return ev
}

// extraKeys are those of the block at token from, in vLLM's order.
func (p prompt) extraKeys(from, bs int) (keys []zmqwire.ExtraKey) {
	if p.lora != "" {
		keys = append(keys, zmqwire.ExtraText(p.lora))
	}
	if p.image != "" && p.imageAt < from+bs && from < p.imageEnd {
		keys = append(keys, zmqwire.ExtraMM(p.image, int64(p.imageAt-from)))
	}
	if p.salt != "" && from == 0 {
		keys = append(keys, zmqwire.ExtraText(p.salt))
	}
	return keys
}

// store puts blocks [from, to) of p there: one more copy of each.
func (e *engine) store(p prompt, from, to int, at place) {
	e.events = append(e.events, e.stored(p, from, to, at))
	if isFull := at.spec == "" || at.spec == "full_attention"; isFull && !slices.Contains(e.full, at.group) {
		e.full = append(e.full, at.group)
	}
	for b := from; b < to; b++ {
		e.copies[held{at.tier, at.group, e.content(p, b)}]++
	}
}

// remove takes one copy of each of the blocks [from, to) away.
func (e *engine) remove(p prompt, from, to int, at place) {
	ev := zmqwire.Event{Kind: zmqwire.BlockRemoved, Medium: at.medium(), Group: at.group}
	for b := from; b < to; b++ {
		ev.Hashes = append(ev.Hashes, e.handle(p, b))
		h := held{at.tier, at.group, e.content(p, b)}
		if e.copies[h]--; e.copies[h] <= 0 {
			delete(e.copies, h)
		}
	}
	e.events = append(e.events, ev)
}

// forget takes what was stored of p out of the truth: nobody who asks now can
// know of it.
func (e *engine) forget(p prompt) {
	for b := 0; (b+1)*e.blockSize <= len(p.tokens); b++ {
		delete(e.copies, held{device, zmqwire.NoGroup, e.content(p, b)})
	}
}

// clear drops everything.
func (e *engine) clear() {
	e.events = append(e.events, zmqwire.Event{Kind: zmqwire.AllBlocksCleared, Group: zmqwire.NoGroup})
	clear(e.copies)
}

// publish sends the events since the last time as one batch.
func (e *engine) publish() error {
	payload, err := e.take()
	if err == nil {
		e.next = e.pub.Publish(payload) + 1
	}
	return err
}

// miss is publish of a batch that reaches nobody: it can only be replayed.
func (e *engine) miss() error {
	payload, err := e.take()
	if err == nil {
		e.pub.Hold(e.next, payload)
		e.next++
	}
	return err
}

// take is the events since the last time as one batch.
func (e *engine) take() ([]byte, error) {
	payload, err := zmqwire.AppendBatch(nil, &zmqwire.Batch{
		Timestamp: float64(time.Now().UnixNano()) / 1e9, Rank: e.batchRank, Events: e.events,
	}, e.form)
	e.events = e.events[:0]
	return payload, err
}

// batch publishes a batch that is written as JSON, whatever it says.
func (e *engine) batch(text string) error {
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		return err
	}
	payload, err := msgpack.Marshal(v)
	if err != nil {
		return err
	}
	e.pub.Publish(payload)
	return nil
}

// match is the truth: how many tokens of p are held, on the device, over host
// memory and over disk.
func (e *engine) match(p prompt) (onDevice, onHost, onDisk int) {
	n := 0
	run := func(tiers ...tier) int {
		for (n+1)*e.blockSize+e.lookahead <= len(p.tokens) && e.has(e.content(p, n), tiers) {
			n++
		}
		return n * e.blockSize
	}
	return run(device), run(device, host), run(disk, external)
}

func (e *engine) has(content string, tiers []tier) bool {
	return slices.ContainsFunc(tiers, func(t tier) bool {
		for _, g := range e.full {
			if e.copies[held{t, g, content}] == 0 {
				return false
			}
		}
		return len(e.full) > 0
	})
}

// truth is the body of the answer to a query about p.
func truth(engines []*engine, p prompt) any {
	scores, instances := map[string]map[string]int{}, map[string]any{}
	type ranks = map[string]map[string]int
	byInstance := map[string]ranks{}
	for _, e := range engines {
		gpu, cpu, ssd := e.match(p)
		if ssd == 0 {
			continue
		}
		if byInstance[e.instance] == nil {
			byInstance[e.instance] = ranks{}
		}
		byInstance[e.instance][strconv.Itoa(e.rank)] = map[string]int{"gpu": gpu, "cpu": cpu, "disk": ssd}
	}
	for instance, of := range byInstance {
		dp, best := map[string]int{}, map[string]int{}
		for rank, m := range of {
			dp[rank] = m["gpu"]
			if m["gpu"] > 0 {
				if scores[instance] == nil {
					scores[instance] = map[string]int{}
				}
				scores[instance][rank] = m["gpu"]
			}
			for t, n := range m {
				best[t] = max(best[t], n)
			}
		}
		instances[instance] = map[string]any{
			"longest_matched": best["disk"], "gpu": best["gpu"], "cpu": best["cpu"], "disk": best["disk"],
			"dp": dp, "rank_matches": of,
		}
	}
	return map[string]any{"scores": scores, "frequencies": []int{}, "instances": instances}
}

// A mark is a prompt that nothing else asks about: who knows the newest one has
// applied everything that was published before it.
func (e *engine) mark() prompt {
	e.marks++
	p := text(0, e.blockSize)
	for i, b := range []byte(fmt.Sprint(e.instance, "/", e.rank, "#", e.marks)) {
		p.tokens[i%len(p.tokens)] = p.tokens[i%len(p.tokens)]*31 + uint32(b)
	}
	return p
}

// settle publishes what waits, then a mark, and waits until both have it. It
// returns the names of those that have not, in time.
func (p *pair) settle(ctx context.Context, e *engine, patience time.Duration) (behind []string, err error) {
	if len(e.events) > 0 {
		if err := e.publish(); err != nil {
			return nil, err
		}
	}
	mark := e.mark()
	e.last = mark
	plain := *e
	plain.form, plain.lookahead, plain.pairs = plainForm, 0, false
	for _, g := range e.groups() {
		plain.store(mark, 0, 1, g)
	}
	if err := plain.publish(); err != nil {
		return nil, err
	}
	e.full, e.next = plain.full, plain.next
	for _, s := range []*server{p.dynamo, p.ours} {
		if !await(ctx, patience, func() bool { return s.knows(ctx, e, mark) }) {
			behind = append(behind, s.name)
		}
	}
	return behind, nil
}

// groups are the places that make a block held.
func (e *engine) groups() (out []place) {
	for _, g := range e.full {
		at := place{group: g}
		if g != zmqwire.NoGroup {
			at.spec = "full_attention"
		}
		out = append(out, at)
	}
	if out == nil {
		return []place{onDevice}
	}
	return out
}

func (s *server) knows(ctx context.Context, e *engine, mark prompt) bool {
	a, err := s.ask(ctx, "POST", "/query", e.query(mark))
	if err != nil || a.status != 200 {
		return false
	}
	body, _ := a.body.(map[string]any)
	scores, _ := body["scores"].(map[string]any)
	ranks, _ := scores[e.instance].(map[string]any)
	return ranks[strconv.Itoa(e.rank)] != nil
}

// agree gives Dynamo, which says that an instance has left before its blocks
// are gone, the time for that. kvindexd needs none.
func (p *pair) agree(ctx context.Context, q request) {
	ours, err := p.ours.ask(ctx, q.method, q.path, q.body)
	if err == nil {
		err = q.want(ours)
	}
	if err != nil {
		p.fail(q.name+", at once", err)
		return
	}
	await(ctx, 3*time.Second, func() bool {
		theirs, err := p.dynamo.ask(ctx, q.method, q.path, q.body)
		return err == nil && len(differences(theirs, ours)) == 0
	})
}

// await polls until ok says so.
func await(ctx context.Context, patience time.Duration, ok func() bool) bool {
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			return ok()
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// obj is a JSON object.
type obj = map[string]any

// query is the body of POST /query about p.
func (e *engine) query(p prompt) obj {
	q := obj{"model_name": e.model, "token_ids": p.tokens}
	if e.group != "" {
		q["routing_group"] = e.group
	}
	if p.lora != "" {
		q["lora_name"] = p.lora
	}
	if p.salt != "" {
		q["cache_salt"] = p.salt
	}
	return q
}

// join registers the engine with both and waits until both are connected.
func (p *pair) join(ctx context.Context, e *engine, may ...*deviation) error {
	p.ask(ctx, post(fmt.Sprintf("register %s/%d", e.instance, e.rank), "/register", e.registration(), is(201, ok), may...))
	return p.connected(ctx, e)
}

// connected waits until both are subscribed to the engine.
func (p *pair) connected(ctx context.Context, e *engine) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return e.pub.WaitSubscribers(ctx, 2)
}

// registration is the body of POST /register for the engine.
func (e *engine) registration() obj {
	id, err := strconv.ParseUint(e.instance, 10, 64)
	r := obj{
		"instance_id": any(id), "endpoint": e.pub.Addr(), "model_name": e.model,
		"block_size": e.blockSize, "dp_rank": e.rank,
	}
	if err != nil {
		r["instance_id"] = e.instance
	}
	if e.group != "" {
		r["routing_group"] = e.group
	}
	if e.replay {
		r["replay_endpoint"] = e.pub.ReplayAddr()
	}
	return r
}
