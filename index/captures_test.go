package index_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestCaptures asks vLLM's own questions of an index fed with vLLM's own
// events, with readers beside it: every figure must be vLLM's.
func TestCaptures(t *testing.T) {
	files, err := filepath.Glob("../testdata/captures/*.kvcap.zst")
	if err != nil || len(files) == 0 {
		t.Fatalf("no captures: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".kvcap.zst"), func(t *testing.T) {
			checkCapture(t, file)
		})
	}
}

type question struct {
	After   int `json:"after"`
	Request struct {
		Model     string          `json:"model"`
		Tokens    []uint32        `json:"token_ids"`
		Features  json.RawMessage `json:"features"`
		LoraName  string          `json:"lora_name"`
		CacheSalt string          `json:"cache_salt"`
		Mode      string          `json:"mm"`
	} `json:"request"`
	Expect map[string]struct {
		Device, Host int
		Usable       *int
	} `json:"expect"`
	NotExact map[string]string `json:"not_exact"`
}

func readQuestions(t testing.TB, file string) []question {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var qs []question
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<24)
	for sc.Scan() {
		var q question
		if err := json.Unmarshal(sc.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		qs = append(qs, q)
	}
	return qs
}

// fed is one stream of a capture on its way into a set.
type fed struct {
	name    string
	model   string
	view    normalize.View
	stream  *index.Stream
	dec     zmqwire.Decoder
	norm    *normalize.Normalizer
	batch   normalize.Batch
	next    uint64
	waiting map[uint64][]byte
}

func (f *fed) live(t testing.TB, m zmqwire.Message) {
	switch {
	case m.Seq > f.next:
		f.waiting[m.Seq] = append([]byte(nil), m.Payload...)
		return
	case m.Seq < f.next:
		f.stream.Clear()
		clear(f.waiting)
	}
	f.apply(t, m.Seq, m.Payload)
}

func (f *fed) reply(t testing.TB, m zmqwire.Message) {
	if m.Seq == f.next {
		f.apply(t, m.Seq, m.Payload)
	}
	for p, ok := f.waiting[f.next]; ok; p, ok = f.waiting[f.next] {
		delete(f.waiting, f.next)
		f.apply(t, f.next, p)
	}
}

func (f *fed) apply(t testing.TB, seq uint64, payload []byte) {
	b, err := f.dec.Decode(payload)
	if err != nil {
		t.Fatalf("%s seq %d: %v", f.name, seq, err)
	}
	f.norm.Normalize(&f.batch, b)
	f.stream.Apply(&f.batch)
	f.next = seq + 1
}

func feedOf(name string, c zmqwire.CaptureStream, set *index.Set) *fed {
	v := normalize.View{TowerConnectorLora: c.TowerConnectorLora}
	if c.ImageTokenID != nil {
		v.IDs.Image, v.IDs.HasImage = *c.ImageTokenID, true
	}
	if c.VideoTokenID != nil {
		v.IDs.Video, v.IDs.HasVideo = *c.VideoTokenID, true
	}
	return &fed{
		name: name, model: c.Model, view: v,
		stream:  set.NewStream(index.StreamConfig{Name: name, EagleDrop: c.EagleDrop, BlockSize: c.BlockSize}),
		norm:    normalize.NewNormalizer(v),
		waiting: map[uint64][]byte{},
	}
}

func checkCapture(t *testing.T, file string) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := zmqwire.NewCaptureReader(f)
	if err != nil {
		t.Fatal(err)
	}
	questions := readQuestions(t, strings.TrimSuffix(file, ".kvcap.zst")+".queries.jsonl")
	set := index.New(index.Options{})
	feeds := map[string]*fed{}
	for name, c := range r.Header().Streams {
		feeds[name] = feedOf(name, c, set)
	}
	defer readBeside(set, feeds, questions)()
	asked, answers := 0, 0
	ask := func(applied int) {
		for asked < len(questions) && questions[asked].After <= applied {
			answers += checkQuestion(t, set, feeds, asked, &questions[asked])
			asked++
		}
	}
	ask(0)
	var rec zmqwire.Record
	for n := 1; ; n++ {
		if err := r.Next(&rec); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		feedRecord(t, feeds[rec.Stream], &rec)
		ask(n)
	}
	ask(1 << 60)
	t.Logf("%d answers", answers)
}

