package zmqwire

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"testing/iotest"
)

// collect reads all messages of src, copied, and all commands.
func collect(src io.Reader, buffer int) (messages [][][]byte, commands []string, err error) {
	r := newFrameReader(src, buffer, 1<<20, 8)
	r.command = func(b []byte) error {
		commands = append(commands, string(b))
		return nil
	}
	for {
		frames, err := r.next()
		if err != nil {
			return messages, commands, err
		}
		var m [][]byte
		for _, f := range frames {
			m = append(m, bytes.Clone(f))
		}
		messages = append(messages, m)
	}
}

// stream is some messages of all sizes with commands before, between and within
// them, and what they are.
func stream(r *rand.Rand) (wire []byte, messages [][][]byte, commands []string) {
	for range 40 {
		var m [][]byte
		n := 1 + r.IntN(4)
		for i := range n {
			if r.IntN(3) == 0 {
				c := string(rune('a' + r.IntN(26)))
				commands = append(commands, "\x01"+c)
				wire = appendCommand(wire, c, nil)
			}
			body := make([]byte, []int{0, 1, 8, 255, 256, 5000, 70000}[r.IntN(7)])
			for j := range body {
				body[j] = byte(r.Uint32())
			}
			flags := byte(flagMore)
			if i == n-1 {
				flags = 0
			}
			wire = appendFrame(wire, flags, body)
			m = append(m, body)
		}
		messages = append(messages, m)
	}
	return wire, messages, commands
}

func TestFrameReaderGivesWhatWasSent(t *testing.T) {
	f := func(seed uint64, buffer int, cut func(io.Reader) io.Reader) {
		t.Helper()
		wire, want, wantCommands := stream(rand.New(rand.NewPCG(seed, 0)))
		got, commands, err := collect(cut(bytes.NewReader(wire)), buffer)
		if err != io.EOF {
			t.Fatalf("err %v, want EOF", err)
		}
		if len(got) != len(want) || len(commands) != len(wantCommands) {
			t.Fatalf("%d messages, %d commands, want %d, %d", len(got), len(commands), len(want), len(wantCommands))
		}
		for i := range want {
			if len(got[i]) != len(want[i]) {
				t.Fatalf("message %d: %d frames, want %d", i, len(got[i]), len(want[i]))
			}
			for j := range want[i] {
				if !bytes.Equal(got[i][j], want[i][j]) {
					t.Fatalf("message %d frame %d differs", i, j)
				}
			}
		}
	}
	whole := func(r io.Reader) io.Reader { return r }
	for seed := range uint64(20) {
		f(seed, 64, whole)
		f(seed, 4096, whole)
		f(seed, 64<<10, whole)
		f(seed, 64, iotest.HalfReader)
		f(seed, 4096, iotest.DataErrReader)
	}
	f(99, 1024, iotest.OneByteReader)
}

// TestFrameReaderGoesOnAfterTimeout: a deadline in the middle of a frame loses
// nothing.
func TestFrameReaderGoesOnAfterTimeout(t *testing.T) {
	wire := messageOf("topic", 7, "payload")
	for cut := 1; cut < len(wire); cut++ {
		src := &timeoutAt{wire: wire, cut: cut}
		r := newFrameReader(src, 64, 1024, 8)
		if _, err := r.next(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("cut %d: err %v, want a timeout", cut, err)
		}
		r.trim()
		frames, err := r.next()
		if err != nil || len(frames) != 3 || string(frames[2]) != "payload" {
			t.Fatalf("cut %d: %q, %v", cut, frames, err)
		}
	}
}

// timeoutAt times out once, after cut bytes.
type timeoutAt struct {
	wire []byte
	cut  int
	at   int
}

func (s *timeoutAt) Read(p []byte) (int, error) {
	if s.at == s.cut {
		s.cut = -1
		return 0, os.ErrDeadlineExceeded
	}
	end := len(s.wire)
	if s.at < s.cut {
		end = s.cut
	}
	n := copy(p, s.wire[s.at:end])
	s.at += n
	return n, nil
}

