package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/normalize"
)

// asker sends requests to a test server and holds every answer against
// openapi.json.
type asker struct {
	t    testing.TB
	base string
	spec *schema
}

func newAsker(t testing.TB, base string) *asker { return &asker{t, base, loadOpenAPI(t)} }

// do asks and returns status and body; header pairs follow the body.
func (a *asker) do(method, path, body string, header ...string) (int, []byte) {
	a.t.Helper()
	req, err := http.NewRequest(method, a.base+path, strings.NewReader(body))
	if err != nil {
		a.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		a.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		a.t.Fatal(err)
	}
	if res.Header.Get("Content-Type") == "application/json" && res.StatusCode != 404 && res.StatusCode != 405 {
		if err := a.spec.answer(method, documentedPath(path), res.StatusCode, b); err != nil {
			a.t.Errorf("%v: %.300s", err, b)
		}
	}
	return res.StatusCode, b
}

func documentedPath(path string) string {
	path, _, _ = strings.Cut(path, "?")
	if rest, ok := strings.CutPrefix(path, "/v1/workers/"); ok {
		if strings.HasSuffix(rest, "/reset") {
			return "/v1/workers/{id}/reset"
		}
		return "/v1/workers/{id}"
	}
	return path
}

// want asks and holds status and a part of the answer against what is wanted.
func (a *asker) want(method, path, body string, status int, part string, header ...string) []byte {
	a.t.Helper()
	got, b := a.do(method, path, body, header...)
	if got != status || !bytes.Contains(b, []byte(part)) {
		a.t.Errorf("%s %s %.120s: %d %.400s, want %d with %s", method, path, body, got, b, status, part)
	}
	return b
}

