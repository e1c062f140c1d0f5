package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
)

// fence is one fenced block of the README with the mark above it.
type fence struct {
	mark, language, text string
	line                 int
}

func readmeFences(t *testing.T) []fence {
	t.Helper()
	raw, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	var out []fence
	re := regexp.MustCompile("(?m)(?:^<!-- ([a-z ]+) -->\n)?^```([a-z]*)\n((?s:.*?))^```$")
	for _, m := range re.FindAllSubmatchIndex(raw, -1) {
		get := func(i int) string {
			if m[i] < 0 {
				return ""
			}
			return string(raw[m[i]:m[i+1]])
		}
		out = append(out, fence{get(2), get(4), get(6), 1 + strings.Count(string(raw[:m[4]]), "\n")})
	}
	if len(out) < 8 {
		t.Fatalf("only %d fenced blocks were found", len(out))
	}
	return out
}

// Every command of the README runs here, or is marked with what it needs.
func TestReadmeCommands(t *testing.T) {
	for _, f := range readmeFences(t) {
		if f.language != "sh" {
			continue
		}
		t.Run(fmt.Sprintf("line %d", f.line), func(t *testing.T) {
			switch f.mark {
			case "run":
				out, err := runShell(t, f.text)
				for try := 0; err != nil && try < 3 && strings.Contains(out, "in use"); try++ {
					out, err = runShell(t, f.text) // somebody else took a free port first
				}
				if err != nil {
					t.Errorf("%v\n%s\n%s", err, f.text, out)
				}
			case "run by ci":
				ci, err := os.ReadFile("../../.ci/run")
				if err != nil || !strings.Contains(string(ci), strings.TrimSpace(f.text)) {
					t.Errorf(".ci/run does not run %q: %v", f.text, err)
				}
			case "needs vllm", "needs daemon":
				checkFlags(t, f.text)
			default:
				t.Errorf("the block has no mark that says whether it can be run here: %q", f.mark)
			}
		})
	}
}

// runShell runs commands at the repository's root, with free ports in place of
// the usual ones and this test binary as kvindexd.
func runShell(t *testing.T, text string) (string, error) {
	t.Helper()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no bash")
	}
	dir := t.TempDir()
	wrapper := fmt.Sprintf("#!/bin/sh\n%s=1 exec %q \"$@\"\n", asCommand, os.Args[0])
	if err := os.WriteFile(filepath.Join(dir, "kvindexd"), []byte(wrapper), 0o755); err != nil {
		t.Fatal(err)
	}
	events, replays := freePort(t), freePort(t)
	text = strings.NewReplacer("5557", events, "5657", replays, "prompts.jsonl", filepath.Join(dir, "prompts.jsonl"),
		"-o kvindexd", "-o "+filepath.Join(dir, "built"), "./kvindexd", filepath.Join(dir, "built")).Replace(text)
	address := "127.0.0.1:" + freePort(t)
	// What is still running when a command fails must not outlive the test.
	text = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + text
	cmd := exec.Command(bash, "-euo", "pipefail", "-c", text)
	cmd.WaitDelay = patience
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "KVINDEXD_LISTEN="+address, "KVINDEXD_SERVER=http://"+address,
		"KVINDEXD_ENDPOINT=tcp://127.0.0.1:"+events, "KVINDEXD_REPLAY_ENDPOINT=tcp://127.0.0.1:"+replays)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// checkFlags sees to it that commands which cannot run here could be parsed.
func checkFlags(t *testing.T, text string) {
	t.Helper()
	text = strings.ReplaceAll(text, "\\\n", " ")
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) > 2 && words[0] == "kvindexd":
			cmd, rest, err := newRoot().Find(words[1:])
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			if err != nil {
				t.Errorf("%s: %v", line, err)
			}
		case len(words) > 0 && words[0] == "vllm":
			checkEventsConfig(t, line)
		}
	}
}

// eventsConfigFields are those of vLLM's KVEventsConfig.
var eventsConfigFields = []string{"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"}

func checkEventsConfig(t *testing.T, line string) {
	t.Helper()
	_, text, _ := strings.Cut(line, "'")
	text, _, _ = strings.Cut(text, "'")
	var fields map[string]any
	if err := json.Unmarshal([]byte(text), &fields); err != nil {
		t.Fatal(err)
	}
	for _, name := range eventsConfigFields {
		delete(fields, name)
	}
	if len(fields) > 0 {
		t.Errorf("vLLM's KVEventsConfig has no %v", fields)
	}
}

// The README's configuration is one that the daemon takes, its answer is JSON,
// and the files it points to are there.
func TestReadmeContents(t *testing.T) {
	for _, f := range readmeFences(t) {
		switch f.language {
		case "yaml":
			if _, err := fleet.ParseConfig("README.md", []byte(f.text), fleet.EndpointDefaults{}); err != nil {
				t.Error(err)
			}
		case "json":
			if !json.Valid([]byte(f.text)) {
				t.Errorf("line %d is no JSON", f.line)
			}
		}
	}
	raw, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`\]\(([^)#]+)`).FindAllStringSubmatch(string(raw), -1) {
		if _, err := os.Stat(filepath.Join("../..", m[1])); err != nil {
			t.Errorf("a link leads nowhere: %v", err)
		}
	}
}