// readBeside asks the capture's questions of all its streams again and again,
// while it is fed, until the function it returns is called: the answers of a
// moment that nobody knows are not looked at, but they must not disturb anything.
func readBeside(set *index.Set, feeds map[string]*fed, questions []question) (stop func()) {
	var streams []*index.Stream
	for _, f := range feeds {
		streams = append(streams, f.stream)
	}
	roster := set.NewRoster(streams, nil)
	var done atomic.Bool
	var readers sync.WaitGroup
	for r := range 2 {
		readers.Go(func() {
			rows := make([]index.Row, len(streams))
			for n := r; !done.Load(); n++ {
				q := &questions[n%len(questions)].Request
				p := normalize.Prompt{Tokens: q.Tokens, LoraName: q.LoraName, CacheSalt: q.CacheSalt}
				roster.Match(&index.Query{PromptTokens: len(p.Tokens), Views: []index.QueryView{viewOf(set, &p)}}, rows)
			}
		})
	}
	return func() {
		done.Store(true)
		readers.Wait()
	}
}

// viewOf identifies a prompt's text in every shape of the set.
func viewOf(set *index.Set, p *normalize.Prompt) (view index.QueryView) {
	for _, shape := range set.Shapes() {
		pr := p.Project(normalize.View{}, shape)
		var c normalize.Chain
		p.Chain(&c, &pr, normalize.View{}, shape)
		view.Chains, view.Limits = append(view.Chains, c), append(view.Limits, pr.Limit)
	}
	return view
}

func feedRecord(t testing.TB, f *fed, rec *zmqwire.Record) {
	if rec.Kind == zmqwire.Live {
		m, err := zmqwire.ParseMessage(rec.Frames)
		if err != nil {
			t.Fatal(err)
		}
		f.live(t, m)
		return
	}
	m, end, err := zmqwire.ParseReply(rec.Frames)
	if err != nil {
		t.Fatal(err)
	}
	if !end {
		f.reply(t, m)
	}
}

func checkQuestion(t *testing.T, set *index.Set, feeds map[string]*fed, n int, q *question) (answers int) {
	for name, f := range feeds {
		if f.model != q.Request.Model {
			continue
		}
		row, reason := askStream(set, f, q)
		answers++
		want, wantReason := q.Expect[name], q.NotExact[name]
		if reason != wantReason {
			t.Errorf("question %d, %s: reason %q, want %q", n, name, reason, wantReason)
		}
		if reason != "" && q.Request.Mode == "exact" {
			continue
		}
		got := fmt.Sprintf("device %d host %d", row.Device, row.Host)
		expect := fmt.Sprintf("device %d host %d", want.Device, want.Host)
		if want.Usable != nil {
			got += fmt.Sprintf(" usable %d%s", row.Usable, row.UsableReason)
			expect += fmt.Sprintf(" usable %d", *want.Usable)
		}
		if got != expect {
			t.Errorf("question %d after %d, %s: %s, want %s", n, q.After, name, got, expect)
		}
	}
	return answers
}

func askStream(set *index.Set, f *fed, q *question) (index.Row, string) {
	mode, err := normalize.ParseMode(q.Request.Mode)
	if err != nil {
		panic(err)
	}
	p := normalize.Prompt{Tokens: q.Request.Tokens, LoraName: q.Request.LoraName, CacheSalt: q.Request.CacheSalt, Mode: mode}
	if q.Request.Features != nil {
		p.Features = normalize.ParseFeaturesJSON(q.Request.Features)
	}
	var view index.QueryView
	reason := ""
	own, known := f.stream.Shape()
	for _, shape := range set.Shapes() {
		pr := p.Project(f.view, shape)
		if pr.Reason != "" && mode != normalize.TextOnly && (shape == own || !known) {
			reason = string(pr.Reason)
		}
		var c normalize.Chain
		p.Chain(&c, &pr, f.view, shape)
		view.Chains, view.Limits = append(view.Chains, c), append(view.Limits, pr.Limit)
	}
	rows := make([]index.Row, 1)
	set.Match(&index.Query{PromptTokens: len(p.Tokens), Views: []index.QueryView{view}}, []*index.Stream{f.stream}, rows)
	return rows[0], reason
}
