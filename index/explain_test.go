package index

import (
	"testing"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestExplain: one history per ending.
func TestExplain(t *testing.T) {
	full := func(ev zmqwire.Event) zmqwire.Event { ev.Spec = []byte("full_attention"); return ev }
	stored := func(hashes []zmqwire.EngineHash, tokens ...uint32) zmqwire.Event {
		return zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: hashes, Tokens: tokens, BlockSize: 1, Group: 0}
	}
	removed := func(e zmqwire.EngineHash) zmqwire.Event {
		return zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: []zmqwire.EngineHash{e}, Group: 0}
	}
	under := func(ev zmqwire.Event, parent zmqwire.EngineHash) zmqwire.Event {
		ev.Parent, ev.HasParent = parent, true
		return ev
	}
	on := func(ev zmqwire.Event, medium string) zmqwire.Event { ev.Medium = []byte(medium); return ev }
	in := func(ev zmqwire.Event, group int32) zmqwire.Event { ev.Group = group; return ev }
	h := func(e ...zmqwire.EngineHash) []zmqwire.EngineHash { return e }
	window := func(ev zmqwire.Event) zmqwire.Event {
		ev.Spec, ev.Window = []byte("sliding_window"), 4
		return ev
	}

	f := func(name string, want Ending, device int, events ...zmqwire.Event) {
		t.Run(name, func(t *testing.T) {
			x := New(Options{})
			s, other := x.NewStream(StreamConfig{}), x.NewStream(StreamConfig{})
			applyEvents(s, 41, events...)
			applyEvents(other, 0, stored(h(1, 2, 3), 1, 2, 3))
			if want == EndOtherShape { // only the other stream stands in the tree
				s.Clear()
			}
			q := queryTokens(x, 1, 2, 3)
			got := x.Explain(s, &q.Views[0])[0]
			if got.Ending != want || got.Device != device {
				t.Errorf("%q after %d blocks, want %q after %d", got.Ending, got.Device, want, device)
			}
			if want != EndComplete && want != EndOtherShape && got.Others == 0 && want != EndOrphan {
				t.Errorf("the other stream holds the block, but Others is 0")
			}
			if want == EndRemoved && (!got.HasSeq || got.RemovedSeq != 41) {
				t.Errorf("removed by batch %d (%v)", got.RemovedSeq, got.HasSeq)
			}
		})
	}
	f("all held", EndComplete, 3, stored(h(1, 2, 3), 1, 2, 3))
	f("never stored", EndNeverStored, 1, stored(h(1), 1))
	f("removed", EndRemoved, 1, stored(h(1, 2, 3), 1, 2, 3), removed(2))
	f("on the host", EndOtherTier, 1, stored(h(1), 1), on(under(stored(h(2), 2), 1), "CPU"))
	f("in one group of two", EndPartOfGroups, 1,
		full(stored(h(1, 2), 1, 2)), in(full(stored(h(1), 1)), 1))
	f("in a window only", EndWindowOnly, 1,
		full(stored(h(1), 1)), in(window(under(stored(h(2), 2), 1)), 1))
	f("no block of the shape", EndOtherShape, 0, stored(h(1), 1))

	t.Run("an orphan", func(t *testing.T) {
		x := New(Options{})
		s := x.NewStream(StreamConfig{})
		applyEvents(s, 0, stored(h(1), 1), under(stored(h(2), 2), 99))
		q := queryTokens(x, 1, 2, 3)
		if got := x.Explain(s, &q.Views[0])[0]; got.Ending != EndOrphan || got.Device != 1 {
			t.Errorf("%+v", got)
		}
	})
}

func applyEvents(s *Stream, seq uint64, events ...zmqwire.Event) Applied {
	b := normalize.Batch{Seq: seq}
	normalize.NewNormalizer(normalize.View{}).Normalize(&b, &zmqwire.Batch{Events: events})
	return s.Apply(&b)
}

// queryTokens asks for tokens in every shape of the set.
func queryTokens(x *Set, tokens ...uint32) *Query {
	p := normalize.Prompt{Tokens: tokens}
	var v QueryView
	for _, shape := range x.Shapes() {
		pr := p.Project(normalize.View{}, shape)
		var c normalize.Chain
		p.Chain(&c, &pr, normalize.View{}, shape)
		v.Chains, v.Limits = append(v.Chains, c), append(v.Limits, pr.Limit)
	}
	return &Query{PromptTokens: len(tokens), Views: []QueryView{v}}
}
