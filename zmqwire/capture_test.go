package zmqwire

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
)

func openCapture(t testing.TB, path string) *CaptureReader {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewCaptureReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func captures(t testing.TB) []string {
	t.Helper()
	paths, err := filepath.Glob("../testdata/captures/*.kvcap.zst")
	if err != nil || len(paths) == 0 {
		t.Fatal("no captures", err)
	}
	return paths
}

// eachRecord reads a capture to its end, which must be a clean one.
func eachRecord(t testing.TB, c *CaptureReader, f func(*Record)) {
	t.Helper()
	var r Record
	for {
		switch err := c.Next(&r); err {
		case nil:
			f(&r)
		case io.EOF:
			return
		default:
			t.Fatal(err)
		}
	}
}

// payloadOf returns a record's batch, nil for the end marker of a replay.
func payloadOf(t testing.TB, r *Record) []byte {
	t.Helper()
	parse := func(frames [][]byte) (Message, bool, error) {
		m, err := ParseMessage(frames)
		return m, false, err
	}
	if r.Kind == Reply {
		parse = ParseReply
	}
	m, end, err := parse(r.Frames)
	if err != nil {
		t.Fatal(err)
	}
	if end {
		return nil
	}
	return m.Payload
}

// TestCaptures decodes everything that vLLM's publisher was recorded with, and
// compares it with the model.
func TestCaptures(t *testing.T) {
	want := map[string]string{
		"adapters":   "673 messages, 753 stores, 1122 removals, 0 clears",
		"eagle":      "515 messages, 806 stores, 2350 removals, 0 clears",
		"everything": "1974 messages, 2477 stores, 4082 removals, 5 clears",
		"gaps":       "189 messages, 231 stores, 323 removals, 0 clears",
		"groups":     "637 messages, 1695 stores, 5116 removals, 0 clears",
		"hybrid":     "808 messages, 1459 stores, 4597 removals, 0 clears",
		"images":     "861 messages, 910 stores, 1686 removals, 0 clears",
		"layouts":    "369 messages, 391 stores, 425 removals, 0 clears",
		"legacy":     "571 messages, 674 stores, 600 removals, 2 clears",
		"load":       "499 messages, 901 stores, 33837 removals, 0 clears",
		"lookahead":  "774 messages, 855 stores, 919 removals, 0 clears",
		"ranks":      "748 messages, 894 stores, 1942 removals, 5 clears",
		"report":     "156 messages, 272 stores, 0 removals, 0 clears",
		"text":       "802 messages, 927 stores, 2556 removals, 4 clears",
		"tiers":      "817 messages, 982 stores, 2852 removals, 6 clears",
		"video":      "726 messages, 758 stores, 1423 removals, 0 clears",
	}
	for _, path := range captures(t) {
		name := strings.TrimSuffix(filepath.Base(path), ".kvcap.zst")
		t.Run(name, func(t *testing.T) {
			c := openCapture(t, path)
			var d Decoder
			var messages int
			kinds := map[EventKind]int{}
			eachRecord(t, c, func(r *Record) {
				messages++
				if _, ok := c.Header().Streams[r.Stream]; !ok {
					t.Fatalf("stream %q is not in the header", r.Stream)
				}
				payload := payloadOf(t, r)
				if payload == nil {
					return
				}
				if len(payload) < 4<<10 { // most of them; the model is slow
					checkOracle(t, &d, payload)
				}
				b, err := d.Decode(payload)
				if err != nil {
					t.Fatal(err)
				}
				if b.Malformed+b.Unknown+b.Odd > 0 {
					t.Fatalf("%s", showBatch(b))
				}
				for i := range b.Events {
					kinds[b.Events[i].Kind]++
				}
			})
			got := fmt.Sprintf("%d messages, %d stores, %d removals, %d clears", messages, kinds[BlockStored], kinds[BlockRemoved], kinds[AllBlocksCleared])
			if got != want[name] {
				t.Errorf("got %s, want %s", got, want[name])
			}
		})
	}
}

// TestCapturesEncode: what vLLM wrote is what AppendBatch writes, byte for byte,
// where the handles are integers and no adapter has a number.
func TestCapturesEncode(t *testing.T) {
	same := 0
	for _, path := range captures(t) {
		eachRecord(t, openCapture(t, path), func(r *Record) {
			payload := payloadOf(t, r)
			if payload == nil {
				return
			}
			var d Decoder
			b, err := d.Decode(payload)
			if err != nil {
				t.Fatal(err)
			}
			o, ok := formOf(b, payload)
			if !ok {
				return
			}
			got, err := AppendBatch(nil, b, o)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, payload) {
				t.Fatalf("%s\n got %x\nwant %x", path, got, payload)
			}
			same++
		})
	}
	if same < 5000 {
		t.Errorf("only %d batches compared", same)
	}
}

