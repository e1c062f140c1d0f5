package normalize

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/xxh3"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// u64 is a number that the vectors write as a decimal string.
type u64 uint64

func (u *u64) UnmarshalJSON(b []byte) error {
	n, err := strconv.ParseUint(strings.Trim(string(b), `"`), 10, 64)
	*u = u64(n)
	return err
}

// vectors are the cases of testdata/vectors.json that are about identities.
type vectors struct {
	XXH3 []struct {
		UTF8       string
		Seed, Hash u64
	}
	Seed []struct {
		Lora *string `json:"lora_name"`
		Salt *string `json:"cache_salt"`
		Seed u64
	}
	Local []struct {
		Tokens []uint32
		Lora   *string `json:"lora_name"`
		Salt   *string `json:"cache_salt"`
		Hash   u64
	}
	Sequence []struct {
		Tokens    []uint32
		BlockSize uint32 `json:"block_size"`
		Eagle     bool
		Lookahead int
		Lora      *string `json:"lora_name"`
		Salt      *string `json:"cache_salt"`
		Local     []u64
		Sequence  []u64
	}
	Identifier []struct {
		Identifier string
		Hash       *u64
	}
	Pad []struct {
		Hash u64
		Pad  uint32
	}
	Marker []struct {
		Hash   u64
		Marker string
	}
	Block []struct {
		Tokens []uint32
		MM     []u64
		Image  *uint32 `json:"image_token_id"`
		Video  *uint32 `json:"video_token_id"`
		Kind   string
		Hashed []uint32 `json:"hashed_tokens"`
		Native []u64
		Local  u64
	}
	Projection []struct {
		Name      string
		Tokens    []uint32 `json:"token_ids"`
		Features  json.RawMessage
		Image     *uint32 `json:"image_token_id"`
		Video     *uint32 `json:"video_token_id"`
		Lora      *string `json:"lora_name"`
		TowerLora bool    `json:"tower_connector_lora"`
		BlockSize uint32  `json:"block_size"`
		Exact     bool
		Reason    string
		Local     []u64
		Markers   []string
	}
	Wire []struct {
		Name  string
		Hex   string
		Local []u64
		With  *struct {
			ID    uint32
			Local []u64
		} `json:"local_with_image_token_id"`
		Without []u64 `json:"local_without"`
	}
}

