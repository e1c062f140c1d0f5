package normalize

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// features reads a features object written in JSON, with ' for ".
func features(text string) *Features {
	return ParseFeaturesJSON([]byte(strings.ReplaceAll(text, "'", `"`)))
}

var image99 = View{IDs: TokenIDs{Image: 99, HasImage: true}}

func TestReasons(t *testing.T) {
	tokens := []uint32{1, 99, 99, 4, 99, 6, 7, 8}
	f := func(text string, reason Reason, param string, limit int) {
		t.Helper()
		p := Prompt{Tokens: tokens, Features: features(text)}
		pr := p.Project(image99, Shape{BlockSize: 4})
		got := []any{pr.Exact, pr.Reason, pr.Param, pr.Limit}
		if d := cmp.Diff([]any{reason == "", reason, param, limit}, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", text, d)
		}
	}
	// spans wraps the placeholders of two images.
	spans := func(a, b string) string {
		return fmt.Sprintf(`{'mm_hashes':{'image':['x','y']},'mm_placeholders':{'image':[%s,%s]}}`, a, b)
	}
	const first, second = `{'offset':1,'length':2}`, `{'offset':4,'length':1}`
	const inImage = "features.mm_placeholders.image"

	f(spans(first, second), "", "", 8)
	f(`null`, "", "", 1) // an image token that nothing names
	f(`[]`, FeaturesNotObject, "features", 0)
	f(`{'mm_hashes':3}`, MMHashesNotObject, "features.mm_hashes", 0)
	f(`{'mm_hashes':{}}`, MMPlaceholdersNotObject, "features.mm_placeholders", 0)
	f(`{'mm_hashes':{'audio':['x']},'mm_placeholders':{'audio':[{'offset':3,'length':1}]}}`, UnsupportedModality, "features.mm_hashes.audio", 1)
	f(`{'mm_hashes':{},'mm_placeholders':{'audio':[]}}`, UnsupportedModality, "features.mm_placeholders.audio", 0)
	f(`{'mm_hashes':{'<script>':[]},'mm_placeholders':{}}`, UnsupportedModality, `features.mm_hashes."<script>"`, 0)
	f(`{'mm_hashes':{'image':['x']},'mm_placeholders':{}}`, UnpairedModality, inImage, 0)
	f(`{'mm_hashes':{},'mm_placeholders':{'image':[]}}`, UnpairedModality, "features.mm_hashes.image", 0)
	f(`{'mm_hashes':{'image':'x'},'mm_placeholders':{'image':[]}}`, NotAnArray, "features.mm_hashes.image", 0)
	f(`{'mm_hashes':{'image':[]},'mm_placeholders':{'image':{}}}`, NotAnArray, inImage, 0)
	f(`{'mm_hashes':{'image':[]},'mm_placeholders':{'image':[`+first+`]}}`, LengthMismatch, inImage, 0)
	f(`{'mm_hashes':{'image':['x',7]},'mm_placeholders':{'image':[`+first+`,`+second+`]}}`, BadIdentifier, "features.mm_hashes.image[1]", 1)
	f(spans(first, `7`), BadPlaceholder, inImage+"[1]", 0)
	f(spans(first, `{'offset':4.0,'length':1}`), BadPlaceholder, inImage+"[1].offset", 0)
	f(spans(first, `{'offset':true,'length':1}`), BadPlaceholder, inImage+"[1].offset", 0)
	f(spans(first, `{'offset':4}`), BadPlaceholder, inImage+"[1].length", 0)
	f(spans(first, `{'offset':8,'length':1}`), RangeOutOfBounds, inImage+"[1]", 1)
	f(spans(first, `{'offset':9223372036854775807,'length':9223372036854775807}`), RangeOutOfBounds, inImage+"[1]", 1)
	f(spans(first, `{'offset':99999999999999999999,'length':1}`), RangeOutOfBounds, inImage+"[1]", 1)
	f(spans(first, `{'offset':3,'length':2}`), MixedSpanWithoutIsEmbed, inImage+"[1]", 1)
	f(spans(first, `{'offset':4,'length':1,'is_embed':[true,true]}`), BadIsEmbed, inImage+"[1].is_embed", 1)
	f(spans(first, `{'offset':4,'length':1,'is_embed':1}`), BadIsEmbed, inImage+"[1].is_embed", 1)
	f(spans(first, `{'offset':4,'length':1,'is_embed':null}`), "", "", 8)
	f(spans(second, first), OutOfOrder, inImage+"[1]", 1)
	f(spans(first, `{'offset':2,'length':3,'is_embed':[true,false,true]}`), Overlapping, inImage+"[1]", 1)
	f(spans(`{'offset':1,'length':3,'is_embed':[true,true,false]}`, second), AdjacentDifferentIdentifiers, inImage+"[1]", 1)
	f(spans(`{'offset':0,'length':1,'is_embed':[false]}`, `{'offset':3,'length':1,'is_embed':[false]}`), NoEmbedTokens, "features.mm_placeholders", 0)
	f(spans(first, `{'offset':6,'length':1}`), MixedEmbedTokens, inImage+"[1]", 1)
	f(spans(`{'offset':5,'length':1}`, `{'offset':6,'length':1,'is_embed':[false]}`), AdjacentDifferentIdentifiers, inImage+"[1]", 1)
	f(spans(`{'offset':5,'length':1}`, `{'offset':7,'length':1,'is_embed':[false]}`), ImageTokenMismatch, inImage+"[0]", 1)
	f(`{'mm_hashes':{'image':['x']},'mm_placeholders':{'image':[`+first+`]}}`, UndeclaredImageToken, "token_ids[4]", 1)
}