// formOf returns the form of a batch, and whether it is one that encoding gives
// back exactly.
func formOf(b *Batch, payload []byte) (o EncodeOptions, ok bool) {
	o.Maps = bytes.Contains(payload, []byte("\xa4type"))
	o.Map16 = bytes.Contains(payload, []byte("\xde\x00"))
	if !o.Maps && bytes.Contains(payload, []byte("\x98\xabBlockStored")) {
		o.Slots = 8
	}
	for i := range b.Events {
		ev := &b.Events[i]
		// vLLM's own byte handles are whole hash sums.
		if ev.HasLoraID || bytes.Contains(payload, []byte{0xc4, 16}) || bytes.Contains(payload, []byte{0xc4, 32}) {
			return o, false
		}
		if !o.Maps && ev.Kind == BlockRemoved && bytes.Contains(payload, []byte("\x93\xacBlockRemoved")) {
			o.Slots = 8
		}
	}
	return o, true
}

func testHeader() CaptureHeader {
	image, video := uint32(151655), uint32(0)
	return CaptureHeader{
		CreatedNS: 1790000000000000001,
		Note:      "a note",
		Streams: map[string]CaptureStream{
			"w0/0": {Worker: "w0", Model: "m", BlockSize: 16},
			"w1/3": {Worker: "w1", DPRank: 3, Model: "m", Namespace: "n", Role: "prefill", Topic: "kv@w1@m", ExtraKeys: "bare_mm",
				BlockSize: 32, ImageTokenID: &image, VideoTokenID: &video, TowerConnectorLora: true, EagleDrop: true},
		},
	}
}

func testRecords() []Record {
	return []Record{
		{TimeNS: 1790000000000000002, Stream: "w0/0", Kind: Live, Frames: [][]byte{{}, {0, 0, 0, 0, 0, 0, 0, 0}, []byte("payload")}},
		{TimeNS: 0, Stream: "w1/3", Kind: Reply, Frames: [][]byte{nil, []byte("kv@w1@m"), bytes.Repeat([]byte{255}, 8), {}}},
		{TimeNS: 5, Stream: "elsewhere", Kind: Live},
		{TimeNS: 6, Stream: "w0/0", Kind: Live, Frames: [][]byte{{}, {0, 0, 0, 0, 0, 0, 0, 1}, bytes.Repeat([]byte("a long payload "), 5_000)}},
	}
}

