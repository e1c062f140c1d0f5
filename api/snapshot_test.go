package api

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/store"
)

func snapshotsIn(t testing.TB, dir string, peers ...string) *fleet.Snapshots {
	t.Helper()
	s, err := fleet.OpenSnapshots(t.Context(), fleet.SnapshotOptions{
		Dir: dir, Logger: quiet(), Interval: -1, Peers: peers, Store: store.Options{ValueLogBytes: 2 << 20},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(t.Context(), nil) })
	return s
}

func TestSnapshotRoute(t *testing.T) {
	off := textFleet(t, 3, promptOf(1, 64))
	_, h := newTestServer(t, off.Fleet, nil)
	newAsker(t, h.URL).want("POST", "/v1/snapshot", "", 409, "no_snapshots")
	_, h = newTestServer(t, off.Fleet, func(c *Config) { c.Snapshots = snapshotsIn(t, "") })
	newAsker(t, h.URL).want("POST", "/v1/snapshot", "", 409, "no_snapshots")
	_, h = newTestServer(t, off.Fleet, func(c *Config) { c.Snapshots = snapshotsIn(t, t.TempDir()) })
	a := newAsker(t, h.URL)
	a.want("POST", "/v1/snapshot", "", 200, `"streams":3`)
	a.want("POST", "/v1/snapshot", "", 200, `"generation":2`)
	a.want("GET", "/metrics", "", 200, "kvindexd_snapshot_written_total 2")
	a.want("GET", "/metrics", "", 200, "kvindexd_snapshot_age_seconds")
	none, err := fleet.New(fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	_, h = newTestServer(t, none, func(c *Config) { c.Snapshots = snapshotsIn(t, t.TempDir()) })
	newAsker(t, h.URL).want("POST", "/v1/snapshot", "", 409, "nothing_to_keep")
}

func dumpOf(t testing.TB, url string) (lines []string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if r.StatusCode != 200 || r.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatalf("%s: %d %s", url, r.StatusCode, r.Header.Get("Content-Type"))
	}
	in := bufio.NewScanner(r.Body)
	in.Buffer(nil, 2<<20)
	for in.Scan() {
		if !json.Valid(in.Bytes()) {
			t.Fatalf("not JSON: %.200s", in.Text())
		}
		lines = append(lines, in.Text())
	}
	return lines
}

func TestDumpRoute(t *testing.T) {
	off := textFleet(t, 3, promptOf(1, 64))
	s, h := newTestServer(t, off.Fleet, nil)
	lines := dumpOf(t, h.URL+"/v1/dump")
	if !strings.Contains(lines[0], `"version":1`) || lines[len(lines)-1] != `{"end":{"sets":1,"streams":3}}` {
		t.Errorf("%q", lines)
	}
	if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, `"worker":"w1","rank":0,"seq":`) }) {
		t.Errorf("w1's position is missing: %q", lines)
	}
	if got := dumpOf(t, h.URL+"/v1/dump?model=m&namespace=default&role=aggregated"); len(got) != len(lines) {
		t.Errorf("narrowed to all there is: %q", got)
	}
	if got := dumpOf(t, h.URL+"/v1/dump?model=other"); got[len(got)-1] != `{"end":{"sets":0,"streams":0}}` {
		t.Errorf("of another model: %q", got)
	}
	a := newAsker(t, h.URL)
	a.want("GET", "/v1/dump?modle=m", "", 400, "modle")
	for range maxDumps {
		s.dumps <- struct{}{}
	}
	a.want("GET", "/v1/dump", "", 429, "overloaded")
}

// TestJoiningReplica: what a peer serves over HTTP is what the joining replica
// answers.
func TestJoiningReplica(t *testing.T) {
	prompt := promptOf(1, 64)
	off := textFleet(t, 1, prompt)
	_, h := newTestServer(t, off.Fleet, nil)
	sn := snapshotsIn(t, "", h.URL+"/")
	joins, err := fleet.New(fleet.Options{Logger: quiet(), Restore: sn.Restore,
		Workers: []fleet.WorkerSpec{{ID: "w0", Model: "m", Endpoint: "tcp://127.0.0.1:1", BlockSize: 16}}})
	if err != nil {
		t.Fatal(err)
	}
	_, h = newTestServer(t, joins, nil)
	newAsker(t, h.URL).want("POST", "/v1/match", string(jsonBody(prompt, "")), 200, `"device":64,"host":64,"disk":64,"usable_tokens":48`)
	newAsker(t, h.URL).want("POST", "/v1/match", string(jsonBody(prompt, "")), 200, `"state":"restored"`)
}

func TestPeersAreTold(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 16))
	var told [][]string
	_, h := newTestServer(t, off.Fleet, func(c *Config) {
		c.Peers = []string{"http://a"}
		c.PeersChanged = func(urls []string) { told = append(told, urls) }
	})
	a := newAsker(t, h.URL)
	a.want("POST", "/register_peer", `{"url":"http://b/"}`, 201, "ok")
	a.want("POST", "/register_peer", `{"url":"http://b"}`, 201, "ok") // is there already
	a.want("POST", "/deregister_peer", `{"url":"http://a"}`, 200, "ok")
	a.want("POST", "/deregister_peer", `{"url":"http://a"}`, 404, "")
	b, _ := json.Marshal(told)
	if want := `[["http://a","http://b"],["http://b"]]`; !bytes.Equal(b, []byte(want)) {
		t.Errorf("told %s, want %s", b, want)
	}
}
