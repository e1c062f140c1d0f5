package api

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// explained is a fleet of streams, each with its own story, and what
// /v1/explain says of them.
type explained struct {
	t    *testing.T
	off  *fleet.Offline
	seqs map[string]uint64
}

const explainedImage = 9999

func newExplained(t *testing.T, workers ...string) *explained {
	t.Helper()
	id := uint32(explainedImage)
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{}}
	for _, w := range workers {
		s := zmqwire.CaptureStream{Worker: w, Model: "m", ImageTokenID: &id}
		if strings.HasPrefix(w, "blind") {
			s.ImageTokenID = nil
		}
		h.Streams[w] = s
	}
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet(), Models: []fleet.ModelSpec{{Name: "m", Loras: []fleet.LoraSpec{{Name: "sql"}}}}})
	if err != nil {
		t.Fatal(err)
	}
	return &explained{t, off, map[string]uint64{}}
}

func (x *explained) feed(stream string, es ...zmqwire.Event) {
	x.t.Helper()
	feedEvents(x.t, x.off, stream, x.seqs[stream], es...)
	x.seqs[stream]++
}

// stored is the store of blocks from..to of the prompt, whose parent is the
// block before; edit changes it.
func stored(prompt []uint32, from, to int, edit func(*zmqwire.Event)) zmqwire.Event {
	e := storeOf(prompt[from*16:to*16], 16, uint64(from))
	if from > 0 {
		e.HasParent, e.Parent = true, zmqwire.EngineHash(from)
	}
	if edit != nil {
		edit(&e)
	}
	return e
}

// seen gives block 2 of the event an image.
func seen(identifier string) func(*zmqwire.Event) {
	return func(e *zmqwire.Event) {
		raw, _ := msgpack.Marshal([]any{identifier, 0})
		e.Extra = []zmqwire.ExtraKey{{Form: zmqwire.ExtraItem, Raw: raw, Text: []byte(identifier)}}
		for i := range e.Hashes {
			e.ExtraEnd = append(e.ExtraEnd, min(max(i-1, 0), 1))
		}
	}
}

// ask explains the body and returns each worker's account, held against the
// schema of the answer.
func (x *explained) ask(body []byte) map[string]*ExplainedMatch {
	x.t.Helper()
	_, h := newTestServer(x.t, x.off.Fleet, nil)
	newAsker(x.t, h.URL).want("POST", "/v1/explain", string(body), 200, "")
	var r MatchRequest
	if err := decodeMatch(&scanner{b: body}, &r); err != nil {
		x.t.Fatal(err)
	}
	a, err := NewService(x.off.Fleet).Explain(x.t.Context(), &r)
	if err != nil {
		x.t.Fatal(err)
	}
	out := map[string]*ExplainedMatch{}
	for i := range a.Streams {
		out[a.Streams[i].Worker] = &a.Streams[i]
	}
	return out
}

// ends holds a stream's ends against "tier code token", and the device's
// sentence against a part of it.
func (x *explained) ends(m *ExplainedMatch, sentence string, want ...string) {
	x.t.Helper()
	var got []string
	for _, e := range m.Ended {
		got = append(got, e.Tier+" "+e.Code+" "+itoa(e.Token))
	}
	if !slices.Equal(got, want) || !strings.Contains(m.Ended[0].Text, sentence) {
		x.t.Errorf("%s: %q (%s), want %q (%s)", m.Worker, got, m.Ended[0].Text, want, sentence)
	}
}

