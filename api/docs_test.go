package api

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/normalize"
)

func apiDoc(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Every reason is documented, and nothing else is called one.
func TestEveryReasonIsDocumented(t *testing.T) {
	_, section, _ := strings.Cut(apiDoc(t), "\n## Errors\n")
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\|").FindAllStringSubmatch(section, -1) {
		if documented[m[1]] {
			t.Errorf("%s is documented twice", m[1])
		}
		documented[m[1]] = true
	}
	reasons := map[string]bool{}
	for _, r := range Reasons() {
		reasons[string(r)] = true
	}
	for _, r := range []normalize.Reason{
		normalize.FeaturesNotObject, normalize.MMHashesNotObject, normalize.MMPlaceholdersNotObject, normalize.UnsupportedModality,
		normalize.UnpairedModality, normalize.NotAnArray, normalize.LengthMismatch, normalize.BadIdentifier, normalize.BadPlaceholder,
		normalize.RangeOutOfBounds, normalize.MixedSpanWithoutIsEmbed, normalize.BadIsEmbed, normalize.NoImageTokenID,
		normalize.TowerConnectorLora, normalize.ExtraKeysHidden, normalize.OutOfOrder, normalize.Overlapping,
		normalize.AdjacentDifferentIdentifiers, normalize.NoEmbedTokens, normalize.MixedEmbedTokens, normalize.ImageTokenMismatch,
		normalize.UndeclaredImageToken, normalize.AmbiguousLayout, normalize.TextOnlyAsked,
	} {
		reasons[string(r)] = true
	}
	for r := range reasons {
		if !documented[r] {
			t.Errorf("%s is not documented", r)
		}
	}
	for r := range documented {
		if !reasons[r] {
			t.Errorf("%s is documented and does not exist", r)
		}
	}
	// The list in the code has every constant of its kind.
	src, err := os.ReadFile("errors.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`Reason = "([a-z0-9_]+)"`).FindAllStringSubmatch(string(src), -1) {
		if !reasons[m[1]] {
			t.Errorf("Reasons lacks %s", m[1])
		}
	}
}

// The curl examples run as they stand, against a real server on another port.
func TestDocumentedExamples(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not here")
	}
	prompt := make([]uint32, 17)
	for i := range prompt {
		prompt[i] = uint32(i + 1)
	}
	holds := textFleet(t, 1, prompt)
	live, err := fleet.New(fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	_, asked := newTestServer(t, holds.Fleet, nil)
	_, changed := newTestServer(t, live, nil)
	examples := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(apiDoc(t), -1)
	if len(examples) < 7 {
		t.Fatalf("only %d examples", len(examples))
	}
	for _, e := range examples {
		base := asked.URL
		if strings.Contains(e[1], "-X PUT") {
			base = changed.URL
		}
		script := strings.ReplaceAll(e[1], "localhost:8099", strings.TrimPrefix(base, "http://"))
		var out bytes.Buffer
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", strings.ReplaceAll(script, "curl -s", "curl -sS --fail-with-body"))
		cmd.Stdout, cmd.Stderr = &out, &out
		cmd.Env = append(os.Environ(), "no_proxy=*")
		if err := cmd.Run(); err != nil {
			t.Errorf("%s\n%v: %s", script, err, out.String())
		}
	}
}

// The JSON of the page has the shapes of openapi.json.
func TestDocumentedAnswers(t *testing.T) {
	s := loadOpenAPI(t)
	for _, m := range regexp.MustCompile("(?s)```json\n(.*?)```").FindAllStringSubmatch(apiDoc(t), -1) {
		var v map[string]any
		if err := json.Unmarshal([]byte(m[1]), &v); err != nil {
			t.Errorf("%v: %s", err, m[1])
			continue
		}
		name := "MatchResponse"
		switch {
		case v["error"] != nil:
			name = "Error"
		case v["scores"] != nil:
			name = "Scores"
		}
		if err := s.check(dig(s.doc, "components", "schemas", name), v, name); err != nil {
			t.Error(err)
		}
	}
}