// TestFrameReaderBuffer: memory follows the bytes that came, not those that a
// header announces, and goes back when large messages stop.
func TestFrameReaderBuffer(t *testing.T) {
	const base = 4 << 10
	read := func(r *frameReader, n int) {
		t.Helper()
		for range n {
			if _, err := r.next(); err != nil {
				t.Fatal(err)
			}
		}
	}
	small, large := messageOf("", 1, "x"), messageOf("", 2, string(make([]byte, 300<<10)))
	huge := messageOf("", 3, string(make([]byte, 5<<20)))

	r := newFrameReader(bytes.NewReader(longFrame(0, 16<<20)), base, 16<<20, 8)
	if _, err := r.next(); err != io.EOF || len(r.buf) != base {
		t.Errorf("after a mere header: buffer %d, err %v; want %d, EOF", len(r.buf), err, base)
	}

	r = newFrameReader(bytes.NewReader(append(bytes.Clone(large), bytes.Repeat(small, 10*shrinkAfter)...)), base, 16<<20, 8)
	read(r, 1)
	if len(r.buf) > 4*len(large) {
		t.Errorf("buffer of %d for a message of %d", len(r.buf), len(large))
	}
	read(r, 10*shrinkAfter)
	r.trim()
	if _, err := r.next(); err != io.EOF || len(r.buf) != base {
		t.Errorf("after many small messages: buffer %d, err %v; want %d", len(r.buf), err, base)
	}

	r = newFrameReader(iotest.HalfReader(bytes.NewReader(append(bytes.Clone(huge), bytes.Repeat(small, 100)...))), base, 16<<20, 8)
	read(r, 101)
	if _, err := r.next(); err != io.EOF || len(r.buf) > retainBuffer {
		t.Errorf("after a huge message: buffer %d, err %v; want at most %d", len(r.buf), err, retainBuffer)
	}
}

func TestFrameReaderDoesNotAllocate(t *testing.T) {
	wire := bytes.Repeat(messageOf("topic", 1, string(make([]byte, 200))), 1000)
	src := &endless{wire: wire}
	r := newFrameReader(src, 64<<10, 1<<20, 8)
	if n := testing.AllocsPerRun(10_000, func() {
		if frames, err := r.next(); err != nil || len(frames) != 3 {
			t.Fatal(frames, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a message, want 0", n)
	}
}

// endless repeats wire.
type endless struct {
	wire []byte
	at   int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.wire[e.at:])
	e.at = (e.at + n) % len(e.wire)
	return n, nil
}

// FuzzFrames: whatever comes, a message is within its limits and the buffer
// within a small multiple of what came.
func FuzzFrames(f *testing.F) {
	wire, _, _ := stream(rand.New(rand.NewPCG(1, 2)))
	f.Add(wire[:2000], uint8(7))
	f.Add(messageOf("t", 1, "payload"), uint8(1))
	f.Add(longFrame(0, 1<<62), uint8(0))
	f.Add(appendCommand(messageOf("", 1, "")[:3], "PING", []byte("\x00\x00ctx")), uint8(3))
	f.Fuzz(func(t *testing.T, in []byte, step uint8) {
		const limit, base = 1 << 16, 32
		r := newFrameReader(&steps{in, int(step) + 1}, base, limit, 8)
		r.command = func(body []byte) error {
			splitCommand(body)
			return nil
		}
		for {
			frames, err := r.next()
			if len(r.buf) > base+4*len(in) {
				t.Fatalf("buffer of %d for %d bytes", len(r.buf), len(in))
			}
			if err != nil {
				return
			}
			size := 0
			for _, b := range frames {
				size += len(b)
			}
			if len(frames) == 0 || len(frames) > 8 || size > limit {
				t.Fatalf("message of %d frames, %d bytes", len(frames), size)
			}
		}
	})
}

// steps gives in, n bytes a read.
type steps struct {
	in []byte
	n  int
}

func (s *steps) Read(p []byte) (int, error) {
	if len(s.in) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.in[:min(s.n, len(s.in))])
	s.in = s.in[n:]
	return n, nil
}
