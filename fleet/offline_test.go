package fleet

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// quiet is a logger for tests that do not look at the log.
var quiet = slog.New(slog.DiscardHandler)

// history is one case of histories.json.
type history struct {
	Name    string
	Streams map[string]struct {
		ImageTokenID *uint32 `json:"image_token_id"`
		ExactMM      bool    `json:"exact_mm"`
	}
	Steps []struct {
		Stream   string
		Seq      *uint64
		Events   []json.RawMessage
		Ask      *request
		Expect   map[string]struct{ Device, Host int }
		NotExact map[string]string `json:"not_exact"`
		State    map[string]string
	}
}

// TestHistories gives every case's events as live messages of a capture, and
// asks its questions of the fleet.
func TestHistories(t *testing.T) {
	raw, err := os.ReadFile("../testdata/histories.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Cases []history }
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Cases) == 0 {
		t.Fatal("no cases")
	}
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) { c.run(t) })
	}
}

func (c *history) run(t *testing.T) {
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{}}
	for name, s := range c.Streams {
		worker, rank, _ := strings.Cut(name, "/")
		h.Streams[name] = zmqwire.CaptureStream{Worker: worker, DPRank: int(rank[0] - '0'), Model: "m", ImageTokenID: s.ImageTokenID}
	}
	off, err := NewOffline(h, Replies{}, Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	next := map[string]uint64{}
	for i, s := range c.Steps {
		if s.Ask != nil {
			s.Ask.Model = "m"
			c.check(t, i, match(t, off.Fleet, s.Ask))
			continue
		}
		if s.Seq != nil {
			next[s.Stream] = *s.Seq
		}
		feed(t, off, s.Stream, next[s.Stream], payloadOf(t, s.Events))
		next[s.Stream]++
	}
}

func (c *history) check(t *testing.T, step int, got map[string]answer) {
	t.Helper()
	s := c.Steps[step]
	for name := range c.Streams {
		a := got[name]
		if want := s.NotExact[name]; a.reason != want {
			t.Errorf("step %d, %s: reason %q, want %q", step, name, a.reason, want)
		}
		if a.reason != "" && s.Ask.Mode == "exact" {
			continue
		}
		want := s.Expect[name]
		want.Host = max(want.Host, want.Device)
		if a.row.Device != want.Device || a.row.Host != want.Host {
			t.Errorf("step %d, %s: device %d host %d, want %d and %d", step, name, a.row.Device, a.row.Host, want.Device, want.Host)
		}
		if want, ok := s.State[name]; ok && a.state.String() != want {
			t.Errorf("step %d, %s: state %s, want %s", step, name, a.state, want)
		}
	}
}

// payloadOf encodes events that are written as JSON maps.
func payloadOf(t testing.TB, events []json.RawMessage) []byte {
	t.Helper()
	list := make([]any, len(events))
	for i, e := range events {
		d := json.NewDecoder(bytes.NewReader(e))
		d.UseNumber()
		var v any
		if err := d.Decode(&v); err != nil {
			t.Fatal(err)
		}
		list[i] = plain(t, v)
	}
	var out bytes.Buffer
	enc := msgpack.NewEncoder(&out)
	enc.SetSortMapKeys(true) // equal events are equal bytes
	if err := enc.Encode([]any{1.5, list, nil}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// plain turns JSON numbers into integers and {"bytes": hex} into bins.
func plain(t testing.TB, v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		var n uint64
		if _, err := fmt.Sscan(v.String(), &n); err != nil {
			t.Fatal(err)
		}
		return n
	case []any:
		for i := range v {
			v[i] = plain(t, v[i])
		}
	case map[string]any:
		if s, ok := v["bytes"].(string); ok && len(v) == 1 {
			b, err := hex.DecodeString(s)
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		for k := range v {
			v[k] = plain(t, v[k])
		}
	}
	return v
}

func feed(t testing.TB, off *Offline, stream string, seq uint64, payload []byte) {
	t.Helper()
	frames := [][]byte{nil, binary.BigEndian.AppendUint64(nil, seq), payload}
	if err := off.Feed(&zmqwire.Record{Stream: stream, Kind: zmqwire.Live, Frames: frames}); err != nil {
		t.Fatal(err)
	}
}

// captureQuestion is one line of a capture's questions.
type captureQuestion struct {
	After   int
	Request request
	Expect  map[string]struct {
		Device, Host int
		Usable       *int
	}
	NotExact map[string]string `json:"not_exact"`
}

// TestCaptures feeds recorded streams, restarts and replays included, and asks
// what vLLM itself was asked.
func TestCaptures(t *testing.T) {
	captures, err := filepath.Glob("../testdata/captures/*.kvcap.zst")
	if err != nil || len(captures) == 0 {
		t.Fatal("no captures", err)
	}
	for _, file := range captures {
		path := strings.TrimSuffix(file, ".kvcap.zst")
		t.Run(filepath.Base(path), func(t *testing.T) { checkCapture(t, path) })
	}
}

func openCapture(t *testing.T, path string) *zmqwire.CaptureReader {
	t.Helper()
	f, err := os.Open(path + ".kvcap.zst")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	r, err := zmqwire.NewCaptureReader(f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func checkCapture(t *testing.T, path string) {
	replies, err := ScanReplies(openCapture(t, path))
	if err != nil {
		t.Fatal(err)
	}
	r := openCapture(t, path)
	off, err := NewOffline(r.Header(), replies, Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	questions, answers := readQuestions(t, path), 0
	ask := func(applied int) {
		for len(questions) > 0 && questions[0].After <= applied {
			answers += checkAnswers(t, off.Fleet, r.Header(), &questions[0])
			questions = questions[1:]
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
		if err := off.Feed(&rec); err != nil {
			t.Fatal(err)
		}
		ask(n)
	}
	for _, p := range off.Positions() {
		if p.Status.State != Live || p.Status.Lost != 0 {
			t.Errorf("%s ends %s with %d lost", p.Stream, p.Status.State, p.Status.Lost)
		}
	}
	if len(questions) > 0 || answers == 0 {
		t.Errorf("%d answers, %d questions left", answers, len(questions))
	}
}

func readQuestions(t *testing.T, path string) (out []captureQuestion) {
	t.Helper()
	f, err := os.Open(path + ".queries.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 16<<20)
	for sc.Scan() {
		var q captureQuestion
		if err := json.Unmarshal(sc.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		out = append(out, q)
	}
	return out
}

func checkAnswers(t *testing.T, f *Fleet, h zmqwire.CaptureHeader, q *captureQuestion) (n int) {
	t.Helper()
	got := match(t, f, &q.Request)
	for _, name := range slices.Sorted(maps.Keys(h.Streams)) {
		if h.Streams[name].Model != q.Request.Model {
			continue
		}
		n++
		a, want := got[name], q.Expect[name]
		if a.reason != q.NotExact[name] {
			t.Errorf("after %d, %s: reason %q, want %q", q.After, name, a.reason, q.NotExact[name])
		}
		if a.reason != "" && q.Request.Mode == "exact" {
			continue
		}
		if a.row.Device != want.Device || a.row.Host != want.Host || want.Usable != nil && a.row.Usable != *want.Usable {
			t.Errorf("after %d, %s (%s): device %d host %d usable %d, want %+v", q.After, name, a.state, a.row.Device, a.row.Host, a.row.Usable, want)
		}
	}
	return n
}
