package api

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/api/client"
	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// capture is a recorded history that is fed to a fleet record by record.
type capture struct {
	t       testing.TB
	records []zmqwire.Record
	off     *fleet.Offline
	fed     int
}

func openCapture(t testing.TB, name string) *capture {
	t.Helper()
	path := filepath.Join("..", "testdata", "captures", name+".kvcap.zst")
	read := func() *zmqwire.CaptureReader {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		r, err := zmqwire.NewCaptureReader(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	replies, err := fleet.ScanReplies(read())
	if err != nil {
		t.Fatal(err)
	}
	r := read()
	c := &capture{t: t}
	c.off, err = fleet.NewOffline(r.Header(), replies, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	for {
		var rec zmqwire.Record
		if err := r.Next(&rec); err == io.EOF {
			return c
		} else if err != nil {
			t.Fatal(err)
		}
		frames := make([][]byte, len(rec.Frames))
		for i, f := range rec.Frames {
			frames[i] = bytes.Clone(f)
		}
		rec.Frames = frames
		c.records = append(c.records, rec)
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// feed applies records up to the n-th.
func (c *capture) feed(n int) {
	for ; c.fed < min(n, len(c.records)); c.fed++ {
		if err := c.off.Feed(&c.records[c.fed]); err != nil {
			c.t.Fatal(err)
		}
	}
}

// question is a line of a capture's queries.
type question struct {
	After    int                                            `json:"after"`
	Request  json.RawMessage                                `json:"request"`
	Expect   map[string]struct{ Device, Host, Usable *int } `json:"expect"`
	NotExact map[string]string                              `json:"not_exact"`
}

func questions(t testing.TB, name string) []question {
	f, err := os.Open(filepath.Join("..", "testdata", "captures", name+".queries.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var qs []question
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var q question
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		qs = append(qs, q)
	}
	return qs
}

func newTestServer(t testing.TB, f *fleet.Fleet, edit func(*Config)) (*Server, *httptest.Server) {
	t.Helper()
	c := Config{Fleet: f, Logger: quiet()}
	if edit != nil {
		edit(&c)
	}
	s, err := NewServer(c)
	if err != nil {
		t.Fatal(err)
	}
	h := httptest.NewServer(s.Handler())
	t.Cleanup(h.Close)
	return s, h
}

// Every question of every capture, over real HTTP, against vLLM's own answers.
func TestCapturesOverHTTP(t *testing.T) {
	files, err := filepath.Glob("../testdata/captures/*.queries.jsonl")
	if err != nil || len(files) == 0 {
		t.Fatal("no captures", err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".queries.jsonl")
		t.Run(name, func(t *testing.T) {
			c := openCapture(t, name)
			_, h := newTestServer(t, c.off.Fleet, nil)
			cl, err := client.New(h.URL)
			if err != nil {
				t.Fatal(err)
			}
			rows := 0
			for i, q := range questions(t, name) {
				c.feed(q.After)
				rows += checkQuestion(t, fmt.Sprintf("%s question %d", name, i+1), cl, &q)
			}
			if rows < 30 {
				t.Errorf("only %d rows were compared", rows)
			}
		})
	}
}

func checkQuestion(t *testing.T, what string, cl *client.Client, q *question) (rows int) {
	t.Helper()
	body := bytes.Replace(q.Request, []byte("{"), []byte(`{"include":["zero"],`), 1)
	a, err := cl.MatchRaw(t.Context(), body)
	refused := map[string]string{}
	if e, ok := err.(*client.Error); ok && e.Status == http.StatusConflict {
		a.Refused = e.Refused
	} else if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	for _, r := range a.Refused {
		refused[fmt.Sprintf("%s/%d", r.Worker, r.DPRank)] = r.Reason
	}
	seen := map[string]bool{}
	for _, w := range a.Workers {
		name := fmt.Sprintf("%s/%d", w.Worker, w.DPRank)
		seen[name] = true
		e := q.Expect[name]
		if w.Device != value0(e.Device) || w.Host != value0(e.Host) {
			t.Errorf("%s: %s device %d host %d, vLLM %d %d", what, name, w.Device, w.Host, value0(e.Device), value0(e.Host))
		}
		if e.Usable != nil && (w.UsableTokens == nil || *w.UsableTokens != *e.Usable) {
			t.Errorf("%s: %s usable %v (%s), vLLM %d", what, name, w.UsableTokens, w.UsableReason, *e.Usable)
		}
		if want := q.NotExact[name]; want != "" && w.Reason != want {
			t.Errorf("%s: %s reason %q, want %q", what, name, w.Reason, want)
		}
	}
	for name := range q.Expect {
		if !seen[name] {
			t.Errorf("%s: no row for %s", what, name)
		}
	}
	for name, reason := range refused {
		if q.NotExact[name] != reason {
			t.Errorf("%s: %s refused for %q, want %q", what, name, reason, q.NotExact[name])
		}
	}
	return len(a.Workers) + len(refused)
}

func value0(p *int) int {
	if p == nil {
		return 0
	}
	return *p
}
