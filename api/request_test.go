package api

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/normalize"
)

func decodeText(body string) (*MatchRequest, *Error) {
	var r MatchRequest
	s := scanner{b: []byte(body)}
	err := decodeMatch(&s, &r)
	if err == nil {
		err = s.end()
	}
	return &r, err
}

func TestDecodeGenerateBody(t *testing.T) {
	r, err := decodeText(`{
		"request_id": "r-1", "token_ids": [1, 2, 3], "model": "m",
		"features": {"mm_hashes": {"image": ["aa"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 1}]}, "kwargs_data": {"image": ["` + strings.Repeat("QUJD", 1000) + `"]}},
		"sampling_params": {"temperature": 0.7, "stop": ["\n"], "logit_bias": {"1": -1e2}, "structured_outputs": {"json": {"type": "object"}}},
		"stream": false, "stream_options": null, "cache_salt": "s", "priority": 0, "kv_transfer_params": {"do_remote_decode": true}
	}`)
	if err != nil {
		t.Fatal(err)
	}
	if r.Model != "m" || r.RequestID != "r-1" || r.CacheSalt != "s" || !equalTokens(r.Tokens, []uint32{1, 2, 3}) || r.Features == nil {
		t.Errorf("%+v", r)
	}
}

func TestDecodeOwnFields(t *testing.T) {
	r, err := decodeText(`{"block_hashes": [18446744073709551615, 0], "hash_block_size": 16, "lora_name": "a", "namespace": "n", "role": "decode",
		"mm": "exact", "workers": ["w0", "w1"], "top_k": 8, "min_tokens": 32, "include": ["zero", "hashes"]}`)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.BlockHashes) != 2 || r.BlockHashes[0] != 1<<64-1 || r.HashBlockSize != 16 || r.LoraName != "a" || r.Namespace != "n" || r.Role != "decode" ||
		r.Mode != normalize.Exact || len(r.Workers) != 2 || r.TopK != 8 || r.MinTokens != 32 || r.Include != IncludeZero|IncludeHashes {
		t.Errorf("%+v", r)
	}
}

func TestDecodeRefuses(t *testing.T) {
	f := func(body string, reason Reason, param string) {
		t.Helper()
		_, err := decodeText(body)
		if err == nil || err.Reason != reason || err.Param != param || err.Status != 400 {
			t.Errorf("%.80s: %v, want %s %q", body, err, reason, param)
		}
	}
	f(``, ReasonMalformedBody, "")
	f(`[]`, ReasonMalformedBody, "")
	f(`{"token_ids": [1]} x`, ReasonMalformedBody, "")
	f(`{"token_ids": [1`, ReasonMalformedBody, "")
	f(`{"token_ids": [1], "x": `+strings.Repeat("[", 5000)+`}`, ReasonMalformedBody, "")
	f(`{"token_ids": [1], "x": NaN}`, ReasonMalformedBody, "")
	f(`{"token_ids": [1]`+strings.Repeat(`, "x": 1`, 1025)+`}`, ReasonMalformedBody, "")
	f(`{}`, ReasonMissingField, "token_ids")
	f(`{"token_ids": [1, null]}`, ReasonInvalidField, "token_ids[1]")
	f(`{"token_ids": null}`, ReasonInvalidField, "token_ids")
	f(`{"token_ids": [1], "token_ids": [2]}`, ReasonDuplicateField, "token_ids")
	f(`{"token_ids": [1], "model": "a", "mod\u0065l": "b"}`, ReasonDuplicateField, "model")
	f(`{"token_ids": [1], "cache_salt": null, "cache_salt": "a"}`, ReasonDuplicateField, "cache_salt")
	f(`{"token_ids": [1], "model": 5}`, ReasonInvalidField, "model")
	f(`{"token_ids": [1], "cache_salt": "\ud800"}`, ReasonMalformedBody, "")
	f(`{"token_ids": [1], "cache_salt": "`+"\xff"+`"}`, ReasonMalformedBody, "")
	f(`{"token_ids": [1], "top_k": -1}`, ReasonInvalidField, "top_k")
	f(`{"token_ids": [1], "top_k": 1.5}`, ReasonInvalidField, "top_k")
	f(`{"token_ids": [1], "mm": "most"}`, ReasonInvalidField, "mm")
	f(`{"token_ids": [1], "include": ["all"]}`, ReasonInvalidField, "include[0]")
	f(`{"token_ids": [1], "workers": ["a", 5]}`, ReasonInvalidField, "workers[1]")
	f(`{"token_ids": [1], "block_hashes": [1], "hash_block_size": 16}`, ReasonConflictingFields, "")
	f(`{"block_hashes": [1]}`, ReasonMissingField, "hash_block_size")
	f(`{"block_hashes": [-1], "hash_block_size": 16}`, ReasonInvalidField, "block_hashes[0]")
	f(`{"block_hashes": [1], "hash_block_size": 0}`, ReasonInvalidField, "hash_block_size")
	f(`{"block_hashes": [1], "hash_block_size": 16, "cache_salt": "s"}`, ReasonSaltWithHashes, "cache_salt")
	for _, key := range []string{"tenant_id", "tenantId", "Tenant-ID", "routing_group", "namspace", "name_space", "Namespaces", "cache_slat", "CacheSalt", "lora_id", "additionalsalt", "lora_nam"} {
		f(fmt.Sprintf(`{"token_ids": [1], %q: "x"}`, key), ReasonUnknownIsolation, key)
	}
}