func TestWorkerSideReasons(t *testing.T) {
	const one = `{'mm_hashes':{'image':['x']},'mm_placeholders':{'image':[{'offset':2,'length':2}]}}`
	tower, none := image99, image99
	tower.TowerConnectorLora, none.ExtraKeys = true, None
	f := func(name string, v View, p Prompt, reason Reason, limit int) {
		t.Helper()
		p.Tokens = []uint32{1, 2, 99, 99}
		pr := p.Project(v, Shape{BlockSize: 2})
		if pr.Reason != reason || pr.Limit != limit {
			t.Errorf("%s: %+v, want reason %q and limit %d", name, pr, reason, limit)
		}
	}
	f("exact", image99, Prompt{Features: features(one)}, "", 4)
	f("no id", View{}, Prompt{Features: features(one)}, NoImageTokenID, 2)
	f("only the video's id", View{IDs: TokenIDs{Video: 98, HasVideo: true}}, Prompt{Features: features(one)}, NoImageTokenID, 2)
	f("an adapter in the tower", tower, Prompt{Features: features(one), LoraName: "a"}, TowerConnectorLora, 2)
	f("the base model", tower, Prompt{Features: features(one)}, "", 4)
	f("hidden images", none, Prompt{Features: features(one)}, ExtraKeysHidden, 2)
	f("a hidden salt", none, Prompt{CacheSalt: "s"}, ExtraKeysHidden, 0)
	f("a hidden salt, text only", none, Prompt{Features: features(one), CacheSalt: "s", Mode: TextOnly}, TextOnlyAsked, 0)
	f("text only", image99, Prompt{Features: features(one), Mode: TextOnly}, TextOnlyAsked, 2)
	f("text only of malformed features", image99, Prompt{Features: features(`7`), Mode: TextOnly}, TextOnlyAsked, 0)
	f("text only without images", View{}, Prompt{Mode: TextOnly}, "", 4)
}

func TestReasonKinds(t *testing.T) {
	for _, r := range []Reason{UnsupportedModality, MixedSpanWithoutIsEmbed, NoImageTokenID, TextOnlyAsked, AmbiguousLayout, ""} {
		if r.Malformed() {
			t.Errorf("%q is malformed", r)
		}
	}
	page, err := os.ReadFile("../docs/identity.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range Reasons() {
		if !strings.Contains(string(page), "| `"+string(r)+"` |") {
			t.Errorf("docs/identity.md does not explain %q", r)
		}
	}
	if !BadIsEmbed.Malformed() || !NoImageTokenID.WorkerSide() || BadIsEmbed.WorkerSide() {
		t.Error("reasons are of the wrong kind")
	}
}

// The layout is checked on the windows that are hashed: here the block of two
// tokens is plain, but with lookahead it also has a token of the next image.
func TestLayoutOfTheShape(t *testing.T) {
	p := Prompt{
		Tokens: []uint32{99, 42, 99, 99, 5, 6},
		Features: features(`{'mm_hashes':{'image':['x','y']},'mm_placeholders':{'image':[
			{'offset':0,'length':3,'is_embed':[true,false,true]},{'offset':3,'length':1}]}}`),
	}
	f := func(s Shape, want Reason) {
		t.Helper()
		// Touching images of two identifiers are refused before the layout is
		// looked at; the layout alone is what is asked here.
		ranges, why := p.readRanges(image99)
		if why != (refusal{}) {
			t.Fatal(why)
		}
		if got := p.checkLayout(ranges, image99.IDs, s); got.reason != want {
			t.Errorf("%+v: %+v, want %q", s, got, want)
		}
	}
	f(Shape{BlockSize: 3}, "")
	f(Shape{BlockSize: 3, Window: 1}, AmbiguousLayout)
	f(Shape{BlockSize: 3, Window: Pairs}, AmbiguousLayout)
	f(Shape{BlockSize: 6}, AmbiguousLayout)
}

