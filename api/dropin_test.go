package api

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

func TestDropInRegistrations(t *testing.T) {
	f, err := fleet.New(fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	_, h := newTestServer(t, f, nil)
	a := newAsker(t, h.URL)
	reg := func(more string) string {
		return `{"instance_id":7,"endpoint":"tcp://127.0.0.1:5557","model_name":"m","block_size":16` + more + `}`
	}
	a.want("POST", "/register", reg(""), 201, `{"status":"ok"}`)
	a.want("POST", "/register", reg(""), 201, `{"status":"ok"}`)
	a.want("POST", "/register", reg(`,"dp_rank":0,"routing_group":"default","tenant_id":"default","type":"vllm","additional_salt":"w8a8"`), 201, "ok")
	a.want("POST", "/register", `{"instance_id":7,"endpoint":"tcp://127.0.0.1:9","model_name":"m","block_size":16}`, 409, `{"error":"`)
	a.want("POST", "/register", `{"instance_id":7,"endpoint":"tcp://127.0.0.1:5557","modelname":"m","block_size":32}`, 409, "block_size 16")
	a.want("POST", "/register", `{"instance_id":7,"endpoint":"tcp://127.0.0.1:5558","modelname":"m","block_size":16,"dp_rank":1}`, 201, "ok")
	a.want("POST", "/register", `{"instance_id":"abc","endpoint":"tcp://127.0.0.1:6000","model_name":"m","block_size":16,"routing_group":"blue"}`, 201, "ok")
	a.want("POST", "/register", `{"instance_id":8,"endpoint":"nonsense","model_name":"m"}`, 400, `{"error":"`)
	a.want("POST", "/register", `{"instance_id":8,"endpoint":"tcp://8.8.8.8:1","model_name":"m"}`, 400, "not allowed")
	a.want("POST", "/register", `{"instance_id":-8,"endpoint":"tcp://127.0.0.1:1","model_name":"m"}`, 400, "instance_id")
	a.want("POST", "/register", `{"instance_id":8,"model_name":"m"}`, 400, "endpoint")
	a.want("POST", "/register", `{"instance_id":8,"endpoint":"tcp://127.0.0.1:1"}`, 400, "model_name")
	a.want("POST", "/register", reg(`,"namespace":"x"`), 400, "namespace")

	var instances []instanceAnswer
	if err := json.Unmarshal(a.want("GET", "/workers?model_name=m&routing_group=default", "", 200, `"instance_id":7`), &instances); err != nil || len(instances) != 1 {
		t.Fatalf("%v %v", err, instances)
	}
	if got, want := instances[0].Endpoints, map[string]string{"0": "tcp://127.0.0.1:5557", "1": "tcp://127.0.0.1:5558"}; !reflect.DeepEqual(got, want) || instances[0].BlockSize != 16 {
		t.Errorf("%+v", instances[0])
	}
	a.want("GET", "/workers?routing_group=blue", "", 200, `"instance_id":"abc"`)
	a.want("GET", "/workers?model_name=zz", "", 200, `[]`)

	a.want("POST", "/unregister", `{"instance_id":7,"model_name":"m","dp_rank":1}`, 200, "ok")
	a.want("POST", "/unregister", `{"instance_id":7,"model_name":"m","dp_rank":1}`, 404, `{"error":"`)
	a.want("POST", "/unregister", `{"instance_id":7,"model_name":"m","routing_group":"blue"}`, 404, "")
	a.want("POST", "/unregister", `{"instance_id":7,"model_name":"m"}`, 200, "ok")
	a.want("POST", "/unregister", `{"instance_id":"abc","model_name":"m","tenant_id":"other"}`, 404, "")
	a.want("POST", "/unregister", `{"instance_id":"abc","model_name":"m","dp_rank":0}`, 200, "ok")
	a.want("GET", "/workers", "", 200, `[]`)

	a.want("GET", "/peers", "", 200, `[]`)
	a.want("POST", "/register_peer", `{"url":"http://10.0.0.2:8099/"}`, 201, "ok")
	a.want("POST", "/register_peer", `{"url":"http://10.0.0.2:8099"}`, 201, "ok")
	a.want("POST", "/register_peer", `{"url":"file:///etc/passwd"}`, 400, "url")
	a.want("GET", "/peers", "", 200, `["http://10.0.0.2:8099"]`)
	a.want("POST", "/deregister_peer", `{"url":"http://10.0.0.2:8099"}`, 200, "ok")
	a.want("POST", "/deregister_peer", `{"url":"http://10.0.0.2:8099"}`, 404, `{"error":"`)
	a.want("GET", "/health", "", 200, "")
}

// The scores of two ranks, one with a host tier, field by field: the shapes and
// figures are those that Dynamo's standalone indexer 1.6 gives for the same
// events, and rank_matches beside them.
func TestDropInQuery(t *testing.T) {
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{
		"a": {Worker: "7", Model: "m", BlockSize: 4},
		"b": {Worker: "7", DPRank: 1, Model: "m", BlockSize: 4},
		"c": {Worker: "8", Model: "m", BlockSize: 4},
		"d": {Worker: "9", Model: "m", BlockSize: 4, Namespace: "acme/blue"},
	}}
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	prompt := promptOf(3, 24)
	feedEvents(t, off, "a", 0, storeOf(prompt[:8], 4, 0))
	host := storeOf(prompt[8:16], 4, 2)
	host.Parent, host.HasParent, host.Medium = 2, true, []byte("CPU_PINNED")
	disk := storeOf(prompt[16:20], 4, 4)
	disk.Parent, disk.HasParent, disk.Medium = 4, true, []byte("DISK")
	feedEvents(t, off, "a", 1, host, disk)
	feedEvents(t, off, "b", 0, storeOf(prompt[:12], 4, 0))
	feedEvents(t, off, "c", 0, storeOf(promptOf(4, 8), 4, 0))
	feedEvents(t, off, "d", 0, storeOf(prompt, 4, 0))
	_, srv := newTestServer(t, off.Fleet, nil)
	a := newAsker(t, srv.URL)

	query := func(rest string) string {
		ids, _ := json.Marshal(prompt)
		return `{"token_ids":` + string(ids) + rest + `}`
	}
	const want = `{"scores":{"7":{"1":12,"0":8}},"frequencies":[],"instances":{"7":{"longest_matched":20,"gpu":12,"cpu":16,"disk":20,"dp":{"1":12,"0":8},` +
		`"rank_matches":{"1":{"gpu":12,"cpu":12,"disk":12},"0":{"gpu":8,"cpu":16,"disk":20}}}}}`
	for _, rest := range []string{`,"model_name":"m"`, `,"model":"m","routing_group":"default"`, `,"model_name":"m","instance_id":7`, `,"model_name":"m","cache_salt":null,"block_size":4`} {
		if got := string(a.want("POST", "/query", query(rest), 200, "")); got != want {
			t.Errorf("%s:\n%s\n%s", rest, got, want)
		}
	}
	a.want("POST", "/query", query(`,"model_name":"m","instance_id":"8"`), 200, `{"scores":{},"frequencies":[],"instances":{}}`)
	a.want("POST", "/query", query(`,"model_name":"m","cache_salt":"s"`), 200, `{"scores":{},`)
	a.want("POST", "/query", query(`,"model_name":"m","tenant_id":"acme","routing_group":"blue"`), 200, `{"scores":{"9":{"0":24}}`)
	a.want("POST", "/query", query(`,"model_name":"m","tenant_id":"acme"`), 404, `{"error":"`)
	a.want("POST", "/query", query(`,"model_name":"zz"`), 404, `{"error":"`)
	a.want("POST", "/query", query(`,"model_name":"m","namespace":"acme/blue"`), 400, "namespace")
	a.want("POST", "/query", query(``), 400, "model_name")
	a.want("POST", "/query", `{"model_name":"m"}`, 400, "token_ids")

	var hashes struct {
		Hashes []struct {
			Local []uint64 `json:"block_hashes"`
			Seq   []uint64 `json:"sequence_hashes"`
		}
	}
	b := a.want("POST", "/v1/match", query(`,"model":"m","namespace":"default","include":["hashes"]`), 200, "")
	if err := json.Unmarshal(b, &hashes); err != nil || len(hashes.Hashes) == 0 {
		t.Fatal(err, string(b))
	}
	signed := make([]int64, len(hashes.Hashes[0].Local))
	for i, v := range hashes.Hashes[0].Local {
		signed[i] = int64(v)
	}
	seq, _ := json.Marshal(hashes.Hashes[0].Seq)
	for _, body := range []string{
		fmt.Sprintf(`{"model_name":"m","block_hashes":%s}`, mustJSON(signed)),
		fmt.Sprintf(`{"model_name":"m","block_hashes":%s,"block_size":4}`, mustJSON(hashes.Hashes[0].Local)),
		fmt.Sprintf(`{"model_name":"m","seq_hashes":%s}`, seq),
	} {
		if got := string(a.want("POST", "/query_by_hash", body, 200, "")); got != want {
			t.Errorf("%.80s:\n%s\n%s", body, got, want)
		}
	}
	// A prompt that leaves what is held, after two blocks and after four.
	for blocks := range hashes.Hashes[0].Seq {
		left := slices.Concat(hashes.Hashes[0].Seq[:blocks:blocks], []uint64{1, 2, 3})
		b := a.want("POST", "/query_by_hash", fmt.Sprintf(`{"model_name":"m","seq_hashes":%s}`, mustJSON(left)), 200, "")
		local := slices.Concat(hashes.Hashes[0].Local[:blocks:blocks], []uint64{1, 2, 3})
		if want := a.want("POST", "/query_by_hash", fmt.Sprintf(`{"model_name":"m","block_hashes":%s}`, mustJSON(local)), 200, ""); string(b) != string(want) {
			t.Errorf("%d blocks:\nrolling %s\nlocal   %s", blocks, b, want)
		}
	}
	a.want("POST", "/query_by_hash", `{"model_name":"m","block_hashes":[1],"cache_salt":"s"}`, 400, "cache_salt")
	a.want("POST", "/query_by_hash", `{"model_name":"m"}`, 400, "block_hashes")
	a.want("POST", "/query_by_hash", `{"model_name":"m","block_hashes":[1.5]}`, 400, "block_hashes[0]")
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func TestPartitionNames(t *testing.T) {
	seen := map[string]string{}
	for _, tenant := range []string{"", "default", "a", "a/b", "é", "%2F"} {
		for _, group := range []string{"", "default", "b", "b/c", "%"} {
			ns := partitionNamespace(tenant, group)
			gotTenant, gotGroup := partitionOf(ns)
			if tenant == "" {
				tenant = "default"
			}
			if group == "" {
				group = "default"
			}
			if gotTenant != tenant || gotGroup != group {
				t.Errorf("%q %q became %q, read as %q %q", tenant, group, ns, gotTenant, gotGroup)
			}
			if other := seen[ns]; other != "" && other != tenant+"|"+group {
				t.Errorf("%q is both %s and %s|%s", ns, other, tenant, group)
			}
			seen[ns] = tenant + "|" + group
		}
	}
}

// Ranks are registered one by one, and those that are there live on; an
// instance is not moved onto another's publisher.
func TestRegistrationsLeaveOthersAlone(t *testing.T) {
	f, err := fleet.New(fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	_, h := newTestServer(t, f, nil)
	a := newAsker(t, h.URL)
	register := func(id, rank, port, want int, part string) {
		t.Helper()
		a.want("POST", "/register", fmt.Sprintf(`{"instance_id":%d,"model_name":"m","block_size":16,"dp_rank":%d,"endpoint":"tcp://127.0.0.1:%d"}`, id, rank, port), want, part)
	}
	lives := func(want string) {
		t.Helper()
		var got []string
		for _, w := range f.Workers() {
			got = append(got, fmt.Sprintf("%s life %d, %d ranks", w.Spec.ID, w.Generation, len(w.Streams)))
		}
		if s := strings.Join(got, "; "); s != want {
			t.Errorf("%s, want %s", s, want)
		}
	}
	register(7, 0, 5001, 201, "ok")
	register(7, 1, 5002, 201, "ok")
	register(8, 0, 5003, 201, "ok")
	lives("7 life 1, 2 ranks; 8 life 1, 1 ranks")
	a.want("POST", "/unregister", `{"instance_id":7,"model_name":"m","dp_rank":0}`, 200, "ok")
	lives("7 life 1, 1 ranks; 8 life 1, 1 ranks")
	register(7, 0, 5003, 409, `worker \"8\"`)
	a.want("PUT", "/v1/workers/8", `{"model":"m","endpoint":"tcp://127.0.0.1:5002"}`, 409, `worker \"7\"`)
	lives("7 life 1, 1 ranks; 8 life 1, 1 ranks")
}
