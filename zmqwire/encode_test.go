package zmqwire

import (
	"strings"
	"testing"
)

// TestAppendBatchForms decodes what each form wrote.
func TestAppendBatchForms(t *testing.T) {
	image := ExtraMM("8445ec942de2df24", -3)
	if image.Form != ExtraItem || string(image.Text) != "8445ec942de2df24" {
		t.Errorf("ExtraMM gives %+v", image)
	}
	name := ExtraText("a")
	if name.Form != ExtraString || string(name.Text) != "a" {
		t.Errorf("ExtraText gives %+v", name)
	}
	base := Event{Kind: BlockStored, Group: NoGroup, Hashes: []EngineHash{1, 1 << 63}, Parent: 5, HasParent: true, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2}
	f := func(change func(*Event), fits string) {
		t.Helper()
		ev := base
		change(&ev)
		b := &Batch{Timestamp: 2.5, Rank: 3, Events: []Event{ev, {Kind: AllBlocksCleared, Group: NoGroup}}}
		for form, o := range map[string]EncodeOptions{
			"0.9": {Slots: 6}, "0.15": {Slots: 8, BytesHashes: true}, "0.22": {},
			"0.24": {Maps: true}, "0.33": {Maps: true, Map16: true, BytesHashes: true},
		} {
			payload, err := AppendBatch(nil, b, o)
			if want := strings.Contains(fits, form); (err == nil) != want {
				t.Errorf("%s in the form of %s: %v", show(&ev), form, err)
			}
			if err != nil {
				continue
			}
			got, err := new(Decoder).Decode(payload)
			if err != nil || showBatch(got) != showBatch(b) || got.Timestamp != 2.5 || got.Rank != 3 {
				t.Errorf("%s in the form of %s: %v, %v", show(&ev), form, got, err)
			}
		}
	}
	const all, maps = "0.9 0.15 0.22 0.24 0.33", "0.24 0.33"
	f(func(*Event) {}, all)
	f(func(ev *Event) { ev.HasParent = false; ev.Parent = 0 }, all)
	f(func(ev *Event) { ev.Tokens = []uint32{1, 2, 3, 4, 5}; ev.Pairs = true }, all)
	f(func(ev *Event) { ev.Hashes, ev.Tokens, ev.BlockSize = nil, nil, 0 }, all)
	f(func(ev *Event) { ev.HasLoraID = true }, all)
	f(func(ev *Event) { ev.Medium = []byte("CPU") }, "0.15 0.22 0.24 0.33")
	f(func(ev *Event) { ev.LoraName = []byte("a") }, "0.15 0.22 0.24 0.33")
	f(func(ev *Event) { ev.Extra, ev.ExtraEnd = []ExtraKey{name, image, image}, []int{2, 3} }, "0.22 0.24 0.33")
	f(func(ev *Event) { ev.ExtraEnd = []int{0, 0} }, "0.22 0.24 0.33")
	f(func(ev *Event) { ev.Group = 0 }, "0.22 0.24 0.33")
	f(func(ev *Event) { ev.Spec, ev.Window = []byte("sliding_window"), 128 }, "0.22 0.24 0.33")
	f(func(ev *Event) { ev.Lookahead, ev.LookaheadTokens = 2, []uint32{3, 4, 5, 6} }, maps)
	f(func(ev *Event) { ev.Locality = []byte("LOCAL") }, maps)
	f(func(ev *Event) { ev.CacheSalt = []byte("s") }, maps)
	f(func(ev *Event) { ev.SessionID, ev.Ownership = []byte("s"), []byte("o") }, maps)

	removed := func(ev *Event) { *ev = Event{Kind: BlockRemoved, Group: NoGroup, Hashes: base.Hashes} }
	f(removed, all)
	f(func(ev *Event) { removed(ev); ev.Medium = []byte("CPU") }, "0.15 0.22 0.24 0.33")
	f(func(ev *Event) { removed(ev); ev.Group = 1 }, "0.22 0.24 0.33")
	f(func(ev *Event) { removed(ev); ev.Remaining = []uint32{0, 1} }, maps)

	// What no form can carry.
	f(func(ev *Event) { ev.Kind = 9 }, "")
	f(func(ev *Event) { ev.Lookahead, ev.LookaheadTokens = 2, []uint32{3, 4, 5} }, "")
	f(func(ev *Event) {
		ev.Extra, ev.ExtraEnd = []ExtraKey{{Form: ExtraString, Text: []byte("a")}}, []int{1, 1}
	}, "")
	f(func(ev *Event) { ev.Extra, ev.ExtraEnd = []ExtraKey{{Raw: []byte{1, 2}}}, []int{1, 1} }, "")
	f(func(ev *Event) { ev.Extra, ev.ExtraEnd = []ExtraKey{name}, []int{2, 1} }, "")
	if _, err := AppendBatch(nil, &Batch{}, EncodeOptions{Slots: 7}); err == nil {
		t.Error("7 slots were accepted")
	}
}