func TestParseFeaturesNumbers(t *testing.T) {
	f := func(offset any, want Reason) {
		t.Helper()
		p := Prompt{Tokens: []uint32{1, 99}, Features: ParseFeatures(map[string]any{
			"mm_hashes":       map[string]any{"image": []any{"x"}},
			"mm_placeholders": map[string]any{"image": []any{map[string]any{"offset": offset, "length": uint8(1)}}},
		})}
		if pr := p.Project(image99, Shape{BlockSize: 2}); pr.Reason != want {
			t.Errorf("offset %T %v: reason %q, want %q", offset, offset, pr.Reason, want)
		}
	}
	for _, one := range []any{1, int8(1), int16(1), int32(1), int64(1), uint(1), uint8(1), uint16(1), uint32(1), uint64(1), float32(1), 1.0, json.Number("1")} {
		f(one, "")
	}
	for _, bad := range []any{1.5, json.Number("1.0"), json.Number("1e0"), json.Number("-1"), -1e300, "1", true, nil, []any{}} {
		f(bad, BadPlaceholder)
	}
	for _, far := range []any{uint64(1 << 63), 1e300, json.Number("18446744073709551616")} {
		f(far, RangeOutOfBounds)
	}
}

func TestRoutingTokens(t *testing.T) {
	p := Prompt{
		Tokens: []uint32{1, 99, 7, 99, 5},
		Features: features(`{'mm_hashes':{'image':['` + Marker(5) + `']},'mm_placeholders':{'image':[
			{'offset':1,'length':3,'is_embed':[true,false,true]}]}}`),
	}
	pr := p.Project(image99, Shape{BlockSize: 4})
	if got, want := p.RoutingTokens(nil, &pr, 4), []uint32{1, 1000005, 7, 1000005, 5, 0, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("routing tokens %v, want %v", got, want)
	}
	if p.ExpandedLen() != 5 || !slices.Equal(pr.Markers(), []string{Marker(5)}) {
		t.Errorf("%d tokens, markers %v", p.ExpandedLen(), pr.Markers())
	}
	if !slices.Equal(p.Tokens, []uint32{1, 99, 7, 99, 5}) {
		t.Error("the prompt was changed")
	}
}

func TestChainOfNoBlocks(t *testing.T) {
	c := Chain{Locals: []LocalHash{1}, Seqs: []SequenceHash{1}}
	p := Prompt{Tokens: []uint32{1, 2, 3}}
	for _, s := range []Shape{{}, {BlockSize: 4}, {BlockSize: 3, Window: Pairs}, {BlockSize: 2, Window: 2}, {BlockSize: 1<<32 - 1}} {
		pr := p.Project(View{}, s)
		if p.Chain(&c, &pr, View{}, s); len(c.Locals)+len(c.Seqs) > 0 || c.Shape != s {
			t.Errorf("%+v: %+v", s, c)
		}
	}
}

func TestChainFromHashes(t *testing.T) {
	s := Shape{BlockSize: 4}
	var a, b Chain
	ChainFromLocals(&a, s, []LocalHash{1, 2, 3})
	ChainFromSequences(&b, s, a.Seqs)
	if len(a.Seqs) != 3 || a.Seqs[0] != 1 || a.Seqs[2] != NextSequence(NextSequence(1, 2), 3) {
		t.Errorf("from local hashes: %+v", a)
	}
	if !slices.Equal(b.Seqs, a.Seqs) || len(b.Locals) != 0 {
		t.Errorf("from sequence hashes: %+v", b)
	}
}

func TestModes(t *testing.T) {
	for _, m := range []Mode{Auto, Exact, TextOnly} {
		if got, err := ParseMode(m.String()); got != m || err != nil {
			t.Errorf("%v: %v, %v", m, got, err)
		}
	}
	for _, m := range []ExtraKeysMode{Native, BareMM, None} {
		if got, err := ParseExtraKeysMode(m.String()); got != m || err != nil {
			t.Errorf("%v: %v, %v", m, got, err)
		}
	}
	if _, err := ParseMode("all"); err == nil {
		t.Error("no error for an unknown mode")
	}
	if _, err := ParseExtraKeysMode("old"); err == nil {
		t.Error("no error for unknown extra keys")
	}
}