func readVectors(t testing.TB) *vectors {
	t.Helper()
	raw, err := os.ReadFile("../testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	v := new(vectors)
	if err := json.Unmarshal(raw, v); err != nil {
		t.Fatal(err)
	}
	return v
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func tokenIDs(image, video *uint32) TokenIDs {
	var ids TokenIDs
	if image != nil {
		ids.Image, ids.HasImage = *image, true
	}
	if video != nil {
		ids.Video, ids.HasVideo = *video, true
	}
	return ids
}

func equal[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// hashes converts, so that tables compare as they are written.
func hashes[H ~uint64](hs []H) []u64 {
	out := make([]u64, len(hs))
	for i, h := range hs {
		out[i] = u64(h)
	}
	return out
}

func TestVectors(t *testing.T) {
	v := readVectors(t)
	for i, r := range v.XXH3 {
		t.Run(fmt.Sprintf("xxh3/%d", i), func(t *testing.T) {
			equal(t, "hash", u64(xxh3.HashStringSeed(r.UTF8, uint64(r.Seed))), r.Hash)
		})
	}
	for i, r := range v.Seed {
		t.Run(fmt.Sprintf("seed/%d", i), func(t *testing.T) {
			equal(t, "request's", u64(seedOf(deref(r.Lora))+uint64(SaltSeedOf(deref(r.Salt)))), r.Seed)
			equal(t, "event's", u64(seedOfBytes([]byte(deref(r.Lora)))+uint64(saltSeedOf([]byte(deref(r.Salt))))), r.Seed)
		})
	}
	for i, r := range v.Local {
		t.Run(fmt.Sprintf("local/%d", i), func(t *testing.T) {
			seed := seedOf(deref(r.Lora)) + uint64(SaltSeedOf(deref(r.Salt)))
			equal(t, "in place", u64(hashWords(r.Tokens, seed)), r.Hash)
			equal(t, "portable", u64(hashWordsPortable(r.Tokens, seed)), r.Hash)
		})
	}
	for i, r := range v.Identifier {
		t.Run(fmt.Sprintf("identifier/%d", i), func(t *testing.T) {
			h, ok := ParseIdentifier(r.Identifier)
			equal(t, "identifies", ok, r.Hash != nil)
			if ok && r.Hash != nil {
				equal(t, "hash", u64(h), *r.Hash)
			}
		})
	}
	for i, r := range v.Pad {
		t.Run(fmt.Sprintf("pad/%d", i), func(t *testing.T) { equal(t, "pad", Pad(MMHash(r.Hash)), r.Pad) })
	}
	for i, r := range v.Marker {
		t.Run(fmt.Sprintf("marker/%d", i), func(t *testing.T) {
			equal(t, "marker", Marker(MMHash(r.Hash)), r.Marker)
			h, _ := ParseIdentifier(r.Marker)
			equal(t, "read back", u64(h), r.Hash)
		})
	}
}

func TestVectorsSequence(t *testing.T) {
	for i, r := range readVectors(t).Sequence {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			s := Shape{BlockSize: r.BlockSize, Window: Window(r.Lookahead)}
			if r.Eagle {
				s.Window = Pairs
			}
			p := Prompt{Tokens: r.Tokens, LoraName: deref(r.Lora), CacheSalt: deref(r.Salt)}
			pr := p.Project(View{}, s)
			var c Chain
			p.Chain(&c, &pr, View{}, s)
			equal(t, "local", hashes(c.Locals), r.Local)
			equal(t, "sequence", hashes(c.Seqs), r.Sequence)
			var again Chain
			ChainFromLocals(&again, s, c.Locals)
			equal(t, "from locals", again.Seqs, c.Seqs)
		})
	}
}

func TestVectorsBlock(t *testing.T) {
	for i, r := range readVectors(t).Block {
		t.Run(fmt.Sprintf("%d %s", i, r.Kind), func(t *testing.T) {
			mm := make([]MMHash, len(r.MM))
			for i, h := range r.MM {
				mm[i] = MMHash(h)
			}
			words, _, kind := normalizeBlock(nil, r.Tokens, mm, tokenIDs(r.Image, r.Video))
			want := r.Hashed
			for _, h := range r.Native {
				want = append(want, uint32(h), uint32(h>>32))
			}
			seed := uint64(rootSeed)
			if kind == unidentifiedBlock {
				seed += unidentifiedSeed
			}
			equal(t, "kind", kind.String(), r.Kind)
			equal(t, "words", words, want)
			equal(t, "local", u64(hashWords(words, seed)), r.Local)
		})
	}
}

func TestVectorsProjection(t *testing.T) {
	for _, r := range readVectors(t).Projection {
		t.Run(r.Name, func(t *testing.T) {
			var parsed any
			if err := json.Unmarshal(r.Features, &parsed); err != nil {
				t.Fatal(err)
			}
			v := View{IDs: tokenIDs(r.Image, r.Video), TowerConnectorLora: r.TowerLora}
			s := Shape{BlockSize: r.BlockSize}
			for _, f := range []*Features{ParseFeatures(parsed), ParseFeaturesJSON(r.Features)} {
				p := Prompt{Tokens: r.Tokens, Features: f, LoraName: deref(r.Lora)}
				pr := p.Project(v, s)
				equal(t, "exact", pr.Exact, r.Exact)
				equal(t, "reason", string(pr.Reason), r.Reason)
				if !r.Exact {
					continue
				}
				var c Chain
				p.Chain(&c, &pr, v, s)
				equal(t, "local", hashes(c.Locals), r.Local)
				equal(t, "markers", pr.Markers(), r.Markers)
			}
		})
	}
}

func TestVectorsWire(t *testing.T) {
	for _, r := range readVectors(t).Wire {
		t.Run(r.Name, func(t *testing.T) {
			payload, err := hex.DecodeString(r.Hex)
			if err != nil {
				t.Fatal(err)
			}
			if r.Local != nil {
				equal(t, "local", wireLocals(t, payload, View{}), r.Local)
			}
			if r.With != nil {
				equal(t, "without an id", wireLocals(t, payload, View{}), r.Without)
				id := TokenIDs{Image: r.With.ID, HasImage: true}
				equal(t, "with an id", wireLocals(t, payload, View{IDs: id}), r.With.Local)
			}
		})
	}
}

// wireLocals returns the local hashes of the one store in a payload.
func wireLocals(t *testing.T, payload []byte, v View) []u64 {
	t.Helper()
	var d zmqwire.Decoder
	events, err := d.Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	var b Batch
	NewNormalizer(v).Normalize(&b, events)
	if len(b.Ops) != 1 || b.Ops[0].Form != Placed {
		t.Fatalf("operations: %+v, want one placed store; skipped %v", b.Ops, b.Skips)
	}
	locals := b.Locals(nil, &b.Ops[0], b.Ops[0].Salt)
	for i := range locals {
		c := b.Content(&b.Ops[0], i)
		equal(t, "owned content", c.Local(b.Ops[0].Salt), locals[i])
	}
	return hashes(locals)
}
