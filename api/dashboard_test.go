package api

import (
	"bytes"
	"context"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// browser is a headless Chromium, or a reason to skip.
func browser(t *testing.T) string {
	t.Helper()
	for _, name := range []string{os.Getenv("KVINDEXD_BROWSER"), "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	const reason = "no Chromium is installed (KVINDEXD_BROWSER names another)"
	if os.Getenv("KVINDEXD_REQUIRE_BROWSER") == "1" {
		t.Fatal(reason)
	}
	t.Skip(reason)
	return ""
}

// open loads a page, lets its scripts run, and returns the text of what it then
// shows and what the browser's console says.
func open(t *testing.T, program, address string) (page, console string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir="+t.TempDir(),
		"--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", address)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, &log)
	}
	_, body, _ := strings.Cut(out.String(), "<main>")
	body, _, _ = strings.Cut(body, "<script>")
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "CONSOLE") {
			console += line
		}
	}
	return regexp.MustCompile(`<[^>]*>`).ReplaceAllString(body, " "), console
}

// The page in a real browser: what is there, who is in trouble, and why a match
// ended, with names that try to be markup.
func TestDashboard(t *testing.T) {
	program := browser(t)
	const hostile = `<img src=x onerror="document.title='taken'">`
	prompt := promptOf(8, 64)
	off, err := fleet.NewOffline(zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{
		"w0": {Worker: "w0", Model: "m", BlockSize: 16}, "w1": {Worker: hostile, Model: "m", BlockSize: 16},
	}}, fleet.Replies{}, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	feedEvents(t, off, "w0", 0, storeOf(prompt[:32], 16, 0))
	_, srv := newTestServer(t, off.Fleet, func(c *Config) { c.Version = "v-test" })
	f := func(fragment string, want ...string) {
		t.Helper()
		page, console := open(t, program, srv.URL+"/"+fragment)
		for _, w := range want {
			if !strings.Contains(page, w) {
				t.Errorf("%.30s: the page lacks %q:\n%s", fragment, w, page)
			}
		}
		if console != "" {
			t.Errorf("%.30s: %s", fragment, console)
		}
	}
	body := url.PathEscape(string(jsonBody(prompt, `,"include":["zero"]`)))
	f("", "streams live", "1 / 2", "connecting: &lt;img", "nothing heard yet", "aggregated")
	f("#match="+body, "64 tokens", "vLLM takes", "why?")
	f("#explain="+body, "device ends at block 2: block 2 (tokens 32 to 47) was never stored", "nothing_stored", "vLLM would take 32")
	f("#match="+url.PathEscape(`{"token_ids":[-1]}`), "must be a token id")
}
