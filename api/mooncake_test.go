package api

import (
	"bytes"
	"encoding/binary"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// The requests of a client of Mooncake's conductor, as its documentation and its
// proxy have them: msgpack both ways with nothing said in Accept, tokens as one
// bin of int32, ids that are strings, and the conductor's own words in answers.
func TestMooncakeConductor(t *testing.T) {
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{
		"a0": {Worker: "engine-a", Model: "test-model", BlockSize: 16},
		"a1": {Worker: "engine-a", DPRank: 1, Model: "test-model", BlockSize: 16},
		"b":  {Worker: "engine-b", Model: "test-model", BlockSize: 16, Namespace: "tenant-a/default"},
	}}
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	prompt := promptOf(3, 64)
	feedEvents(t, off, "a0", 0, storeOf(prompt[:32], 16, 0))
	host := storeOf(prompt[32:48], 16, 2)
	host.Parent, host.HasParent, host.Medium = 2, true, []byte("CPU")
	feedEvents(t, off, "a0", 1, host)
	feedEvents(t, off, "a1", 0, storeOf(prompt[:16], 16, 0))
	feedEvents(t, off, "b", 0, storeOf(prompt, 16, 0))
	_, srv := newTestServer(t, off.Fleet, nil)

	var tokens []byte
	for _, id := range prompt {
		tokens = binary.LittleEndian.AppendUint32(tokens, id)
	}
	hits := map[string]any{
		"longest_matched": int64(48), "gpu": int64(32), "cpu": int64(48), "disk": int64(48),
		"dp": map[string]any{"0": int64(32), "1": int64(16)},
		"rank_matches": map[string]any{
			"0": map[string]any{"gpu": int64(32), "cpu": int64(48), "disk": int64(48)},
			"1": map[string]any{"gpu": int64(16), "cpu": int64(16), "disk": int64(16)},
		},
	}
	nobody := map[string]any{}
	for _, c := range []struct {
		name      string
		request   map[string]any
		status    int
		instances any
	}{
		{"as the proxy asks", map[string]any{"model": "test-model", "block_size": 16, "token_ids": tokens, "tenant_id": "default", "lora_name": ""},
			200, map[string]any{"engine-a": hits}},
		{"the least", map[string]any{"model": "test-model", "block_size": 16, "token_ids": tokens}, 200, map[string]any{"engine-a": hits}},
		{"tokens as an array", map[string]any{"model": "test-model", "block_size": 16, "token_ids": prompt}, 200, map[string]any{"engine-a": hits}},
		{"one instance", map[string]any{"model": "test-model", "block_size": 16, "token_ids": tokens, "instance_id": "engine-a"}, 200, map[string]any{"engine-a": hits}},
		{"another instance", map[string]any{"model": "test-model", "block_size": 16, "token_ids": tokens, "instance_id": "engine-z"}, 200, nobody},
		{"with a salt", map[string]any{"model": "test-model", "block_size": 16, "token_ids": tokens, "cache_salt": "w8a8"}, 200, nobody},
		{"with an adapter", map[string]any{"model": "test-model", "block_size": 16, "token_ids": tokens, "lora_name": "sql-adapter"}, 200, nobody},
		{"an unknown model", map[string]any{"model": "another", "block_size": 16, "token_ids": tokens}, 404, nil},
		{"an unknown tenant", map[string]any{"model": "test-model", "tenant_id": "z", "block_size": 16, "token_ids": tokens}, 404, nil},
		{"no model", map[string]any{"block_size": 16, "token_ids": tokens}, 400, nil},
		{"no tokens", map[string]any{"model": "test-model", "block_size": 16}, 400, nil},
	} {
		status, body := askMsgpack(t, srv.URL+"/query", c.request)
		if status != c.status {
			t.Errorf("%s: %d %v, want %d", c.name, status, body, c.status)
			continue
		}
		if c.instances == nil {
			if text, _ := body["error"].(string); text == "" {
				t.Errorf("%s: %v, want an error text", c.name, body)
			}
			continue
		}
		if d := cmp.Diff(c.instances, body["instances"]); d != "" {
			t.Errorf("%s: instances (-want +got):\n%s", c.name, d)
		}
	}
	status, body := askMsgpack(t, srv.URL+"/query", map[string]any{"model": "test-model", "tenant_id": "tenant-a", "block_size": 16, "token_ids": tokens})
	if instances, _ := body["instances"].(map[string]any); status != 200 || len(instances) != 1 || instances["engine-b"] == nil {
		t.Errorf("a tenant of its own: %d %v", status, body)
	}
}