// writeCapture returns a capture and where each of its values ends.
func writeCapture(t testing.TB, compress bool) (file []byte, ends []int) {
	t.Helper()
	var out bytes.Buffer
	w, err := NewCaptureWriter(&out, testHeader(), compress)
	if err != nil {
		t.Fatal(err)
	}
	ends = append(ends, out.Len())
	for _, r := range testRecords() {
		if err := w.Write(r); err != nil {
			t.Fatal(err)
		}
		ends = append(ends, out.Len())
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes(), ends
}

// readCapture returns the header, copies of all records, and the error that
// ended the reading.
func readCapture(r io.Reader) (h CaptureHeader, records []Record, err error) {
	c, err := NewCaptureReader(r)
	if err != nil {
		return h, nil, err
	}
	for {
		var r Record
		if err := c.Next(&r); err != nil {
			if again := c.Next(&r); again != err {
				return h, nil, fmt.Errorf("after %w another error: %w", err, again)
			}
			return c.Header(), records, err
		}
		for i, frame := range r.Frames {
			r.Frames[i] = bytes.Clone(frame)
		}
		records = append(records, r)
	}
}

func TestCaptureRoundTrip(t *testing.T) {
	for _, compress := range []bool{false, true} {
		file, _ := writeCapture(t, compress)
		for name, r := range map[string]io.Reader{
			"whole": bytes.NewReader(file),
			"bytes": iotest.OneByteReader(bytes.NewReader(file)),
			"eof":   iotest.DataErrReader(bytes.NewReader(file)),
		} {
			h, records, err := readCapture(r)
			if err != io.EOF {
				t.Errorf("%s, compressed %v: %v", name, compress, err)
			}
			if diff := cmp.Diff(testHeader(), h); diff != "" {
				t.Errorf("header (-want +got):\n%s", diff)
			}
			want := testRecords()
			want[1].Frames[0] = []byte{} // nil was written as what it is on the wire
			if diff := cmp.Diff(want, records, cmp.Comparer(bytes.Equal)); diff != "" {
				t.Errorf("records (-want +got):\n%s", diff)
			}
		}
	}
}

// TestCaptureCutShort cuts a capture everywhere: what was whole comes, and then
// the place where that ends.
func TestCaptureCutShort(t *testing.T) {
	file, ends := writeCapture(t, false)
	for n := 0; n < len(file); n += 1 + n/100 {
		whole, end := 0, 0
		for whole < len(ends) && ends[whole] <= n {
			end = ends[whole]
			whole++
		}
		_, records, err := readCapture(bytes.NewReader(file[:n]))
		if n == end && whole > 0 {
			if err != io.EOF || len(records) != whole-1 {
				t.Errorf("cut to %d bytes: %d records, %v, want %d and EOF", n, len(records), err, whole-1)
			}
			continue
		}
		var cut *TruncatedError
		if !errors.As(err, &cut) || cut.Offset != int64(end) || len(records) != max(whole-1, 0) {
			t.Errorf("cut to %d bytes: %d records, %v, want %d and offset %d", n, len(records), err, whole-1, end)
		}
	}
}

// TestCaptureFlush: what was flushed can be read though the process that wrote
// it was killed.
func TestCaptureFlush(t *testing.T) {
	var out bytes.Buffer
	w, err := NewCaptureWriter(&out, testHeader(), true)
	if err != nil {
		t.Fatal(err)
	}
	_, ends := writeCapture(t, false)
	for i, r := range testRecords() {
		if err := w.Write(r); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		_, records, err := readCapture(bytes.NewReader(out.Bytes()))
		var cut *TruncatedError
		if !errors.As(err, &cut) || len(records) != i+1 || cut.Offset != int64(ends[i+1]) {
			t.Errorf("after %d records: %d, %v, want offset %d", i+1, len(records), err, ends[i+1])
		}
	}
	// Cut within a compressed block: the records before it are there.
	_, records, err := readCapture(bytes.NewReader(out.Bytes()[:out.Len()-3]))
	if cut := (*TruncatedError)(nil); !errors.As(err, &cut) || len(records) != 3 {
		t.Errorf("cut within the last record: %d records, %v", len(records), err)
	}
}

func TestCaptureCorrupt(t *testing.T) {
	head, ends := writeCapture(t, false)
	head = head[:ends[0]]
	f := func(record any, field, expected string) {
		t.Helper()
		good := pack(t, arr{1, "w0/0", 0, arr{[]byte("a")}})
		file := append(append(bytes.Clone(head), good...), pack(t, record)...)
		file = append(file, good...)
		_, records, err := readCapture(bytes.NewReader(file))
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || !errors.Is(err, ErrMalformed) || len(records) != 1 {
			t.Errorf("%v: %d records, %v", record, len(records), err)
			return
		}
		if corrupt.Offset != int64(len(head)+len(good)) || corrupt.Field != field || corrupt.Expected != expected {
			t.Errorf("%v: %v, want %s: %s at %d", record, err, field, expected, len(head)+len(good))
		}
	}
	const shape = "an array of t_ns, stream, kind, frames"
	f(nil, "record", shape)
	f(obj{"t_ns", 1}, "record", shape)
	f(arr{1, "w0/0", 0}, "record", shape)
	f(arr{1, "w0/0", 0, arr{}, 0}, "record", shape)
	f(raw{0xc1}, "record", shape)
	f(arr{-1, "w0/0", 0, arr{}}, "t_ns", "an unsigned integer")
	f(arr{1.5, "w0/0", 0, arr{}}, "t_ns", "an unsigned integer")
	f(arr{1, nil, 0, arr{}}, "stream", "a string")
	f(arr{1, "w0/0", 2, arr{}}, "kind", "0 or 1")
	f(arr{1, "w0/0", "live", arr{}}, "kind", "0 or 1")
	f(arr{1, "w0/0", 0, nil}, "frames", "an array of at most 16")
	f(arr{1, "w0/0", 0, make(arr, 17)}, "frames", "an array of at most 16")
	f(arr{1, "w0/0", 0, arr{[]byte("a"), "b"}}, "frames", "bin")
	f(arr{1, "w0/0", 0, arr{[]byte("a"), nil}}, "frames", "bin")
}

func TestCaptureHeader(t *testing.T) {
	f := func(header any, field, expected string) {
		t.Helper()
		_, _, err := readCapture(bytes.NewReader(pack(t, header)))
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || corrupt.Field != field || corrupt.Expected != expected || corrupt.Offset != 0 {
			t.Errorf("%v: %v, want %s: %s", header, err, field, expected)
		}
	}
	with := func(key string, value any) obj { return obj{"format", "kvcap", "version", 1, key, value} }
	f(nil, "header", "a map")
	f("kvcap", "header", "a map")
	f(arr{}, "header", "a map")
	f(obj{}, "format", "kvcap")
	f(obj{"format", "pcap", "version", 1}, "format", "kvcap")
	f(obj{"format", "kvcap"}, "version", "1")
	f(obj{"format", "kvcap", "version", 2}, "version", "1")
	f(obj{1, 2}, "header", "a string as key")
	f(with("note", 1), "note", "a string")
	f(with("created_ns", -1), "created_ns", "an integer from 0 to 18446744073709551615")
	f(with("streams", arr{}), "streams", "a map")
	f(with("streams", obj{"w0/0", 1}), "w0/0", "a map")
	f(with("streams", obj{"w0/0", obj{"worker", 1}}), "w0/0: worker", "a string")
	f(with("streams", obj{"w0/0", obj{"block_size", "16"}}), "w0/0: block_size", "an integer from 0 to 4294967295")
	f(with("streams", obj{"w0/0", obj{"image_token_id", -1}}), "w0/0: image_token_id", "an integer from 0 to 4294967295")
	f(with("streams", obj{"w0/0", obj{"eagle_drop", 1}}), "w0/0: eagle_drop", "true or false")

	lenient := obj{"future", arr{1}, "format", "kvcap", "version", 1, "note", nil, "streams",
		obj{"w0/0", obj{"worker", "w0", "future", obj{}, "image_token_id", nil, "dp_rank", nil, "eagle_drop", nil}}}
	h, _, err := readCapture(bytes.NewReader(pack(t, lenient)))
	if want := (CaptureHeader{Streams: map[string]CaptureStream{"w0/0": {Worker: "w0"}}}); err != io.EOF || !cmp.Equal(h, want) {
		t.Errorf("%v, %v", h, err)
	}
}

// zerosAfter gives a prefix and then zeros for ever.
type zerosAfter struct{ prefix []byte }

func (e *zerosAfter) Read(p []byte) (int, error) {
	n := copy(p, e.prefix)
	e.prefix = e.prefix[n:]
	clear(p[n:])
	return len(p), nil
}

// TestCaptureHostile: no capture takes more memory than a record may have.
func TestCaptureHostile(t *testing.T) {
	head, ends := writeCapture(t, false)
	head = head[:ends[0]]
	f := func(name string, r io.Reader, want string) {
		t.Helper()
		_, _, err := readCapture(r)
		if corrupt := (*CorruptError)(nil); !errors.As(err, &corrupt) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	record := func(hex string) io.Reader { return &zerosAfter{append(bytes.Clone(head), unhex(t, hex)...)} }
	f("a frame of 4 GiB", record("94 01 a1 61 00 91 c6 ffffffff"), "record: expected at most 67108864 bytes")
	f("frames without end", record("94 01 a1 61 00 dd ffffffff"), "record: expected at most 67108864 bytes")
	f("a stream name of 4 GiB", record("94 01 db ffffffff"), "record: expected at most 67108864 bytes")
	f("a header without end", &zerosAfter{unhex(t, "df ffffffff a1 61 c6 ffffffff")}, "header: expected at most 1048576 bytes")

	streams := make(obj, 0, 2*maxCaptureStreams+2)
	for i := range maxCaptureStreams + 1 {
		streams = append(streams, fmt.Sprint(i), obj{})
	}
	f("streams without end", bytes.NewReader(pack(t, obj{"format", "kvcap", "version", 1, "streams", streams})), "streams: expected at most 16384")

	var zip bytes.Buffer
	w, err := zstd.NewWriter(&zip)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(w, io.LimitReader(record("94 01 a1 61 00 91 c6 ffffffff"), 256<<20)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f("a window of 1 GiB", bytes.NewReader(unhex(t, "28b52ffd 00 a0 010000")), "window size exceeded")
	f("a bomb", bytes.NewReader(zip.Bytes()), "record: expected at most 67108864 bytes")
}

func TestCaptureDamagedCompression(t *testing.T) {
	file, _ := writeCapture(t, true)
	damaged := append(bytes.Clone(file), "not zstd"...)
	_, records, err := readCapture(bytes.NewReader(damaged))
	if corrupt := (*CorruptError)(nil); !errors.As(err, &corrupt) || corrupt.Err == nil || corrupt.Field != "compression" || len(records) != 4 {
		t.Errorf("%d records, %v", len(records), err)
	}
	damaged = bytes.Clone(file)
	damaged[len(damaged)-1] ^= 0xff // of the checksum
	_, _, err = readCapture(bytes.NewReader(damaged))
	if !errors.Is(err, zstd.ErrCRCMismatch) || !errors.Is(err, ErrMalformed) {
		t.Errorf("a wrong checksum: %v", err)
	}
}

// TestCaptureReadError: a disk that fails is not a capture that is corrupt.
func TestCaptureReadError(t *testing.T) {
	broken := errors.New("broken disk")
	for _, compress := range []bool{false, true} {
		file, _ := writeCapture(t, compress)
		r := io.MultiReader(bytes.NewReader(file[:len(file)-8]), iotest.ErrReader(broken))
		_, _, err := readCapture(r)
		if !errors.Is(err, broken) || errors.Is(err, ErrMalformed) {
			t.Errorf("compressed %v: %v", compress, err)
		}
	}
	if _, err := NewCaptureReader(iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Error(err)
	}
}

func TestCaptureWriterRefuses(t *testing.T) {
	w, err := NewCaptureWriter(io.Discard, testHeader(), false)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Write(Record{Frames: make([][]byte, maxRecordFrames+1)}); err == nil {
		t.Error("a record that no reader takes was written")
	}
	if err := w.Write(Record{Frames: [][]byte{make([]byte, maxRecord)}}); err == nil {
		t.Error("a record that no reader takes was written")
	}
	if _, err := NewCaptureWriter(io.Discard, CaptureHeader{Note: strings.Repeat("a", maxHeader)}, false); err == nil {
		t.Error("a header that no reader takes was written")
	}
}
