package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What differs from run to run: ports, how often a replay was asked, time.
var demoVaries = []struct {
	re *regexp.Regexp
	to string
}{
	{regexp.MustCompile(`127\.0\.0\.1:\d+ *`), "127.0.0.1:PORT "},
	{regexp.MustCompile(`gaps \d+, replayed \d+`), "gaps N, replayed N"},
	{regexp.MustCompile(`\d+\.\d s\.`), "N s."},
}

// The demo's story is the same each time. After a change of it:
// KVINDEXD_UPDATE_GOLDEN=1 go test ./cmd/kvindexd -run Demo
func TestDemo(t *testing.T) {
	out := mustRun(t, "demo")
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) > 40 {
		t.Errorf("%d lines do not fit on one screen", len(lines))
	}
	for _, l := range lines {
		if len(l) > 100 {
			t.Errorf("%d columns: %s", len(l), l)
		}
	}
	for _, v := range demoVaries {
		out = v.re.ReplaceAllString(out, v.to)
	}
	const golden = "testdata/demo.golden"
	if os.Getenv("KVINDEXD_UPDATE_GOLDEN") == "1" {
		if err := os.WriteFile(golden, []byte(out), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out); diff != "" {
		t.Error(diff)
	}
}