func TestMooncakeRegistrations(t *testing.T) {
	f, err := fleet.New(fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	_, srv := newTestServer(t, f, nil)
	registration := func(rank int, endpoint string) map[string]any {
		return map[string]any{
			"endpoint": endpoint, "replay_endpoint": "", "type": "vLLM", "modelname": "test-model", "lora_name": "", "tenant_id": "default",
			"instance_id": "engine-a", "block_size": 16, "dp_rank": rank, "cache_group": 0,
			"hash_profile": map[string]any{"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0", "index_projection": "low64_be"},
		}
	}
	registered := map[string]any{"status": "registered successfully", "instance_id": "engine-a"}
	removed := func(key string) map[string]any {
		return map[string]any{"status": "unregistered successfully", "removed_instances": []any{key}}
	}
	key := func(rank int) map[string]any {
		return map[string]any{"instance_id": "engine-a", "tenant_id": "default", "dp_rank": rank}
	}
	for _, c := range []struct {
		name, path string
		request    map[string]any
		status     int
		want       map[string]any // nil: an error text
	}{
		{"rank 0", "/register", registration(0, "tcp://127.0.0.1:5557"), 200, registered},
		{"rank 0 again", "/register", registration(0, "tcp://127.0.0.1:5557"), 200, registered},
		{"rank 1", "/register", registration(1, "tcp://127.0.0.1:5567"), 200, registered},
		{"another endpoint for rank 1", "/register", registration(1, "tcp://127.0.0.1:5577"), 409, nil},
		{"rank 2 on rank 0's endpoint", "/register", registration(2, "tcp://127.0.0.1:5557"), 409, nil},
		{"no endpoint", "/register", map[string]any{"modelname": "test-model", "instance_id": "engine-a", "block_size": 16}, 400, nil},
		{"rank 1 leaves", "/unregister", key(1), 200, removed("engine-a|default|1")},
		{"rank 1 leaves again", "/unregister", key(1), 404, nil},
		{"rank 0 leaves, of another tenant", "/unregister", map[string]any{"instance_id": "engine-a", "tenant_id": "z", "dp_rank": 0}, 404, nil},
		{"rank 0 leaves", "/unregister", key(0), 200, removed("engine-a|default|0")},
	} {
		status, body := askMsgpack(t, srv.URL+c.path, c.request)
		if status != c.status {
			t.Errorf("%s: %d %v, want %d", c.name, status, body, c.status)
			continue
		}
		if c.want == nil {
			if text, _ := body["error"].(string); text == "" || len(body) != 1 {
				t.Errorf("%s: %v, want an error text", c.name, body)
			}
			continue
		}
		if d := cmp.Diff(c.want, body); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
}

// askMsgpack posts v and reads the answer as the conductor's clients do.
func askMsgpack(t *testing.T, url string, v any) (status int, body map[string]any) {
	t.Helper()
	b, err := msgpack.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/msgpack")
	req.Header.Set("Accept", "*/*")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if got := res.Header.Get("Content-Type"); got != "application/msgpack" {
		t.Errorf("%s: an answer in %s", url, got)
	}
	d := msgpack.NewDecoder(res.Body)
	d.UseLooseInterfaceDecoding(true)
	if err := d.Decode(&body); err != nil {
		t.Fatalf("%s: %d: %v", url, res.StatusCode, err)
	}
	return res.StatusCode, body
}
