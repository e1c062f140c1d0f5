package api

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// promptOf is a prompt of n random tokens.
func promptOf(seed uint64, n int) []uint32 {
	r := rand.New(rand.NewPCG(seed, 1))
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = r.Uint32N(152_000)
	}
	return tokens
}

// textFleet is a fleet of workers "w0".. of model "m" that all hold the prompt,
// in blocks of 16.
func textFleet(t testing.TB, workers int, prompt []uint32) *fleet.Offline {
	t.Helper()
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{}}
	for i := range workers {
		h.Streams[fmt.Sprintf("w%d/0", i)] = zmqwire.CaptureStream{Worker: fmt.Sprintf("w%d", i), Model: "m", BlockSize: 16}
	}
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	for i := range workers {
		feedEvents(t, off, fmt.Sprintf("w%d/0", i), 0, storeOf(prompt, 16, uint64(i)<<32))
	}
	return off
}

// storeOf is the event that stores a prompt's whole blocks.
func storeOf(prompt []uint32, bs uint32, first uint64) zmqwire.Event {
	e := zmqwire.Event{Kind: zmqwire.BlockStored, BlockSize: bs, Medium: []byte("GPU"), Group: zmqwire.NoGroup, Tokens: prompt[:len(prompt)/int(bs)*int(bs)]}
	for i := range len(prompt) / int(bs) {
		e.Hashes = append(e.Hashes, zmqwire.EngineHash(first+uint64(i)+1))
	}
	return e
}

func feedEvents(t testing.TB, off *fleet.Offline, stream string, seq uint64, events ...zmqwire.Event) {
	t.Helper()
	payload, err := zmqwire.AppendBatch(nil, &zmqwire.Batch{Timestamp: 1, Rank: -1, Events: events}, zmqwire.EncodeOptions{Maps: true})
	if err != nil {
		t.Fatal(err)
	}
	rec := zmqwire.Record{Stream: stream, Frames: [][]byte{nil, binary.BigEndian.AppendUint64(nil, seq), payload}}
	if err := off.Feed(&rec); err != nil {
		t.Fatal(err)
	}
}

func jsonBody(tokens []uint32, rest string) []byte {
	b := []byte(`{"model":"m","token_ids":[`)
	for i, v := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, "%d", v)
	}
	return append(append(b, ']'), rest+"}"...)
}

func msgpackBody(t testing.TB, tokens []uint32) []byte {
	raw := make([]byte, 0, 4*len(tokens))
	for _, v := range tokens {
		raw = binary.LittleEndian.AppendUint32(raw, v)
	}
	b, err := msgpack.Marshal(map[string]any{"model": "m", "token_ids": raw, "top_k": 8})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// BenchmarkMatchHTTP asks over loopback with keep-alive: 8192 tokens, 512 cached
// blocks, 32 holders, top_k 8. The client sends recorded bytes and reads the
// answer without parsing it; cpu-µs/op is both sides' CPU time. Dynamo's
// standalone indexer takes 550 µs of server CPU for the same question, 150-195
// where 512 hashes are sent instead of tokens.
func BenchmarkMatchHTTP(b *testing.B) {
	prompt := promptOf(1, 8192)
	off := textFleet(b, 32, prompt)
	s, err := NewServer(Config{Fleet: off.Fleet, Logger: quiet()})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("json", func(b *testing.B) {
		benchHTTP(b, s, "application/json", jsonBody(prompt, `,"top_k":8`))
	})
	b.Run("msgpack", func(b *testing.B) { benchHTTP(b, s, "application/msgpack", msgpackBody(b, prompt)) })
}

func benchHTTP(b *testing.B, s *Server, contentType string, body []byte) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(b.Context(), l) }()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	request := fmt.Appendf(nil, "POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nAccept: %s\r\nContent-Length: %d\r\n\r\n", contentType, contentType, len(body))
	request = append(request, body...)
	answer := make([]byte, 64<<10)
	ask := func() int {
		if _, err := conn.Write(request); err != nil {
			b.Fatal(err)
		}
		return readAnswer(b, conn, answer)
	}
	n := ask()
	if !bytes.HasPrefix(answer, []byte("HTTP/1.1 200")) || !bytes.Contains(answer[:n], []byte("usable_tokens")) {
		b.Fatalf("%s", answer[:n])
	}
	b.ReportAllocs()
	before := cpuTime()
	for b.Loop() {
		ask()
	}
	b.ReportMetric(float64(cpuTime()-before)/1e3/float64(b.N), "cpu-µs/op")
}

// readAnswer reads one answer with a Content-Length into buf.
func readAnswer(b *testing.B, r io.Reader, buf []byte) int {
	n, want := 0, -1
	for want < 0 || n < want {
		m, err := r.Read(buf[n:])
		if err != nil {
			b.Fatal(err)
		}
		n += m
		if head := bytes.Index(buf[:n], []byte("\r\n\r\n")); head >= 0 && want < 0 {
			length := 0
			at := bytes.Index(buf[:head], []byte("Content-Length: "))
			fmt.Sscanf(string(buf[at+16:head]), "%d", &length)
			want = head + 4 + length
		}
	}
	return n
}

func cpuTime() int64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// BenchmarkMatch is the service alone, without HTTP and bodies.
func BenchmarkMatch(b *testing.B) {
	prompt := promptOf(1, 8192)
	off := textFleet(b, 32, prompt)
	s := NewService(off.Fleet)
	r := &MatchRequest{Tokens: prompt, TopK: 8, given: fieldTokens}
	a := new(MatchResponse)
	b.ReportAllocs()
	before := cpuTime()
	defer func() { b.ReportMetric(float64(cpuTime()-before)/1e3/float64(b.N), "cpu-µs/op") }()
	for b.Loop() {
		if err := s.match(b.Context(), r, a); err != nil || len(a.Workers) != 8 || a.Workers[0].Device != 8192 {
			b.Fatal(err, len(a.Workers))
		}
	}
}

// A question about text costs no allocation besides its body's strings.
func TestMatchAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools")
	}
	prompt := promptOf(1, 1024)
	off := textFleet(t, 32, prompt)
	s := NewService(off.Fleet)
	body := jsonBody(prompt, `,"top_k":8`)
	var (
		r MatchRequest
		a MatchResponse
		e encoder
	)
	ask := func() {
		in := scanner{b: body}
		e.reset(false)
		if err := decodeMatch(&in, &r); err != nil {
			t.Fatal(err)
		}
		if err := s.match(t.Context(), &r, &a); err != nil {
			t.Fatal(err)
		}
		a.encode(&e)
	}
	if n := testing.AllocsPerRun(100, ask); n > 2 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkTokens reads 8192 ids, as Go and as Python write them.
func BenchmarkTokens(b *testing.B) {
	packed := jsonBody(promptOf(1, 8192), "")[len(`{"model":"m","token_ids":`):]
	for name, body := range map[string][]byte{"packed": packed, "spaced": bytes.ReplaceAll(packed, []byte(","), []byte(", "))} {
		b.Run(name, func(b *testing.B) {
			var dst []uint32
			b.ReportAllocs()
			for b.Loop() {
				s := scanner{b: body}
				var err *Error
				if dst, err = s.tokens(dst[:0]); err != nil || len(dst) != 8192 {
					b.Fatal(err, len(dst))
				}
			}
		})
	}
}
