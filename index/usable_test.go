package index

import (
	"testing"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// Where the hashes are finer than the full-attention blocks, vLLM announces the
// end of a prompt that ends inside a block as a block of the hashes' size. It is
// resident, but no lookup takes it, also while it is all that the stream stored.
func TestUsableOfATail(t *testing.T) {
	stored := func(bs uint32, group int32, hashes []zmqwire.EngineHash, tokens ...uint32) zmqwire.Event {
		ev := zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: hashes, Tokens: tokens, BlockSize: bs, Group: group, Spec: []byte("full_attention")}
		if group == 1 {
			ev.Spec, ev.Window = []byte("sliding_window"), 8
		}
		return ev
	}
	tail, whole := []zmqwire.EngineHash{1}, []zmqwire.EngineHash{12}
	window := stored(4, 1, []zmqwire.EngineHash{11, 12}, 1, 2, 3, 4, 5, 6, 7, 8)
	f := func(name string, device, usable int, events ...zmqwire.Event) {
		t.Run(name, func(t *testing.T) {
			x := New(Options{})
			s := x.NewStream(StreamConfig{BlockSize: 8})
			applyEvents(s, 0, events...)
			rows := make([]Row, 1)
			x.Match(queryTokens(x, 1, 2, 3, 4, 5, 6, 7, 8, 9), []*Stream{s}, rows)
			if r := rows[0]; r.Device != device || r.Usable != usable || r.UsableReason != UsableKnown {
				t.Errorf("device %d, usable %d (%s), want %d and %d", r.Device, r.Usable, r.UsableReason, device, usable)
			}
		})
	}
	f("a tail alone", 4, 0, stored(4, 0, tail, 1, 2, 3, 4), stored(4, 1, tail, 1, 2, 3, 4))
	f("beside another's block", 4, 0, stored(8, 0, []zmqwire.EngineHash{30}, 21, 22, 23, 24, 25, 26, 27, 28),
		stored(4, 0, tail, 1, 2, 3, 4), stored(4, 1, tail, 1, 2, 3, 4))
	f("a whole block", 8, 8, stored(8, 0, whole, 1, 2, 3, 4, 5, 6, 7, 8), window)
}

// Two full-attention groups whose blocks differ in size: a block of one says
// nothing of the other, so it counts for nothing.
func TestUnevenGroups(t *testing.T) {
	stored := func(bs uint32, group int32, e zmqwire.EngineHash) zmqwire.Event {
		return zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: []zmqwire.EngineHash{e}, Tokens: []uint32{1, 2, 3, 4}[:bs],
			BlockSize: bs, Group: group, Spec: []byte("full_attention")}
	}
	x := New(Options{})
	s := x.NewStream(StreamConfig{})
	rows := make([]Row, 1)
	roster := x.NewRoster([]*Stream{s}, nil)
	ask := func(device int, reason UsableReason) {
		t.Helper()
		roster.Match(queryTokens(x, 1, 2, 3, 4, 5), rows)
		if r := rows[0]; r.Device != device || r.Host != device || r.UsableReason != reason {
			t.Errorf("%+v, want device and host %d and reason %q", r, device, reason)
		}
	}
	applyEvents(s, 0, stored(2, 0, 1))
	ask(2, UsableKnown)
	applyEvents(s, 1, stored(4, 1, 2))
	ask(0, UnindexedGroup)
	applyEvents(s, 2, stored(2, 1, 1))
	ask(2, UnindexedGroup)
}

// A full-attention group counts for the device from its first block on, also
// where that is on the host: until it tells of one on the device, nothing is held
// there by all groups.
func TestGroupOnTheHostAlone(t *testing.T) {
	stored := func(group int32, medium string) zmqwire.Event {
		return zmqwire.Event{Kind: zmqwire.BlockStored, Hashes: []zmqwire.EngineHash{1}, Tokens: []uint32{1, 2}, BlockSize: 2,
			Group: group, Spec: []byte("full_attention"), Medium: []byte(medium)}
	}
	x := New(Options{})
	s := x.NewStream(StreamConfig{})
	rows := make([]Row, 1)
	for i, step := range []struct {
		group  int32
		medium string
		device int
	}{{0, "GPU", 2}, {1, "CPU", 0}, {1, "GPU", 2}} {
		applyEvents(s, uint64(i), stored(step.group, step.medium))
		x.Match(queryTokens(x, 1, 2, 3), []*Stream{s}, rows)
		if rows[0].Device != step.device {
			t.Errorf("after group %d on %s: device %d, want %d", step.group, step.medium, rows[0].Device, step.device)
		}
	}
}
