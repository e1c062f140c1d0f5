package api

import (
	"net/http"
	"regexp"
	"strconv"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// What one tenant holds changes no answer to another: two fleets that differ
// only in whether tenant a, or the holder of a salt, has the very prompt that
// others ask about answer these in the same words.
func TestTenantsDoNotShow(t *testing.T) {
	prompt := promptOf(5, 64)
	asked := func(held []uint32) *asker {
		h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{
			"a": {Worker: "wa", Model: "m", BlockSize: 16, Namespace: partitionNamespace("a", "")},
			"b": {Worker: "wb", Model: "m", BlockSize: 16, Namespace: partitionNamespace("b", "")},
		}}
		off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet(), Models: []fleet.ModelSpec{{Name: "m", Loras: []fleet.LoraSpec{{Name: "sql"}}}}})
		if err != nil {
			t.Fatal(err)
		}
		salted := storeOf(held, 16, 1<<32)
		salted.CacheSalt = []byte("of b's first customer")
		feedEvents(t, off, "a", 0, storeOf(held, 16, 0))
		feedEvents(t, off, "b", 0, storeOf(promptOf(6, 64), 16, 0), salted)
		_, srv := newTestServer(t, off.Fleet, nil)
		return newAsker(t, srv.URL)
	}
	with, without := asked(prompt), asked(promptOf(7, 64))
	age := regexp.MustCompile(`"age_ms":\d+`)
	f := func(path, body string, differs bool) {
		t.Helper()
		status, b := with.do("POST", path, body)
		_, other := without.do("POST", path, body)
		if status != http.StatusOK {
			t.Errorf("%s: %d %s", path, status, b)
		}
		if (age.ReplaceAllString(string(b), "") != age.ReplaceAllString(string(other), "")) != differs {
			t.Errorf("%s %.80s: the answers differ: %t, want %t\n%s\n%s", path, body, !differs, differs, b, other)
		}
	}
	locals, seqs := hashesOf(t, prompt)
	who := map[string][2]string{ // the native and the drop-in way to say it
		"tenant b":               {`,"namespace":"b/default"`, `,"tenant_id":"b"`},
		"tenant b, another salt": {`,"namespace":"b/default","cache_salt":"of b's second customer"`, `,"tenant_id":"b","cache_salt":"of b's second customer"`},
		"tenant b, an adapter":   {`,"model":"sql","namespace":"b/default"`, `,"tenant_id":"b","lora_name":"sql"`},
	}
	for name, say := range who {
		native, dropin := say[0], say[1]
		tokens := string(jsonBody(prompt, "")[len(`{"model":"m",`):])
		tokens = tokens[:len(tokens)-1]
		if name != "tenant b, an adapter" {
			native = `,"model":"m"` + native
		}
		for _, include := range []string{"", `,"include":["zero"]`} {
			f("/v1/match", "{"+tokens+native+include+"}", false)
			f("/v1/match/batch", "[{"+tokens+native+include+"}]", false)
		}
		f("/v1/explain", "{"+tokens+native+"}", false)
		f("/query", `{"model_name":"m",`+tokens+dropin+"}", false)
		if name == "tenant b" {
			f("/v1/match", `{"sequence_hashes":`+seqs+`,"hash_block_size":16`+native+"}", false)
			f("/v1/explain", `{"block_hashes":`+locals+`,"hash_block_size":16`+native+"}", false)
			f("/query_by_hash", `{"model_name":"m","block_hashes":`+locals+dropin+"}", false)
			f("/query_by_hash", `{"model_name":"m","seq_hashes":`+seqs+dropin+"}", false)
		}
	}
	// The owners do see it, or this test would show nothing.
	body := string(jsonBody(prompt, ""))
	body = body[:len(body)-1]
	f("/v1/match", body+`,"namespace":"a/default"}`, true)
	f("/v1/explain", body+`,"namespace":"b/default","cache_salt":"of b's first customer"}`, true)
	f("/query", `{"model_name":"m",`+body[len(`{"model":"m",`):]+`,"tenant_id":"a"}`, true)
}

// hashesOf are the prompt's hashes as JSON arrays.
func hashesOf(t *testing.T, prompt []uint32) (locals, seqs string) {
	off := textFleet(t, 1, prompt)
	a, err := NewService(off.Fleet).Match(t.Context(), &MatchRequest{Tokens: prompt, Include: IncludeHashes, given: fieldTokens})
	if err != nil {
		t.Fatal(err)
	}
	return jsonInts(a.Hashes[0].Locals), jsonInts(a.Hashes[0].Seqs)
}

func jsonInts[T ~uint64](vs []T) string {
	b := []byte{'['}
	for i, v := range vs {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(v), 10)
	}
	return string(append(b, ']'))
}
