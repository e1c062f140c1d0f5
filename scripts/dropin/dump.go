package main

import (
	"encoding/json"
	"fmt"
	"slices"
)

// dumps compares GET /dump: what each instance holds, told as the stores that
// would bring it about. Events may be cut and ordered in any way, and engine
// hashes are handles, so blocks are compared by their path of local hashes.
func dumps(s *stage) {
	a, b := s.joined(), s.joined()
	p, q := text(1, 24), text(2, 24)
	under := text(3, 16).withLora("sql")
	var want []string
	store := func(e *engine, p prompt, from, to int, at place, tier string) {
		e.store(p, from, to, at)
		local, _ := hashesOf(p, uint32(e.blockSize))
		for n := from; n < to; n++ {
			want = append(want, heldName(e.instance, e.rank, tier, local[:n+1]))
		}
	}
	store(a, p, 0, 4, onDevice, "device")
	store(a, p.then(8, 9), 2, 5, onDevice, "device")
	store(a, p, 4, 5, onHost, "host_pinned")
	store(a, p, 5, 6, onDisk, "disk")
	store(b, q, 0, 3, onDevice, "device")
	store(b, under, 0, 4, onDevice, "device")
	marks := func(e *engine) {
		s.settle(e)
		local, _ := hashesOf(e.last, uint32(e.blockSize))
		want = append(want, heldName(e.instance, e.rank, "device", local))
	}
	marks(a)
	marks(b)
	s.dump("what two instances hold", want)
	a.clear()
	want = slices.DeleteFunc(want, func(h string) bool { return h[:len(a.instance)] == a.instance })
	marks(a)
	s.dump("one of them cleared", want)
}

// dump compares the partition's part of both dumps.
func (s *stage) dump(name string, want []string) {
	r := result{scenario: s.p.scenario, name: name}
	for _, of := range []struct {
		server *server
		into   *answer
	}{{s.p.dynamo, &r.dynamo}, {s.p.ours, &r.ours}} {
		a, err := of.server.ask(s.ctx, "GET", "/dump", nil)
		if err == nil {
			err = s.partition(&a)
		}
		if err != nil {
			r.trouble = append(r.trouble, of.server.name+": "+err.Error())
		}
		*of.into = a
	}
	slices.Sort(want)
	s.p.judge(r, is(200, obj{"block_size": s.engines[0].blockSize, "held": want}), nil)
}

// partition leaves of a dump what it says of the stage's partition.
func (s *stage) partition(a *answer) error {
	whole, _ := a.body.(map[string]any)
	part, ok := whole[s.model+":default"].(map[string]any)
	if !ok {
		return fmt.Errorf("status %d, and nothing of %s:default", a.status, s.model)
	}
	var events []dumpedEvent
	if err := reread(part["events"], &events); err != nil {
		return err
	}
	held, err := pathsOf(events)
	a.body = obj{"block_size": part["block_size"], "held": held}
	return err
}

// dumpedEvent is one of a dump.
type dumpedEvent struct {
	Worker json.Number `json:"worker_id"`
	Tier   string      `json:"storage_tier"`
	Event  struct {
		Rank int `json:"dp_rank"`
		Data struct {
			Stored struct {
				Parent *uint64 `json:"parent_hash"`
				Blocks []struct {
					Block  uint64 `json:"block_hash"`
					Tokens uint64 `json:"tokens_hash"`
				} `json:"blocks"`
			} `json:"stored"`
		} `json:"data"`
	} `json:"event"`
}

// pathsOf names every block by its path. A parent may be told on another tier,
// and after its child.
func pathsOf(events []dumpedEvent) ([]any, error) {
	type block struct {
		worker string
		rank   int
		hash   uint64
	}
	type above struct {
		parent *uint64
		tokens uint64
	}
	known := map[block]above{}
	each := func(f func(e *dumpedEvent, b block, up above)) {
		for i := range events {
			e := &events[i]
			parent := e.Event.Data.Stored.Parent
			for _, bl := range e.Event.Data.Stored.Blocks {
				f(e, block{e.Worker.String(), e.Event.Rank, bl.Block}, above{parent, bl.Tokens})
				parent = &bl.Block
			}
		}
	}
	each(func(_ *dumpedEvent, b block, up above) { known[b] = up })
	var held []string
	var err error
	each(func(e *dumpedEvent, b block, up above) {
		path := []uint64{up.tokens}
		for at := up.parent; at != nil; {
			next, ok := known[block{b.worker, b.rank, *at}]
			if !ok || len(path) > len(known) {
				err = fmt.Errorf("block %d hangs at %d, which is nowhere", b.hash, *at)
				return
			}
			path = append(path, next.tokens)
			at = next.parent
		}
		slices.Reverse(path)
		held = append(held, heldName(b.worker, b.rank, e.Tier, path))
	})
	slices.Sort(held)
	out := make([]any, len(held))
	for i, h := range held {
		out[i] = h
	}
	return out, err
}

func heldName(instance string, rank int, tier string, path []uint64) string {
	return fmt.Sprintf("%s/%d %s %x", instance, rank, tier, path)
}

// reread reads decoded JSON again, into v.
func reread(from, v any) error {
	b, err := json.Marshal(from)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}
