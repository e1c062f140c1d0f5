package main

import (
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
)

func jsonAnswer(t *testing.T, status int, body string) answer {
	t.Helper()
	a := answer{status: status, kind: "json"}
	d := json.NewDecoder(strings.NewReader(body))
	d.UseNumber()
	if err := d.Decode(&a.body); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestDifferences(t *testing.T) {
	f := func(dynamo, ours string, want ...string) {
		t.Helper()
		var got []string
		for _, d := range differences(jsonAnswer(t, 200, dynamo), jsonAnswer(t, 200, ours)) {
			got = append(got, d.path)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s and %s differ in %v, want %v", dynamo, ours, got, want)
		}
	}
	f(`{"a":{"b":1}}`, `{"a":{"b":1}}`)
	f(`{"a":{"b":1}}`, `{"a":{"b":2,"c":3}}`, "body.a.b", "body.a.c")
	f(`{"scores":{}}`, `{"scores":{"7":{"0":4}}}`, "body.scores", "body.scores.7.0")
	f(`{"error":"one"}`, `{"error":"another"}`)
	f(`{"error":"one"}`, `{}`, "body", "body.error")
	f(`{"error":1}`, `{"error":"one"}`, "body.error")
	f(`[{"instance_id":2},{"instance_id":1}]`, `[{"instance_id":1},{"instance_id":2,"tenant_id":"default"}]`)
	f(`["b","a"]`, `["a","b"]`)
	f(`[18446744073709551615]`, `[18446744073709551614]`, "body.0")
}

func TestWithin(t *testing.T) {
	f := func(path, prefix string, want bool) {
		t.Helper()
		if within(path, prefix) != want {
			t.Errorf("within(%q, %q), want %t", path, prefix, want)
		}
	}
	f("body.scores.7.0", "body.scores", true)
	f("body.scores", "body.scores", true)
	f("body.scores2", "body.scores", false)
	f("body", "body.scores", false)
	f("body.7.listeners.0.status", "body.*.listeners.*.status", true)
	f("body.7.listeners.0.endpoint", "body.*.listeners.*.status", false)
}

// Whoever moves over finds every known difference in the documentation.
func TestEveryDeviationIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/drop-in.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, d := range allDeviations {
		if seen[d.id] {
			t.Errorf("%s is there twice", d.id)
		}
		seen[d.id] = true
		if !strings.Contains(string(doc), "| `"+d.id+"` |") {
			t.Errorf("%s is not in docs/drop-in.md", d.id)
		}
	}
}

// What is expected passes, what is not fails, and what is gone is told.
func TestVerdicts(t *testing.T) {
	expected := &deviation{id: "expected", fields: []string{"status"}, dynamo: status(409)}
	held := &deviation{id: "held", fields: []string{"body"}}
	f := func(dynamo, ours int, wantOurs func(answer) error, may []*deviation, want verdict, gone int) {
		t.Helper()
		p := new(pair)
		p.judge(result{dynamo: jsonAnswer(t, dynamo, `{}`), ours: jsonAnswer(t, ours, `{}`)}, wantOurs, may)
		r := p.results[0]
		if r.verdict != want || len(r.gone) != gone {
			t.Errorf("%d and %d: verdict %d with %d gone, want %d with %d: %v", dynamo, ours, r.verdict, len(r.gone), want, gone, r.trouble)
		}
		if report(io.Discard, p.results, false) != (want != unexpected) {
			t.Errorf("%d and %d: the report says otherwise", dynamo, ours)
		}
	}
	both := []*deviation{expected, held}
	f(201, 201, status(201), nil, equal, 0)
	f(409, 201, status(201), nil, unexpected, 0)
	f(409, 201, status(201), both[:1], known, 0)
	f(409, 201, status(201), both, known, 1)
	f(404, 201, status(201), both[:1], unexpected, 1) // it differs, but not as it is known to
	f(201, 201, status(201), both[:1], equal, 1)
	f(409, 202, status(201), both[:1], unexpected, 0) // as known, and ours is wrong
	f(202, 202, status(201), nil, unexpected, 0)      // equal, and both are wrong
}
