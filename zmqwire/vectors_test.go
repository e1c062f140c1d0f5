package zmqwire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// wireVector is a payload that vLLM's own encoder wrote, with what it says.
type wireVector struct {
	Name      string        `json:"name"`
	Hex       string        `json:"hex"`
	Rank      *int32        `json:"data_parallel_rank"`
	Events    []vectorEvent `json:"events"`
	Malformed int           `json:"malformed"`
	Unknown   int           `json:"unknown"`
}

type vectorEvent struct {
	Type      string   `json:"type"`
	Hashes    []string `json:"block_hashes"`
	Parent    *string  `json:"parent"`
	TokenIDs  []uint32 `json:"token_ids"`
	BlockSize uint32   `json:"block_size"`
	Medium    string   `json:"medium"`
	LoraName  string   `json:"lora_name"`
	Group     *int32   `json:"group_idx"`
	Kind      string   `json:"kind"`
	Eagle     bool     `json:"eagle"`
	Lookahead int      `json:"lookahead"`
	CacheSalt string   `json:"cache_salt"` // in extra_keys: identity finds it there
}

func readVectors(t testing.TB) []wireVector {
	t.Helper()
	b, err := os.ReadFile("../testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		Wire []wireVector `json:"wire"`
	}
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	if len(all.Wire) == 0 {
		t.Fatal("no wire vectors")
	}
	return all.Wire
}

func (v *wireVector) payload(t testing.TB) []byte {
	t.Helper()
	b, err := hex.DecodeString(v.Hex)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// asVector reduces an event to what the vectors tell of it.
func asVector(ev *Event) vectorEvent {
	if ev.Kind == AllBlocksCleared {
		return vectorEvent{Type: ev.Kind.String()}
	}
	v := vectorEvent{
		Type: ev.Kind.String(), TokenIDs: ev.Tokens, BlockSize: ev.BlockSize, Medium: string(ev.Medium),
		LoraName: string(ev.LoraName), Kind: string(ev.Spec), Eagle: ev.Pairs, Lookahead: ev.Lookahead,
	}
	for _, h := range ev.Hashes {
		v.Hashes = append(v.Hashes, strconv.FormatUint(uint64(h), 10))
	}
	if ev.HasParent {
		parent := strconv.FormatUint(uint64(ev.Parent), 10)
		v.Parent = &parent
	}
	if ev.Group != NoGroup {
		v.Group = &ev.Group
	}
	return v
}

func TestVectors(t *testing.T) {
	for _, v := range readVectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			var d Decoder
			b, err := d.Decode(v.payload(t))
			if err != nil {
				t.Fatal(err)
			}
			if b.Timestamp != 1.5 {
				t.Errorf("timestamp %v, want 1.5", b.Timestamp)
			}
			rank := int32(-1)
			if v.Rank != nil {
				rank = *v.Rank
			}
			if b.Rank != rank {
				t.Errorf("rank %d, want %d", b.Rank, rank)
			}
			if b.Malformed != v.Malformed || b.Unknown != v.Unknown || b.Odd != 0 {
				t.Errorf("malformed %d, unknown %d, odd %d, want %d, %d, 0", b.Malformed, b.Unknown, b.Odd, v.Malformed, v.Unknown)
			}
			got := []vectorEvent{}
			for i := range b.Events {
				ev := asVector(&b.Events[i])
				if i < len(v.Events) && v.Events[i].Group == nil {
					ev.Group, ev.Kind = nil, "" // this row does not tell them
				}
				got = append(got, ev)
			}
			for i := range v.Events {
				v.Events[i].CacheSalt = ""
			}
			if diff := cmp.Diff(v.Events, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

// TestVectorsEncode writes what vLLM wrote, byte for byte, wherever the form is
// one that AppendBatch has.
func TestVectorsEncode(t *testing.T) {
	forms := map[string]EncodeOptions{
		"array, medium and lora_name (vLLM 0.15)": {Slots: 8},
		"array, 12 slots (vLLM 0.22/0.23)":        {},
		"map (vLLM 0.24 and later)":               {Maps: true},
		"map16 header with a small count":         {Maps: true, Map16: true},
		"empty batch, nil rank":                   {},
		"marked image item":                       {Maps: true},
		"LoRA and tagged salt":                    {Maps: true},
		"lookahead of one token (vLLM 0.33)":      {Maps: true},
		"lookahead of two tokens":                 {Maps: true},
	}
	found := 0
	for _, v := range readVectors(t) {
		o, ok := forms[v.Name]
		if !ok {
			continue
		}
		found++
		t.Run(v.Name, func(t *testing.T) {
			var d Decoder
			want := v.payload(t)
			b, err := d.Decode(want)
			if err != nil {
				t.Fatal(err)
			}
			got, err := AppendBatch([]byte("before"), b, o)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got[len("before"):], want) {
				t.Errorf("\n got %x\nwant %x", got[len("before"):], want)
			}
		})
	}
	if found != len(forms) {
		t.Errorf("%d of %d vectors found", found, len(forms))
	}
}