func TestDecodeIgnores(t *testing.T) {
	for _, body := range []string{
		`{"token_ids": [], "unknown": {"deep": [1, {"a": null}]}}`,
		`{"token_ids": [1], "tenant_id": null, "model": null, "features": null, "cache_salt": null, "mm": null}`,
		`{"token_ids": [1], "user": "x", "session_id": "y", "priority": 3, "stream": true, "n": 1, "unknown": 1, "unknown": 2}`,
	} {
		if _, err := decodeText(body); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestDecodeMsgpack(t *testing.T) {
	bin := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, 7), 1<<32-1)
	for name, tokens := range map[string]any{"array": []uint32{7, 1<<32 - 1}, "bin": bin, "ints": []int64{7, 1<<32 - 1}} {
		body, err := msgpack.Marshal(map[string]any{
			"token_ids": tokens, "model": "m", "top_k": 3, "workers": []string{"a"}, "sampling_params": map[string]any{"x": []any{1.5, nil, true, "s", []byte{1}}},
			"features": map[string]any{"mm_hashes": map[string]any{"image": []string{"aa"}}, "kwargs_data": []byte("zzz")},
		})
		if err != nil {
			t.Fatal(err)
		}
		var r MatchRequest
		c := mcursor{b: body}
		if err := decodeMatchMsgpack(&c, &r); err != nil {
			t.Fatal(name, err)
		}
		if !equalTokens(r.Tokens, []uint32{7, 1<<32 - 1}) || r.Model != "m" || r.TopK != 3 || len(r.Workers) != 1 || r.Features == nil || c.end() != nil {
			t.Errorf("%s: %+v", name, r)
		}
		if !json.Valid(c.json) || strings.Contains(string(c.json), "kwargs") {
			t.Errorf("features transcribed as %s", c.json)
		}
		for n := range body {
			c := mcursor{b: body[:n]}
			if err := decodeMatchMsgpack(&c, &r); err == nil {
				t.Fatalf("%s: cut to %d bytes: no error", name, n)
			}
		}
	}
}

func TestDecodeMsgpackRefuses(t *testing.T) {
	f := func(body, part string) {
		t.Helper()
		var r MatchRequest
		c := mcursor{b: []byte(body)}
		err := decodeMatchMsgpack(&c, &r)
		if err == nil || !strings.Contains(err.Error(), part) || err.Status != 400 {
			t.Errorf("%q: %v, want %s", body, err, part)
		}
	}
	const tokens = "\xa9token_ids"
	f("", "ends")
	f("\xdd\xff\xff\xff\xff", "ends")
	f("\xdf\xff\xff\xff\xff", "ends")
	f("\x93\x01\x02\x03", "expected a map")
	f("\x81\x01\x02", "a string")
	f("\x81"+tokens+"\xdd\xff\xff\xff\xff", "ends")
	f("\x81"+tokens+"\xc4\x03abc", "multiple of 4")
	f("\x81"+tokens+"\x91\xc0", "not nil")
	f("\x81"+tokens+"\x91\xff", "negative")
	f("\x81"+tokens+"\x91\xcf\x00\x00\x00\x01\x00\x00\x00\x00", "too large")
	f("\x81"+tokens+"\x91\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", "float")
	f("\x82"+tokens+"\x90"+tokens+"\x90", "duplicate_field")
	f("\x82"+tokens+"\x90\xa9tenant_id\xa1x", "unknown_isolation_field")
	f("\x82"+tokens+"\x90\xa1x\xc1", "begins none")
	f("\x82"+tokens+"\x90\xa8features"+strings.Repeat("\x91", 100)+"\xc0", "nested deeper")
}