func TestNativeRoutes(t *testing.T) {
	prompt := promptOf(1, 64)
	off := textFleet(t, 3, prompt)
	_, h := newTestServer(t, off.Fleet, func(c *Config) { c.Version = "test"; c.MinWorkers = 4 })
	a := newAsker(t, h.URL)
	body := string(jsonBody(prompt, `,"request_id":"r1","include":["zero","projection","hashes"],"sampling_params":{"n":1}`))
	b := a.want("POST", "/v1/match", body, 200, `"best":"w0"`)
	var m struct {
		Workers []struct {
			Device int
			Usable int `json:"usable_tokens"`
		}
		Hashes []struct {
			Local []uint64 `json:"block_hashes"`
			Seq   []uint64 `json:"sequence_hashes"`
		}
	}
	if err := json.Unmarshal(b, &m); err != nil || len(m.Workers) != 3 || m.Workers[0].Device != 64 || m.Workers[0].Usable != 48 {
		t.Fatalf("%v %s", err, b)
	}
	local, _ := json.Marshal(m.Hashes[0].Local)
	seq, _ := json.Marshal(m.Hashes[0].Seq)
	a.want("POST", "/v1/match", `{"block_hashes":`+string(local)+`,"hash_block_size":16}`, 200, `"device":64`)
	a.want("POST", "/v1/match", `{"sequence_hashes":`+string(seq)+`,"hash_block_size":16}`, 200, `"device":64`)
	a.want("POST", "/v1/match", `{"sequence_hashes":`+string(seq)+`,"hash_block_size":32}`, 200, `"workers":[]`)
	a.want("POST", "/v1/match", "["+body+"]", 200, `"device":64`)
	a.want("POST", "/v1/match", string(jsonBody(prompt, `,"workers":["w1"],"top_k":1`)), 200, `"best":"w1"`)
	a.want("POST", "/v1/match", string(jsonBody(prompt, `,"min_tokens":65`)), 200, `"workers":[]`)
	a.want("POST", "/v1/match", `{"model":"nobody","token_ids":[1]}`, 404, `"unknown_model"`)
	a.want("POST", "/v1/match", `{"namespace":"nowhere","token_ids":[1]}`, 404, `"unknown_model"`)

	batch := `{"requests":[` + body + `,{"token_ids":[-1]},{"tenant_id":"x","token_ids":[1]},` + body + `]}`
	b = a.want("POST", "/v1/match/batch", batch, 200, `"token_ids[0]"`)
	var responses struct{ Responses []map[string]any }
	if err := json.Unmarshal(b, &responses); err != nil || len(responses.Responses) != 4 || responses.Responses[1]["error"] == nil || responses.Responses[3]["best"] != "w0" {
		t.Errorf("%v %s", err, b)
	}
	a.want("POST", "/v1/match/batch", "["+body+"]", 200, `"best":"w0"`)
	a.want("POST", "/v1/match/batch", "["+strings.Repeat("{},", 256)+"{}]", 400, "too_many_requests_in_batch")
	a.want("POST", "/v1/match/batch", `{}`, 400, "missing_field")

	a.want("POST", "/v1/explain", string(jsonBody(promptOf(2, 64), "")), 200, `"never_stored"`)
	a.want("POST", "/v1/explain", string(jsonBody(prompt, `,"cache_salt":"s"`)), 200, `"other_salt"`)
	a.want("POST", "/v1/explain", `{"sequence_hashes":[1],"hash_block_size":32}`, 200, `"other_block_size"`)

	a.want("POST", "/v1/outcomes", `{"request_id":"r1","model":"m","worker":"w0","predicted_tokens":48,"cached_tokens":16,"prompt_tokens":64}`, 200, `"ok"`)
	a.want("POST", "/v1/outcomes", `{"model":"m","worker":"zz","predicted_tokens":48,"cached_tokens":16,"prompt_tokens":64}`, 404, "unknown_worker")
	a.want("POST", "/v1/outcomes", `{"model":"m","worker":"w0","predicted_tokens":-1,"cached_tokens":16,"prompt_tokens":64}`, 400, "predicted_tokens")
	a.want("POST", "/v1/outcomes", `{"model":"m"}`, 400, "missing_field")

	a.want("GET", "/v1/workers", "", 200, `"w2"`)
	a.want("GET", "/v1/workers/w1", "", 200, `"resident":{"device":4`)
	a.want("GET", "/v1/workers/zz", "", 404, "unknown_worker")
	a.want("GET", "/v1/models", "", 200, `"block_sizes":[16]`)
	a.want("GET", "/healthz", "", 200, `"test"`)
	a.want("GET", "/readyz", "", 503, `3 of at least 4 workers`)
	a.want("GET", "/openapi.json", "", 200, `"3.1.0"`)
	a.want("GET", "/", "", 200, `<!doctype html>`)
	a.want("GET", "/nothing", "", 404, "not_found")
	a.want("DELETE", "/v1/match", "", 405, "method_not_allowed")
	const spec = `{"model":"m","endpoint":"tcp://127.0.0.1:1"}`
	a.want("PUT", "/v1/workers/x", spec, 409, "serves_capture")
	a.want("DELETE", "/v1/workers/w0", "", 409, "serves_capture")
	a.want("POST", "/v1/workers/w0/reset", "", 409, "serves_capture")
	a.want("POST", "/register", `{"instance_id":1,"model_name":"m","block_size":16,"endpoint":"tcp://127.0.0.1:1"}`, 409, "serves a capture")
	a.want("POST", "/unregister", `{"instance_id":1,"model_name":"m"}`, 404, "no such")
	metrics := a.want("GET", "/metrics", "", 200, "kvindexd_outcomes_total{result=\"too_long\"} 1")
	for _, line := range []string{`kvindexd_query_duration_seconds_count{route="/v1/match"}`, `kvindexd_http_errors_total{reason="unknown_model",route="/v1/match"} 2`, "kvindexd_query_matched_blocks_sum", `kvindexd_stream_resident_blocks{`} {
		if !bytes.Contains(metrics, []byte(line)) {
			t.Errorf("metrics lack %s", line)
		}
	}
}

func TestWrongWorker(t *testing.T) {
	rows := []toldRow{{"a", 0, 64}, {"b", 0, 64}, {"c", 1, 16}}
	f := func(worker string, rank int, want bool) {
		t.Helper()
		if got := wrongWorker(rows, &Outcome{Worker: worker, Rank: rank}); got != want {
			t.Errorf("%s/%d: %v, want %v", worker, rank, got, want)
		}
	}
	f("a", 0, false)
	f("b", 0, false)
	f("c", 1, true)
	f("c", 0, true)
	if wrongWorker(nil, &Outcome{Worker: "a"}) {
		t.Error("a forgotten request has a wrong worker")
	}
}

func TestRecentForgetsTheOldest(t *testing.T) {
	r := newRecent()
	for i := range recentAnswers + 10 {
		r.add(fmt.Sprint(i), []candidate{{member: &fleet.Member{Worker: "w"}}})
	}
	r.add("12", nil)
	if r.of("9") != nil || r.of("10") == nil || len(r.of("12")) != 0 || len(r.at) != recentAnswers {
		t.Errorf("%v %v %d", r.of("9"), r.of("10"), len(r.at))
	}
}