func TestExplainText(t *testing.T) {
	p := promptOf(3, 90) // five whole blocks
	x := newExplained(t, "whole", "short", "removed", "host", "adapter", "orphan", "wide", "empty", "odd")
	x.feed("whole", stored(p, 0, 5, nil))
	x.feed("short", stored(p, 0, 1, nil))
	x.feed("removed", stored(p, 0, 5, nil))
	x.feed("removed", zmqwire.Event{Kind: zmqwire.BlockRemoved, Hashes: []zmqwire.EngineHash{4}, Medium: []byte("GPU"), Group: zmqwire.NoGroup})
	x.feed("host", stored(p, 0, 1, nil), stored(p, 1, 3, func(e *zmqwire.Event) { e.Medium = []byte("CPU") }))
	x.feed("adapter", stored(p, 0, 5, func(e *zmqwire.Event) { e.LoraName = []byte("sql") }))
	x.feed("orphan", stored(p, 0, 1, nil), stored(p, 2, 3, nil), stored(p, 1, 2, func(e *zmqwire.Event) { e.Parent = 777 }))
	x.feed("wide", func() zmqwire.Event { e := storeOf(p[:64], 32, 0); return e }())
	x.feed("odd", stored(p, 0, 1, nil), stored(p, 1, 2, func(e *zmqwire.Event) { e.Medium = []byte("TAPE") }))

	a := x.ask(jsonBody(p, ""))
	same := func(code string, token int) []string {
		s := " " + code + " " + itoa(token)
		return []string{"device" + s, "host" + s, "disk" + s}
	}
	x.ends(a["whole"], "every whole block", same("complete", 80)...)
	x.ends(a["short"], "block 1 (tokens 16 to 31) was never stored by this stream, or removed so long ago that it is forgotten; 2 other streams", same("never_stored", 16)...)
	x.ends(a["removed"], "in batch 1; 1 other stream of the worker set holds it", same("removed", 48)...)
	x.ends(a["host"], "a lower tier holds it", "device other_tier 16", "host not_held 48", "disk not_held 48")
	x.ends(a["adapter"], `80 tokens of the same prompt are held under the adapter "sql"`, same("other_lora", 0)...)
	x.ends(a["orphan"], "under a parent that no event announced", same("parent_unknown", 16)...)
	x.ends(a["wide"], "every whole block", same("complete", 64)...)
	x.ends(a["empty"], "no block yet", same("nothing_stored", 0)...)
	x.ends(a["odd"], "never stored", same("never_stored", 16)...)
	if n := a["odd"].Notes; len(n) == 0 || n[len(n)-1].Code != "unknown_medium" || !strings.Contains(n[len(n)-1].Text, `"TAPE"`) {
		t.Errorf("notes: %+v", n)
	}
	if e := a["removed"].Ended[0]; e.Seq == nil || *e.Seq != 1 || e.Others != 1 {
		t.Errorf("removed: %+v", e)
	}
	if u := a["whole"].Usable; u == nil || *u != 80 {
		t.Errorf("usable: %v", u)
	}

	a = x.ask(jsonBody(p, `,"cache_salt":"s"`))
	x.ends(a["whole"], "80 tokens of the same prompt are held without a salt", same("other_salt", 0)...)
	a = x.ask(jsonBody(p, `,"lora_name":"sql"`))
	x.ends(a["adapter"], "", same("complete", 80)...)
	x.ends(a["whole"], "held under the base model", same("other_lora", 0)...)
	a = x.ask([]byte(`{"sequence_hashes":[1],"hash_block_size":16}`))
	x.ends(a["whole"], "never stored", same("never_stored", 0)...)
	x.ends(a["wide"], "have 32", same("other_block_size", 0)...)
}

func TestExplainImages(t *testing.T) {
	p := promptOf(4, 90)
	for i := range 16 {
		p[32+i] = explainedImage
	}
	cat, dog := strings.Repeat("ca", 32), strings.Repeat("d0", 32)
	x := newExplained(t, "cat", "dog", "blind")
	x.feed("cat", stored(p, 0, 5, seen(cat)))
	x.feed("dog", stored(p, 0, 5, seen(dog)))
	x.feed("blind", stored(p, 0, 5, seen(cat)))
	features := `,"features":{"mm_hashes":{"image":["` + cat + `"]},"mm_placeholders":{"image":[{"offset":32,"length":16}]}}`
	a := x.ask(jsonBody(p, features))
	same := func(code string, token int) []string {
		s := " " + code + " " + itoa(token)
		return []string{"device" + s, "host" + s, "disk" + s}
	}
	x.ends(a["cat"], "", same("complete", 80)...)
	x.ends(a["dog"], "block 2 (tokens 32 to 47) lies in the placeholder of features.mm_hashes.image[0] (tokens 32 to 47)", same("other_image", 32)...)
	x.ends(a["blind"], "give image_token_id", same("no_image_token_id", 32)...)
	if got := a["dog"].Ended[0].Param; got != "features.mm_hashes.image[0]" {
		t.Errorf("param %q", got)
	}
	a = x.ask(jsonBody(p, ""))
	x.ends(a["cat"], "declare no image there", same("image_without_identity", 32)...)
	a = x.ask(jsonBody(p, `,"mm":"text_only"`+features))
	x.ends(a["cat"], "asks for text only", same("text_only", 32)...)
}

// Every code that an explanation can carry is documented.
func TestEveryCodeIsDocumented(t *testing.T) {
	_, section, _ := strings.Cut(apiDoc(t), "\n## Why: ")
	section, _, _ = strings.Cut(section, "\n## ")
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("`([a-z0-9_]+)`").FindAllStringSubmatch(section, -1) {
		documented[m[1]] = true
	}
	codes := []string{"other_salt", "other_lora", "other_image", "other_block_size", "image_without_identity", "not_held", "nothing_stored",
		"orphans", "content_conflicts", "last_error", string(index.UnindexedGroup), string(index.UnplacedWindow)}
	for _, e := range []index.Ending{index.EndComplete, index.EndNeverStored, index.EndRemoved, index.EndOtherTier, index.EndPartOfGroups, index.EndWindowOnly, index.EndOrphan, index.EndTrimmed} {
		codes = append(codes, string(e))
	}
	for r := range normalize.SkipReason(normalize.NumSkipReasons) {
		codes = append(codes, r.String())
		if skipTexts[r] == "" {
			t.Errorf("%s has no sentence", r)
		}
	}
	for _, c := range codes {
		if !documented[c] {
			t.Errorf("%s is not documented", c)
		}
	}
}
