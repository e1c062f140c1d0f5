package normalize

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// question is one line of a capture's queries: a request, what vLLM holds of it
// and which workers cannot answer it exactly.
type question struct {
	After   int
	Request struct {
		Model    string
		Tokens   []uint32 `json:"token_ids"`
		Features json.RawMessage
		Lora     string `json:"lora_name"`
		Salt     string `json:"cache_salt"`
		MM       string
	}
	Expect   map[string]struct{ Device, Host int }
	NotExact map[string]string `json:"not_exact"`
}

// witness remembers the identity of everything one stream ever announced.
type witness struct {
	view   View
	norm   *Normalizer
	batch  Batch
	blocks map[zmqwire.EngineHash]known
	shapes map[Shape]map[SequenceHash]bool
}

type known struct {
	seq  SequenceHash
	salt SaltSeed
}

func newWitness(t *testing.T, c zmqwire.CaptureStream) *witness {
	mode, err := ParseExtraKeysMode(c.ExtraKeys)
	if err != nil {
		t.Fatal(err)
	}
	v := View{IDs: tokenIDs(c.ImageTokenID, c.VideoTokenID), TowerConnectorLora: c.TowerConnectorLora, ExtraKeys: mode}
	return &witness{
		view: v, norm: NewNormalizer(v),
		blocks: map[zmqwire.EngineHash]known{}, shapes: map[Shape]map[SequenceHash]bool{},
	}
}

func (w *witness) apply(t *testing.T, b *zmqwire.Batch) {
	w.norm.Normalize(&w.batch, b)
	for _, r := range []SkipReason{SkipRepeatedHash, SkipOwnParent, SkipZeroBlockSize, SkipTokenCount, SkipLookaheadCount, SkipExtraKeysCount, SkipUnknownMedium} {
		if n := w.batch.Skips.ByReason[r]; n > 0 {
			t.Errorf("%d events skipped: %v", n, r)
		}
	}
	for i := range w.batch.Ops {
		if op := &w.batch.Ops[i]; op.Kind == OpStore && op.Form == Placed && op.Spec != SpecWindow {
			w.store(op)
		}
	}
}

func (w *witness) store(op *Op) {
	prev, known_ := known{salt: op.Salt}, false
	if op.HasParent {
		if prev, known_ = w.blocks[op.Parent]; !known_ {
			return
		}
	}
	if w.shapes[op.Shape] == nil {
		w.shapes[op.Shape] = map[SequenceHash]bool{}
	}
	for i, l := range w.batch.Locals(nil, op, prev.salt) {
		if i == 0 && !op.HasParent {
			prev.seq = SequenceHash(l)
		} else {
			prev.seq = NextSequence(prev.seq, l)
		}
		w.blocks[op.Hashes[i]] = prev
		w.shapes[op.Shape][prev.seq] = true
	}
}

// ask checks one question against one stream: whatever vLLM holds of the prompt
// was announced under the identity that the request gives it.
func (w *witness) ask(t *testing.T, q *question, name string) {
	mode, err := ParseMode(q.Request.MM)
	if err != nil {
		t.Fatal(err)
	}
	p := Prompt{
		Tokens: q.Request.Tokens, LoraName: q.Request.Lora, CacheSalt: q.Request.Salt, Mode: mode,
	}
	if q.Request.Features != nil {
		p.Features = ParseFeaturesJSON(q.Request.Features)
	}
	found := 0
	for s, seqs := range w.shapes {
		pr := p.Project(w.view, s)
		if want := q.NotExact[name]; mode != TextOnly && string(pr.Reason) != want {
			t.Errorf("after %d, %s, %+v: reason %q, want %q", q.After, name, s, pr.Reason, want)
		}
		var c Chain
		p.Chain(&c, &pr, w.view, s)
		n := 0
		for n < len(c.Seqs) && seqs[c.Seqs[n]] {
			n++
		}
		found = max(found, n*int(s.BlockSize))
	}
	want, ok := q.Expect[name]
	if held := max(want.Device, want.Host); ok && found < held {
		t.Errorf("after %d, %s: %d tokens identified, vLLM holds %d", q.After, name, found, held)
	}
}

// What vLLM's own pools hold of a prompt, requests of that prompt name; and who
// cannot answer exactly says so for the right reason.
func TestCaptures(t *testing.T) {
	files, err := filepath.Glob("../testdata/captures/*.kvcap.zst")
	if err != nil || len(files) == 0 {
		t.Fatalf("captures: %d, %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(file, ".kvcap.zst")
		t.Run(filepath.Base(name), func(t *testing.T) { replayCapture(t, file, name+".queries.jsonl") })
	}
}

func replayCapture(t *testing.T, file, queries string) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := zmqwire.NewCaptureReader(f)
	if err != nil {
		t.Fatal(err)
	}
	streams := map[string]*witness{}
	for name, s := range r.Header().Streams {
		streams[name] = newWitness(t, s)
	}
	var d zmqwire.Decoder
	for {
		var rec zmqwire.Record
		if err := r.Next(&rec); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		payload := rec.Frames[len(rec.Frames)-1]
		if len(payload) == 0 {
			continue // the end of a replay
		}
		b, err := d.Decode(payload)
		if err != nil {
			t.Fatal(err)
		}
		streams[rec.Stream].apply(t, b)
	}
	eachQuestion(t, queries, func(q *question) {
		for name, w := range streams {
			if model := r.Header().Streams[name].Model; model == cmp.Or(q.Request.Model, model) {
				w.ask(t, q, name)
			}
		}
	})
}

func eachQuestion(t *testing.T, file string, ask func(*question)) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for d := json.NewDecoder(bufio.NewReader(f)); ; {
		q := new(question)
		if err := d.Decode(q); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		ask(q)
	}
}
