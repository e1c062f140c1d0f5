package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// What a person can get wrong is told by exit code 2 and a sentence that says
// what and where; what fails later by 1.
func TestUsage(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, _, errs := runs(t, args...)
		if got != code || !strings.Contains(errs, want) || !strings.HasPrefix(errs, "kvindexd: ") {
			t.Errorf("kvindexd %s: exit code %d, %q; want %d with %q", strings.Join(args, " "), got, errs, code, want)
		}
	}
	f(2, `unknown command "srve"`, "srve")
	f(2, "unknown flag: --listn", "serve", "--listn", ":1")
	f(2, "key=value", "serve", "--worker", "vllm-0")
	f(2, "unknown key", "serve", "--worker", "id=a,model=m,endpoint=tcp://h:1,colour=red")
	f(2, "--insecure", "serve", "--listen", "0.0.0.0:8099")
	f(2, "--log-level", "serve", "--log-level", "loud")
	f(2, "--log-format", "serve", "--log-format", "xml")
	f(2, "--allow-endpoint", "serve", "--allow-endpoint", "http://x/")
	f(2, "--auth-token-file", "serve", "--auth-token-file", filepath.Join(dir, "absent"))
	f(2, "holds no token", "serve", "--auth-token-file", file("empty", "\n# none\n"))
	f(2, "certificate and key", "serve", "--listen", "127.0.0.1:0", "--tls-cert", "x.pem")
	f(2, "settings.yaml:2: lisen: no flag", "serve", "--settings", file("settings.yaml", "# mine\nlisen: 127.0.0.1:0\n"))
	f(2, "invalid argument", "serve", "--max-index-bytes", "much")
	f(2, "would subscribe to one publisher", "serve", "--log-level", "error", "--listen", "127.0.0.1:0", "--worker", "id=a,model=m,endpoint=tcp://127.0.0.1:1", "--worker", "id=b,model=m,endpoint=tcp://localhost:1")
	f(2, "accepts 1 arg", "replay")
	f(2, "--speed", "replay", "x", "--speed", "fast")
	f(2, "--check needs --queries", "replay", "x", "--check")
	f(2, "--to publishes", "replay", "x", "--to", "tcp://127.0.0.1:*", "--serve", "127.0.0.1:0")
	f(1, "no such file", "replay", filepath.Join(dir, "absent.kvcap"))
	f(1, "absent.jsonl", "replay", capturePath("text"), "--queries", filepath.Join(dir, "absent.jsonl"))
	f(1, "bad.jsonl:2", "replay", capturePath("text"), "--queries", file("bad.jsonl", `{"request":{}}`+"\n{\n"))
	f(1, "expected", "replay", file("odd.kvcap", "not a capture"))
	f(2, "--out", "record", "tcp://127.0.0.1:5557")
	f(2, "nothing to record", "record", "-o", filepath.Join(dir, "o"))
	f(2, "endpoint", "record", "-o", filepath.Join(dir, "o"), "10.0.0.5:5557")
	f(2, "exists", "record", "-o", file("there.kvcap", ""), "tcp://127.0.0.1:5557")
	f(2, "--format", "publish", "--format", "json")
	f(2, "5558", "publish", "--endpoint", "tcp://127.0.0.1:5557", "--replay-endpoint", "tcp://127.0.0.1:5558", "--ranks", "2")
	f(2, "no prompt", "match")
	f(2, `token id 2: "x"`, "match", "--tokens", "1,x")
	f(2, "not both", "match", "--tokens", "1", "--file", "f")
	f(2, "--server", "match", "--tokens", "1", "--server", "ftp://h")
	f(1, "is `kvindexd serve` running there?", "match", "--tokens", "1", "--server", "127.0.0.1:1")
	f(1, "no such file", "snapshot", "inspect", filepath.Join(dir, "absent"))
	f(2, "--out", "snapshot", "export", dir)
}

// Every command has examples and says what it is for.
func TestHelp(t *testing.T) {
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		if c.Short == "" || c.Example == "" {
			t.Errorf("%s: no description or no example", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			if sub.Name() != "help" && sub.Name() != "completion" {
				visit(sub)
			}
		}
	}
	visit(newRoot())
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out := mustRun(t, "completion", shell); !strings.Contains(out, "kvindexd") {
			t.Errorf("completion %s: %q", shell, out)
		}
	}
	if out := mustRun(t, "version"); !strings.HasPrefix(out, "kvindexd ") {
		t.Errorf("version: %q", out)
	}
}

// The command line wins over the environment, the environment over the file.
func TestPrecedence(t *testing.T) {
	file := filepath.Join(t.TempDir(), "settings.yaml")
	content := "listen: 1.1.1.1:1\nmax_index_bytes: 3MiB\nmin-workers: 3\nworker: [id=a, id=b]\ninsecure: true\n"
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVINDEXD_MAX_INDEX_BYTES", "2MiB")
	t.Setenv("KVINDEXD_MIN_WORKERS", "2")
	t.Setenv("KVINDEXD_PEER", "http://a;http://b")
	cmd := newServe()
	addLogFlags(cmd.Flags())
	if err := cmd.ParseFlags([]string{"--min-workers", "1", "--settings", file}); err != nil {
		t.Fatal(err)
	}
	if err := fromEnvironment(cmd.Flags()); err != nil {
		t.Fatal(err)
	}
	if err := fromFile(cmd.Flags(), file); err != nil {
		t.Fatal(err)
	}
	f := func(flag, want string) {
		t.Helper()
		if got := cmd.Flags().Lookup(flag).Value.String(); got != want {
			t.Errorf("--%s is %s, want %s", flag, got, want)
		}
	}
	f("min-workers", "1")
	f("max-index-bytes", "2MiB")
	f("listen", "1.1.1.1:1")
	f("worker", "[id=a,id=b]")
	f("peer", "[http://a,http://b]")
	f("insecure", "true")

	t.Setenv("KVINDEXD_MIN_WORKERS", "many")
	code, _, errs := runs(t, "serve")
	if code != exitUsage || !strings.Contains(errs, "KVINDEXD_MIN_WORKERS") {
		t.Errorf("a bad variable: exit code %d, %s", code, errs)
	}
}

func TestByteSize(t *testing.T) {
	f := func(text string, want int64, back string) {
		t.Helper()
		var b byteSize
		if err := b.Set(text); err != nil || int64(b) != want || b.String() != back {
			t.Errorf("%s: %d %s %v, want %d %s", text, b, b.String(), err, want, back)
		}
	}
	f("0", 0, "0")
	f("1000", 1000, "1000")
	f("16MiB", 16<<20, "16MiB")
	f("1.5G", 3<<29, "1536MiB")
	f("2GB", 2e9, "1953125KiB")
	for _, bad := range []string{"", "-1", "x", "1XB", "1e30", "NaN"} {
		if err := new(byteSize).Set(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
