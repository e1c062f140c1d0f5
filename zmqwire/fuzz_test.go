package zmqwire

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	// fuzzLimit is the largest input that the oracle gets to see.
	fuzzLimit = 64 << 10
	// seedLimit keeps seeds small: the fuzzer spends its time on minimising
	// large ones.
	seedLimit = 600
)

// seedPayloads adds the vectors, and some small batches of each capture.
func seedPayloads(f *testing.F) {
	for _, v := range readVectors(f) {
		f.Add(v.payload(f))
	}
	for _, path := range captures(f) {
		added := 0
		eachRecord(f, openCapture(f, path), func(r *Record) {
			if payload := payloadOf(f, r); payload != nil && len(payload) < seedLimit && added < 8 {
				added++
				f.Add(bytes.Clone(payload))
			}
		})
	}
	f.Add(batchOf(f, stored("lookahead_token_ids", arr{arr{1, 2}}, "extra_keys", arr{arr{"a", arr{"b", -1}, []byte("c"), nil}},
		"lora_name", "a", "cache_salt", "b", "locality", "LOCAL", "session_id", "s", "ownership", 1)))
	f.Add(batchOf(f, obj{"type", "BlockRemoved", "block_hashes", arr{1, -1, []byte("123456789")}, "remaining_copy_counts", arr{0, 1, 2}}))
	f.Add(batchOf(f, storedSlotsWith(1, "CPU", "a", arr{nil}, "mamba", 5)))
	f.Add(pack(f, obj{"events", arr{arr{"AllBlocksCleared", 1}}, "ts", 5, "data_parallel_rank", 2}))
}

// FuzzDecode compares the Decoder with the model, which reads through
// vmihailenco/msgpack.
func FuzzDecode(f *testing.F) {
	seedPayloads(f)
	f.Fuzz(func(t *testing.T, payload []byte) {
		if len(payload) > fuzzLimit {
			return
		}
		var d Decoder
		checkOracle(t, &d, payload)
		checkOracle(t, &d, payload) // again, over used buffers
		checkEncode(t, &d, payload)
	})
}

// checkEncode: what was decoded and can be encoded decodes to the same.
func checkEncode(t *testing.T, d *Decoder, payload []byte) {
	b, err := d.Decode(payload)
	if err != nil {
		return
	}
	for i := range b.Events {
		if ev := &b.Events[i]; ev.Pairs && len(ev.Tokens) == 1 {
			t.Fatalf("one token in pairs: %s", show(ev))
		}
	}
	b.Malformed, b.Unknown, b.Odd, b.LostRemovals = 0, 0, 0, 0
	want := showBatch(b)
	for _, o := range []EncodeOptions{{Maps: true}, {Maps: true, BytesHashes: true}, {}, {Slots: 8}, {Slots: 6}} {
		again, err := AppendBatch(nil, b, o)
		if err != nil {
			if o.Maps {
				t.Fatalf("%s: %v", want, err)
			}
			continue // that form has no place for it
		}
		got, err := new(Decoder).Decode(again)
		if err != nil {
			t.Fatal(err)
		}
		if showBatch(got) != want {
			t.Fatalf("%+v\n got %s\nwant %s", o, showBatch(got), want)
		}
	}
}

// FuzzCursorSkip compares where values end.
func FuzzCursorSkip(f *testing.F) {
	seedPayloads(f)
	f.Add([]byte("\xd8\x01................"))
	f.Add([]byte("\xc7\x03\x01abc"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > fuzzLimit {
			return
		}
		c := cursor{b: b}
		if !c.skip() {
			if c.pos != 0 {
				t.Fatalf("failed and moved to %d", c.pos)
			}
			if len(b) < 1<<10 && !c.short && !bytes.Contains(b, []byte{0xc1}) {
				t.Fatalf("%x: neither short nor invalid", b)
			}
			return
		}
		_, size, err := parse(b)
		if err != nil || size != c.pos {
			t.Fatalf("%x: skipped to %d, the oracle to %d: %v", b, c.pos, size, err)
		}
	})
}

// FuzzCapture: what a capture gives can be written again, and is then the same.
func FuzzCapture(f *testing.F) {
	for _, compress := range []bool{false, true} {
		var out bytes.Buffer
		w, err := NewCaptureWriter(&out, testHeader(), compress)
		if err != nil {
			f.Fatal(err)
		}
		for _, r := range testRecords()[:3] {
			if err := w.Write(r); err != nil {
				f.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			f.Fatal(err)
		}
		f.Add(out.Bytes())
		f.Add(out.Bytes()[:out.Len()-4])
	}
	for _, path := range captures(f) {
		c := openCapture(f, path)
		var out bytes.Buffer
		w, err := NewCaptureWriter(&out, c.Header(), false)
		if err != nil {
			f.Fatal(err)
		}
		var r Record
		if err := errors.Join(c.Next(&r), w.Write(r)); err != nil {
			f.Fatal(err)
		}
		f.Add(out.Bytes())
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		h, records, err := readCapture(bytes.NewReader(file))
		var cut *TruncatedError
		var corrupt *CorruptError
		if err != io.EOF && !errors.As(err, &cut) && !errors.As(err, &corrupt) {
			t.Fatalf("%v: neither an end nor cut nor corrupt", err)
		}
		if h.Streams == nil && records == nil {
			return
		}
		var out bytes.Buffer
		w, err := NewCaptureWriter(&out, h, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			if err := w.Write(r); err != nil {
				t.Fatal(err)
			}
		}
		h2, records2, err := readCapture(&out)
		if err != io.EOF || !cmp.Equal(h, h2) || !cmp.Equal(records, records2, cmp.Comparer(bytes.Equal)) {
			t.Fatalf("written again: %v\n%v\n%v", err, h, h2)
		}
	})
}
