package zmqwire

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"
)

func frames(texts ...string) (out [][]byte) {
	for _, s := range texts {
		out = append(out, []byte(s))
	}
	return out
}

const (
	seq5 = "\x00\x00\x00\x00\x00\x00\x00\x05"
	ends = "\xff\xff\xff\xff\xff\xff\xff\xff"
)

func TestParseMessage(t *testing.T) {
	f := func(in [][]byte, topic string, seq uint64, payload string) {
		t.Helper()
		m, err := ParseMessage(in)
		if err != nil || string(m.Topic) != topic || m.Seq != seq || string(m.Payload) != payload {
			t.Errorf("%q: %+v, %v", in, m, err)
		}
	}
	f(frames("", seq5, "p"), "", 5, "p")
	f(frames("kv@w@m", seq5, ""), "kv@w@m", 5, "")
	f(frames("t", "\xff\xff\xff\xff\xff\xff\xff\xfe", "p"), "t", math.MaxUint64-1, "p")

	fails := func(in [][]byte, want string) {
		t.Helper()
		if m, err := ParseMessage(in); !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want %q", in, m, err, want)
		}
	}
	fails(nil, "0 frames, expected 3")
	fails(frames(seq5, "p"), "2 frames, expected 3")
	fails(frames("", "", seq5, "p"), "4 frames, expected 3")
	fails(frames("t", "p", seq5), "a seq of 1 bytes, expected 8")
	fails(frames("t", seq5+"\x00", "p"), "a seq of 9 bytes, expected 8")
	fails(frames("t", "", "p"), "a seq of 0 bytes, expected 8")
	fails(frames("t", ends, "p"), "the end marker")
	fails(frames("t", ends, ""), "the end marker")
}

func TestParseReply(t *testing.T) {
	f := func(in [][]byte, topic string, seq uint64, payload string, wantEnd bool) {
		t.Helper()
		m, end, err := ParseReply(in)
		if err != nil || end != wantEnd || string(m.Topic) != topic || m.Seq != seq || string(m.Payload) != payload {
			t.Errorf("%q: %+v, %v, %v", in, m, end, err)
		}
	}
	f(frames("", seq5, "p"), "", 5, "p", false)
	f(frames(seq5, "p"), "", 5, "p", false)
	f(frames("", "", seq5, "p"), "", 5, "p", false)
	f(frames("", "kv@w@m", seq5, "p"), "kv@w@m", 5, "p", false)
	f(frames("kv@w@m", seq5, "p"), "kv@w@m", 5, "p", false)
	f(frames("", seq5, ""), "", 5, "", false) // no end: its batch cannot be read
	f(frames("", ends, ""), "", 0, "", true)
	f(frames(ends, ""), "", 0, "", true)
	f(frames("", "", ends, ""), "", 0, "", true)
	f(frames("", "kv@w@m", ends, ""), "kv@w@m", 0, "", true)

	fails := func(in [][]byte, want string) {
		t.Helper()
		if m, end, err := ParseReply(in); !errors.Is(err, ErrMalformed) || end || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, %v, want %q", in, m, end, err, want)
		}
	}
	fails(nil, "0 frames, expected 2 to 4")
	fails(frames(seq5), "1 frames, expected 2 to 4")
	fails(frames("", "", "", seq5, "p"), "5 frames, expected 2 to 4")
	fails(frames("x", "t", seq5, "p"), "a delimiter of 1 bytes, expected none")
	fails(frames("", "seq", "p"), "a seq of 3 bytes, expected 8")
	fails(frames("", ends, "p"), "an end marker with a payload of 1 bytes")
}

func FuzzParseReply(f *testing.F) {
	for _, path := range captures(f)[:4] {
		eachRecord(f, openCapture(f, path), func(r *Record) {
			if r.Kind == Reply {
				f.Add(len(r.Frames), bytes.Join(r.Frames, []byte{0}))
			}
		})
	}
	f.Add(3, []byte("\x00"+ends+"\x00"))
	f.Fuzz(func(t *testing.T, n int, b []byte) {
		// A zero byte ends a frame; the last has the rest. So the seqs have
		// none here, and the seeds above are only half of what matters.
		in := bytes.SplitN(b, []byte{0}, 1+n&7)
		m, end, err := ParseReply(in)
		if err != nil {
			if !errors.Is(err, ErrMalformed) || end {
				t.Fatalf("%q: %v, %v", in, end, err)
			}
			return
		}
		seq := in[len(in)-2]
		if len(seq) != 8 || end != (string(seq) == ends) || end && len(in[len(in)-1]) != 0 {
			t.Fatalf("%q: end %v", in, end)
		}
		if !end && !bytes.Equal(m.Payload, in[len(in)-1]) {
			t.Fatalf("%q: payload %q", in, m.Payload)
		}
		// What is a reply of three frames is a message, unless it is the end.
		if len(in) == 3 {
			if _, err := ParseMessage(in); (err == nil) == end {
				t.Fatalf("%q: as a message: %v", in, err)
			}
		}
	})
}
