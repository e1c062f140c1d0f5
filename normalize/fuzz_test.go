package normalize

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// FuzzParseFeaturesJSON holds the streaming reader against the plain one.
func FuzzParseFeaturesJSON(f *testing.F) {
	for _, r := range readVectors(f).Projection {
		f.Add([]byte(r.Features))
	}
	for _, s := range []string{
		`{"mm_hashes":{"image":["a"]},"mm_hashes":null}`,
		`{"mm_hashes":{"image":["a"],"image":["b","c"]},"mm_placeholders":{"image":[{"offset":1,"offset":null,"length":2}]}}`,
		`{"mm_hashes":{"image":["\u00fc"]},"mm_placeholders":{"image":[{"is_embed":[true , false],"is_embed":[[]],"offset":-0,"length":1e1}]}}`,
		`{"kwargs_data":{"image":["` + string(bytes.Repeat([]byte("x"), 99)) + `"]},"mm_hashes":{}} x`,
		`{"mm_hashes":`, `nul`, ``,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		got := ParseFeaturesJSON(raw)
		var any any
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		if d.Decode(&any) != nil || !validJSON(raw) {
			if got == nil || got.defect.reason != FeaturesNotObject {
				t.Fatalf("no JSON, and yet %+v", got)
			}
			return
		}
		if want := ParseFeatures(any); !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, want %+v", got, want)
		}
	})
}

// validJSON says whether raw is one JSON value in valid UTF-8; encoding/json
// replaces what is not.
func validJSON(raw []byte) bool {
	v := jsontext.Value(raw)
	return v.IsValid(jsontext.AllowDuplicateNames(true))
}

// FuzzNormalize feeds whatever the decoder lets through.
func FuzzNormalize(f *testing.F) {
	for i, r := range readVectors(f).Wire {
		payload, err := hex.DecodeString(r.Hex)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(payload, uint8(i))
	}
	f.Fuzz(func(t *testing.T, payload []byte, view uint8) {
		var d zmqwire.Decoder
		events, err := d.Decode(payload)
		if err != nil {
			return
		}
		v := View{
			IDs:       TokenIDs{Image: 151655, Video: 2, HasImage: view&1 != 0, HasVideo: view&2 != 0},
			ExtraKeys: ExtraKeysMode(view >> 2 % 3),
		}
		var b Batch
		n := NewNormalizer(v)
		n.Normalize(&b, events)
		checkBatch(t, &b, events)
		first := len(b.Ops)
		n.Normalize(&b, events)
		checkBatch(t, &b, events)
		if len(b.Ops) != first {
			t.Fatalf("%d operations, then %d", first, len(b.Ops))
		}
	})
}

// checkBatch checks what an index relies on.
func checkBatch(t *testing.T, b *Batch, events *zmqwire.Batch) {
	if len(b.Ops) > len(events.Events) || b.Skips.Total() > uint64(len(events.Events)) {
		t.Fatalf("%d operations and %v skipped of %d events", len(b.Ops), b.Skips, len(events.Events))
	}
	for i := range b.Ops {
		op := &b.Ops[i]
		if op.Tier >= NoTier || op.Remaining != nil && len(op.Remaining) != len(op.Hashes) {
			t.Fatalf("operation %+v", op)
		}
		locals := b.Locals(nil, op, 7)
		if op.Kind != OpStore || op.Form != Placed {
			if len(locals) != 0 || b.Content(op, 0).Bytes() != 0 {
				t.Fatalf("content of %+v", op)
			}
			continue
		}
		if len(locals) != len(op.Hashes) || op.Shape.BlockSize == 0 && len(locals) > 0 {
			t.Fatalf("%d local hashes of %+v", len(locals), op)
		}
		for j, l := range locals {
			if c := b.Content(op, j); c.Local(7) != l {
				t.Fatalf("block %d of %+v: content %x, local hash %x", j, op, c.Local(7), l)
			}
		}
	}
}

// FuzzProject asks for anything of any prompt.
func FuzzProject(f *testing.F) {
	for _, r := range readVectors(f).Projection {
		f.Add([]byte(r.Features), []byte{1, 99, 99, 3}, uint8(3), int8(0), uint8(1))
	}
	f.Fuzz(func(t *testing.T, raw, text []byte, blockSize uint8, window int8, view uint8) {
		tokens := make([]uint32, len(text))
		for i, b := range text {
			tokens[i] = uint32(b)
		}
		v := View{
			IDs:       TokenIDs{Image: 99, Video: 12, HasImage: view&1 != 0, HasVideo: view&2 != 0},
			ExtraKeys: ExtraKeysMode(view >> 2 % 3),
		}
		s := Shape{BlockSize: uint32(blockSize), Window: max(Window(window), Pairs)}
		p := Prompt{Tokens: tokens, Features: ParseFeaturesJSON(raw), Mode: Mode(view >> 4 % 3)}
		pr := p.Project(v, s)
		if pr.Limit < 0 || pr.Limit > len(tokens) || pr.Exact != (pr.Reason == "") || !pr.Exact && len(pr.Ranges) > 0 {
			t.Fatalf("projection %+v", pr)
		}
		var c Chain
		p.Chain(&c, &pr, v, s)
		if len(c.Locals) != len(c.Seqs) || len(c.Locals)*int(s.BlockSize) > pr.Limit {
			t.Fatalf("chain %+v of %+v", c, pr)
		}
		p.RoutingTokens(nil, &pr, s.BlockSize)
	})
}

// FuzzModelConfig reads any config.json.
func FuzzModelConfig(f *testing.F) {
	f.Add([]byte(`{"image_token_id": 151655, "text_config": {"video_token_id": 151656}}`))
	f.Add([]byte(`{"thinker_config": {"image_token_index": -1}}`))
	f.Add([]byte(`{"text_config": []}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := parseModelConfig("config.json", raw)
		if err != nil && !errors.Is(err, ErrTokenIDs) {
			t.Fatalf("error %v", err)
		}
		if err == nil && ((c.image != nil) != (c.imageField != "") || (c.video != nil) != (c.videoField != "")) {
			t.Fatalf("config %+v", c)
		}
	})
}