// The same question in both encodings has the same answer.
func TestMsgpackAnswers(t *testing.T) {
	prompt := promptOf(1, 64)
	off := textFleet(t, 3, prompt)
	_, h := newTestServer(t, off.Fleet, nil)
	a := newAsker(t, h.URL)
	for _, path := range []string{"/v1/match", "/v1/explain", "/v1/workers", "/v1/models", "/v1/workers/zz"} {
		method, body := "POST", string(msgpackBody(t, prompt))
		if path != "/v1/match" && path != "/v1/explain" {
			method, body = "GET", ""
		}
		_, packed := a.do(method, path, body, "Content-Type", "application/msgpack", "Accept", "application/msgpack")
		_, text := a.do(method, path, body, "Content-Type", "application/msgpack", "Accept", "application/json")
		var fromText, fromPacked any
		if err := json.Unmarshal(text, &fromText); err != nil {
			t.Fatalf("%s: %v %s", path, err, text)
		}
		if err := msgpack.Unmarshal(packed, &fromPacked); err != nil {
			t.Fatalf("%s: %v %x", path, err, packed)
		}
		again, _ := json.Marshal(fromPacked)
		var normal any
		json.Unmarshal(again, &normal)
		if !reflect.DeepEqual(withoutTimes(normal), withoutTimes(fromText)) {
			t.Errorf("%s:\n%s\n%s", path, again, text)
		}
	}
}

// withoutTimes leaves out what differs between two moments.
func withoutTimes(v any) any {
	switch v := v.(type) {
	case map[string]any:
		delete(v, "age_ms")
		for _, e := range v {
			withoutTimes(e)
		}
	case []any:
		for _, e := range v {
			withoutTimes(e)
		}
	}
	return v
}

// What the appenders write, encoding/json and msgpack read back.
func TestEncodeWhole(t *testing.T) {
	r := &MatchResponse{
		Model: "m\"\n", LoraName: "l", RequestID: "id", PromptTokens: 1 << 20,
		MM:      MMAnswer{Mode: "mixed", Reason: normalize.NoImageTokenID, Param: "p", Images: 2, ImageTokenID: 9, HasImageTokenID: true},
		Workers: []WorkerRow{{Worker: "w", Rank: 300, Device: 70000, Host: 1 << 33, UsableReason: "u", Reason: "x", Age: -1}, {Worker: strings.Repeat("é", 200), Seq: 1<<64 - 1, HasSeq: true, Age: 1e9}},
		Refused: []Refusal{{Worker: "r"}}, Best: "w",
		Projection: &Projected{Shape: normalize.Shape{BlockSize: 16, Window: 2}, RoutingTokenIDs: make([]uint32, 70000), Markers: []string{"a"}},
		Hashes:     []Hashed{{Shape: normalize.Shape{BlockSize: 16, Window: normalize.Pairs}, Locals: make([]normalize.LocalHash, 20), Seqs: make([]normalize.SequenceHash, 20)}},
	}
	var text, packed encoder
	text.reset(false)
	r.encode(&text)
	packed.reset(true)
	r.encode(&packed)
	d := json.NewDecoder(bytes.NewReader(text.b))
	d.UseNumber()
	var a, b any
	if err := d.Decode(&a); err != nil {
		t.Fatalf("%v: %.300s", err, text.b)
	}
	if err := msgpack.Unmarshal(packed.b, &b); err != nil {
		t.Fatal(err)
	}
	asText, _ := json.Marshal(b)
	d = json.NewDecoder(bytes.NewReader(asText))
	d.UseNumber()
	var c any
	if d.Decode(&c); !reflect.DeepEqual(a, c) {
		t.Errorf("%.500s\n%.500s", text.b, asText)
	}
	var v any
	json.Unmarshal(text.b, &v)
	s := loadOpenAPI(t)
	if err := s.check(dig(s.doc, "components", "schemas", "MatchResponse"), v, "answer"); err != nil {
		t.Error(err)
	}
}