func FuzzDecodeMatch(f *testing.F) {
	f.Add([]byte(`{"token_ids": [1, 2], "features": {"mm_hashes": {}}, "workers": ["a"], "include": ["zero"]}`))
	f.Add([]byte(`{"block_hashes": [1], "hash_block_size": 16, "x": [{}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeText(string(b))
		if err == nil && !json.Valid(b) {
			t.Fatalf("%q was accepted", b)
		}
		if err == nil && len(r.Tokens) > len(b) {
			t.Fatal("more tokens than bytes")
		}
		if err != nil && (err.Status != 400 || err.Reason == "" || err.Message == "") {
			t.Fatalf("%+v", err)
		}
	})
}

func FuzzDecodeMatchMsgpack(f *testing.F) {
	f.Add([]byte("\x82\xa9token_ids\x93\x01\x02\x03\xa5model\xa1m"))
	f.Add([]byte("\x82\xa9token_ids\xc4\x04abcd\xa8features\x81\xa9mm_hashes\x81\xa5image\x91\xa2aa"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var r MatchRequest
		c := mcursor{b: b}
		err := decodeMatchMsgpack(&c, &r)
		if err == nil && len(r.Tokens) > len(b) {
			t.Fatal("more tokens than bytes")
		}
		if len(c.json) > 32*len(b)+64 {
			t.Fatal("features grew beyond a small multiple")
		}
		// What we take, the oracle takes, and passes over as many bytes.
		if err == nil && len(b) < 1<<16 {
			d := msgpack.NewDecoder(strings.NewReader(string(b[:c.i])))
			if derr := d.Skip(); derr != nil && !strings.Contains(derr.Error(), "unknown") {
				t.Fatalf("the oracle: %v", derr)
			}
		}
	})
}

// matchBody is a body of n token ids as a JSON library writes it.
func matchBody(n int, sep string) []byte {
	r := rand.New(rand.NewPCG(7, 7))
	b := []byte(`{"model":"m","token_ids":[`)
	for i := range n {
		if i > 0 {
			b = append(b, sep...)
		}
		b = fmt.Appendf(b, "%d", r.IntN(152_000))
	}
	return append(b, `],"top_k":8,"sampling_params":{"temperature":0.7}}`...)
}

func BenchmarkDecodeMatch(b *testing.B) {
	bin := make([]byte, 4*8192)
	packed, _ := msgpack.Marshal(map[string]any{"model": "m", "token_ids": bin, "top_k": 8})
	b.Run("8192/json", func(b *testing.B) { benchJSON(b, matchBody(8192, ",")) })
	b.Run("8192/json_spaces", func(b *testing.B) { benchJSON(b, matchBody(8192, ", ")) })
	b.Run("8192/msgpack", func(b *testing.B) {
		b.ReportAllocs()
		b.SetBytes(int64(len(packed)))
		var r MatchRequest
		for b.Loop() {
			c := mcursor{b: packed}
			if err := decodeMatchMsgpack(&c, &r); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func benchJSON(b *testing.B, body []byte) {
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	var r MatchRequest
	for b.Loop() {
		s := scanner{b: body}
		if err := decodeMatch(&s, &r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSkipKwargs(b *testing.B) {
	body := []byte(`"` + strings.Repeat("QUJDREVGRw", 100_000) + `"`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		s := scanner{b: body}
		if err := s.skip(); err != nil {
			b.Fatal(err)
		}
	}
}
