package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// Every figure of every capture, by the command that people run.
func TestReplayCheck(t *testing.T) {
	for _, name := range captures(t) {
		t.Run(name, func(t *testing.T) {
			out := mustRun(t, "replay", capturePath(name), "--queries", queriesPath(name), "--check")
			last := lastLine(out)
			if !regexp.MustCompile(`^[1-9][0-9]+ answers, 0 differ, 0 too long$`).MatchString(last) {
				t.Errorf("last line %q", last)
			}
		})
	}
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// editQuestions writes a capture's questions with an edit of each, and returns
// the file.
func editQuestions(t *testing.T, name string, edit func(i int, q map[string]any)) string {
	t.Helper()
	raw, err := os.ReadFile(queriesPath(name))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for i, line := range strings.Split(strings.TrimSpace(string(raw)), "\n") {
		var q map[string]any
		if err := json.Unmarshal([]byte(line), &q); err != nil {
			t.Fatal(err)
		}
		edit(i, q)
		b, _ := json.Marshal(q)
		out.Write(append(b, '\n'))
	}
	file := filepath.Join(t.TempDir(), "questions.jsonl")
	if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// A check that cannot fail proves nothing: each kind of figure, made wrong, must
// be found.
func TestCheckFindsDifferences(t *testing.T) {
	// shift changes one figure of the first stream of the n-th question that
	// has it, and says by how much the known answer is now off.
	shift := func(figure string, by float64) func(int, map[string]any) {
		done := false
		return func(_ int, q map[string]any) {
			for _, e := range q["expect"].(map[string]any) {
				e := e.(map[string]any)
				if v, ok := e[figure].(float64); ok && !done && v+by >= 0 {
					e[figure], done = v+by, true
				}
			}
		}
	}
	f := func(name, capture, summary string, edit func(int, map[string]any), want ...string) {
		t.Helper()
		t.Run(name, func(t *testing.T) {
			t.Helper()
			file := editQuestions(t, capture, edit)
			code, out, errs := runs(t, "replay", capturePath(capture), "--queries", file, "--check")
			if code != exitFailed || !strings.HasSuffix(lastLine(out), summary) {
				t.Errorf("exit code %d, last line %q, want %d and %q\n%s", code, lastLine(out), exitFailed, summary, errs)
			}
			for _, w := range want {
				if !strings.Contains(out, w) {
					t.Errorf("%q is not in\n%s", w, out)
				}
			}
		})
	}
	f("device too long", "text", "1 differ, 1 too long", shift("device", -16), "TOO LONG: line", "expected", "block size")
	f("device too short", "text", "1 differ, 0 too long", shift("device", 16), "differs: line")
	f("host", "tiers", "1 differ, 1 too long", shift("host", -16), "host")
	f("usable", "hybrid", "1 differ, 1 too long", shift("usable", -16), "usable")
	struck := false
	f("a stream that must have nothing", "text", "1 differ, 1 too long", func(_ int, q map[string]any) {
		expect := q["expect"].(map[string]any)
		if _, ok := expect["w0/0"]; ok && !struck {
			struck = true
			delete(expect, "w0/0")
		}
	}, "w0/0: device")
	f("a reason", "images", "1 differ, 0 too long", func(i int, q map[string]any) {
		if n, ok := q["not_exact"].(map[string]any); ok && i < 2 {
			for k := range n {
				n[k] = "out_of_order"
			}
		}
	}, "expected out_of_order")
	refusal := false
	f("a refusal", "images", "1 differ, 0 too long", func(_ int, q map[string]any) {
		if q["request"].(map[string]any)["mm"] == "exact" && q["not_exact"] != nil && !refusal {
			refusal = true
			delete(q, "not_exact")
		}
	}, "refused for no_image_token_id, expected an answer")
}

func TestReplayJSON(t *testing.T) {
	out := mustRun(t, "replay", capturePath("gaps"), "--queries", queriesPath("gaps"), "--check", "--json")
	var r replayResult
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	if r.Records != 189 || len(r.Streams) != 3 || r.Check == nil || r.Check.Questions != 280 || r.Check.Differ != 0 {
		t.Errorf("%+v", r)
	}
	for _, s := range r.Streams {
		if s.State != "live" || s.Lost != 0 || s.Stream == "w1/0" && s.Restarts != 2 {
			t.Errorf("%+v", s)
		}
	}
}

// A capture cut anywhere is used up to its last whole record, and the warning
// names the offset.
func TestReplayTruncated(t *testing.T) {
	raw := decompress(t, capturePath("text"))
	dir := t.TempDir()
	for _, cut := range []int{1, 7, 1000, len(raw) / 2} {
		t.Run(fmt.Sprint(cut), func(t *testing.T) {
			file := filepath.Join(dir, fmt.Sprintf("cut%d.kvcap", cut))
			if err := os.WriteFile(file, raw[:len(raw)-cut], 0o644); err != nil {
				t.Fatal(err)
			}
			code, out, errs := runs(t, "replay", file)
			if code != exitOK || !strings.Contains(errs, "cut short: used up to byte") {
				t.Errorf("exit code %d\n%s%s", code, out, errs)
			}
		})
	}
	file := filepath.Join(dir, "odd.kvcap")
	if err := os.WriteFile(file, append(raw[:len(raw):len(raw)], 0xc1), 0o644); err != nil {
		t.Fatal(err)
	}
	code, _, errs := runs(t, "replay", file)
	if code != exitFailed || !strings.Contains(errs, fmt.Sprint(len(raw))) {
		t.Errorf("a value that is no record: exit code %d, %s, want the offset %d", code, errs, len(raw))
	}
}

func decompress(t testing.TB, name string) []byte {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d, err := zstd.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var b strings.Builder
	if _, err := d.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return []byte(b.String())
}

// The result of a replay answers over HTTP.
func TestReplayServe(t *testing.T) {
	s := startCommand(t, "serving on", "replay", capturePath("text"), "--serve", "127.0.0.1:0")
	q, err := readQuestions(queriesPath("text"))
	if err != nil {
		t.Fatal(err)
	}
	out := mustRun(t, "match", "--server", s, "--tokens", tokensOf(t, &q[len(q)-1]), "--include", "zero", "--json")
	if strings.Count(out, `"worker"`) != 3 {
		t.Errorf("expected a row for each of three workers:\n%s", out)
	}
}

func tokensOf(t testing.TB, q *question) string {
	t.Helper()
	var r struct {
		TokenIDs json.RawMessage `json:"token_ids"`
	}
	if err := json.Unmarshal(q.Request, &r); err != nil {
		t.Fatal(err)
	}
	return strings.Trim(string(r.TokenIDs), "[]")
}