// Worker changes over HTTP, on a fleet that dials nothing.
func TestWorkerRoutes(t *testing.T) {
	f, err := fleet.New(fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	_, h := newTestServer(t, f, nil)
	a := newAsker(t, h.URL)
	spec := `{"model":"m","endpoint":"tcp://127.0.0.1:5557","replay_endpoint":"tcp://127.0.0.1:5657","image_token_id":9,"exact_mm":true,"loras":[{"name":"sql"}]}`
	a.want("PUT", "/v1/workers/w0", spec, 201, `"believed"`)
	first := a.want("PUT", "/v1/workers/w0", spec, 200, `"generation":1`)
	a.want("PUT", "/v1/workers/w0", strings.Replace(spec, "5557", "5558", 1), 200, `"generation":2`)
	if !bytes.Contains(first, []byte(`"endpoint":"tcp://127.0.0.1:5557"`)) {
		t.Errorf("%s", first)
	}
	a.want("PUT", "/v1/workers/w1", spec[:len(spec)-1]+`,"id":"w2"}`, 400, "conflicting_fields")
	a.want("PUT", "/v1/workers/w1", strings.Replace(spec, "5557", "5558", 1), 409, "worker_conflict")
	a.want("PUT", "/v1/workers/w1", `{"model":"m","endpoint":"tcp://8.8.8.8:5557"}`, 403, "endpoint_not_allowed")
	a.want("PUT", "/v1/workers/w1", `{"model":"m","endpoint":"nonsense"}`, 400, "")
	a.want("PUT", "/v1/workers/w1", `{"model":"m"}`, 400, "invalid_worker")
	a.want("PUT", "/v1/workers/w1", `{"model":5}`, 400, "invalid_field")
	a.want("PUT", "/v1/workers/w1", `{"model":"m","model":"m"}`, 400, "duplicate_field")
	a.want("PUT", "/v1/workers/w1", `{"model":"m","tenant_id":"t"}`, 400, "unknown_isolation_field")
	a.want("PUT", "/v1/workers/w1", `{"model":"m","namspace":"t"}`, 400, "unknown_isolation_field")
	a.want("PUT", "/v1/workers/w1", `nonsense`, 400, "malformed_body")
	a.want("PUT", "/v1/workers/w1", `{"model":"m","endpoint":"tcp://127.0.0.1:6000","future":{"x":1}}`, 201, `"id":"w1"`)
	a.want("POST", "/v1/workers/w1/reset", "", 200, "ok")
	a.want("POST", "/v1/workers/zz/reset", "", 404, "unknown_worker")
	a.want("DELETE", "/v1/workers/w1", "", 200, "ok")
	a.want("DELETE", "/v1/workers/w1", "", 404, "unknown_worker")
	a.want("GET", "/v1/workers", "", 200, `"w0"`)
	a.want("POST", "/v1/match", `{"model":"sql","token_ids":[1]}`, 200, `"lora_name":"sql"`)
	a.want("POST", "/v1/match", `{"model":"sql","lora_name":"other","token_ids":[1]}`, 400, "lora_contradicts_model")
	a.want("PUT", "/v1/workers/w9", `{"model":"m2","endpoint":"tcp://127.0.0.1:6009"}`, 201, "m2")
	a.want("POST", "/v1/match", `{"token_ids":[1]}`, 409, "ambiguous_model")
}

// Images against workers that know their image token and one that does not.
func TestExactRefusals(t *testing.T) {
	c := openCapture(t, "images")
	c.feed(1 << 30)
	_, h := newTestServer(t, c.off.Fleet, nil)
	a := newAsker(t, h.URL)
	var exact, refusedAll int
	for _, q := range questions(t, "images") {
		if len(q.NotExact) == 0 || !bytes.Contains(q.Request, []byte(`"features"`)) {
			continue
		}
		var r map[string]any
		json.Unmarshal(q.Request, &r)
		r["mm"] = "exact"
		body, _ := json.Marshal(r)
		if status, b := a.do("POST", "/v1/match", string(body)); status == 200 && bytes.Contains(b, []byte("no_image_token_id")) {
			exact++
		}
		var names []string
		for name := range q.NotExact {
			names = append(names, strings.Split(name, "/")[0])
		}
		r["workers"] = names
		body, _ = json.Marshal(r)
		if status, b := a.do("POST", "/v1/match", string(body)); status == 409 && bytes.Contains(b, []byte("exact_mm_unavailable")) && bytes.Contains(b, []byte(`"text_only_device"`)) {
			refusedAll++
		}
	}
	if exact == 0 || refusedAll == 0 {
		t.Errorf("%d answers with a refusal, %d refused wholly", exact, refusedAll)
	}
	const bad = `{"model":"vl","token_ids":[1,2],"mm":"exact","features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":18446744073709551615,"length":1}]}}}`
	a.want("POST", "/v1/match", bad, 400, "range_out_of_bounds")
	a.want("POST", "/v1/match", strings.Replace(bad, `"exact"`, `"auto"`, 1), 200, "text_only")
}
