package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// GET /dump tells of every stream what it holds, by partition. scripts/conformance
// compares it with the dump of Dynamo's indexer.
func TestDropInDump(t *testing.T) {
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{
		"a": {Worker: "7", Model: "m", BlockSize: 4},
		"b": {Worker: "7", DPRank: 1, Model: "m", BlockSize: 4},
		"c": {Worker: "vllm-0", Model: "m", Namespace: "acme/blue"},
		"d": {Worker: "quiet", Model: "n"},
	}}
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	prompt := promptOf(3, 24)
	feedEvents(t, off, "a", 0, storeOf(prompt[:12], 4, 0))
	host := storeOf(prompt[12:20], 4, 3)
	host.Parent, host.HasParent, host.Medium = 3, true, []byte("CPU_PINNED")
	feedEvents(t, off, "a", 1, host)
	feedEvents(t, off, "b", 0, storeOf(prompt[:4], 4, 0))
	feedEvents(t, off, "c", 0, storeOf(prompt[:16], 8, 0))
	_, srv := newTestServer(t, off.Fleet, nil)
	body := newAsker(t, srv.URL).want("GET", "/dump", "", 200, "")

	var chain normalize.Chain
	hashes := func(blockSize, n int) (seqs []normalize.SequenceHash, locals []normalize.LocalHash) {
		p := normalize.Prompt{Tokens: prompt}
		shape := normalize.Shape{BlockSize: uint32(blockSize)}
		pr := p.Project(normalize.View{}, shape)
		p.Chain(&chain, &pr, normalize.View{}, shape)
		return chain.Seqs[:n], chain.Locals[:n]
	}
	event := func(worker any, rank int, tier string, blockSize, from, to int) string {
		seqs, locals := hashes(blockSize, to)
		parent := "null"
		if from > 0 {
			parent = fmt.Sprint(uint64(seqs[from-1]))
		}
		var blocks []string
		for i := from; i < to; i++ {
			blocks = append(blocks, fmt.Sprintf(`{"block_hash":%d,"tokens_hash":%d,"mm_extra_info":null}`, uint64(seqs[i]), uint64(locals[i])))
		}
		id := 0
		if tier != "device" {
			id = 1
		}
		return fmt.Sprintf(`{"worker_id":%s,"storage_tier":%q,"residency_domain":"worker","event":{"event_id":%d,"data":{"stored":{"parent_hash":%s,"start_position":null,"blocks":[%s]}},"dp_rank":%d}}`,
			mustJSON(worker), tier, id, parent, strings.Join(blocks, ","), rank)
	}
	want := map[string]string{
		"m:default": `{"block_size":4,"events":[` + strings.Join([]string{
			event(7, 0, "device", 4, 0, 3), event(7, 0, "host_pinned", 4, 3, 5), event(7, 1, "device", 4, 0, 1),
		}, ",") + `]}`,
		"m:acme/blue": `{"block_size":8,"events":[` + event("vllm-0", 0, "device", 8, 0, 2) + `]}`,
		"n:default":   `{"block_size":0,"events":[]}`,
	}
	var got map[string]json.RawMessage
	if err := json.Unmarshal(body, &got); err != nil {
		t.Fatal(err)
	}
	for name, w := range want {
		if string(got[name]) != w {
			t.Errorf("%s:\n%s, want\n%s", name, got[name], w)
		}
		delete(got, name)
	}
	if len(got) > 0 {
		t.Errorf("besides: %v", slices.Collect(maps.Keys(got)))
	}
}
