package zmqwire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// script is a replay endpoint that answers each request from what the test
// says: answers[i] for the i-th, the last one for all later ones.
type script struct {
	endpoint string
	mu       sync.Mutex
	asked    []uint64
	answers  []string
}

// scripted runs a script. An answer is a list of words: a number is a reply of
// that seq, "a-b" replies a..b, "end" the end marker, "old:" before either the
// old layout, "junk" a message that is no reply, "close" closes, "hang" waits;
// "N=text" is a reply with that payload.
func scripted(t *testing.T, answers ...string) *script {
	s := &script{answers: answers}
	s.endpoint = peers(t, func(c net.Conn) {
		if !greet(c, "ROUTER", 1) {
			return
		}
		readFrame(c)
		b, err := readFrame(c)
		if err != nil {
			return
		}
		s.mu.Lock()
		n := min(len(s.asked), len(s.answers)-1)
		s.asked = append(s.asked, binary.BigEndian.Uint64(b[2:]))
		s.mu.Unlock()
		s.answer(c, s.answers[n])
	})
	return s
}

func (s *script) answer(c net.Conn, words string) {
	for _, w := range strings.Fields(words) {
		w, old := strings.CutPrefix(w, "old:")
		var a, b uint64
		var text string
		switch {
		case w == "end":
			c.Write(replyOf(old, endSeq, ""))
		case w == "junk":
			c.Write(appendFrame(nil, 0, []byte("junk")))
		case w == "close":
			c.Close()
			return
		case w == "hang":
			hold(c)
		case scan(w, "%d-%d", &a, &b):
			for seq := a; seq <= b; seq++ {
				c.Write(replyOf(old, seq, "p"))
			}
		case scan(w, "%d=%s", &a, &text):
			c.Write(replyOf(old, a, text))
		case scan(w, "%d", &a):
			c.Write(replyOf(old, a, "p"))
		default:
			panic("script: " + w)
		}
	}
	hold(c)
}

func scan(w, format string, into ...any) bool {
	n, _ := fmt.Sscanf(w, format, into...)
	return n == len(into)
}

func replyOf(old bool, seq uint64, payload string) []byte {
	b := []byte{flagMore, 0}
	if !old {
		b = appendFrame(b, flagMore, []byte("topic"))
	}
	b = appendFrame(b, flagMore, binary.BigEndian.AppendUint64(nil, seq))
	return appendFrame(b, 0, []byte(payload))
}

func (s *script) requests() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprint(s.asked)
}

func TestReplay(t *testing.T) {
	noLeaks(t)
	stop := errors.New("stop")
	f := func(answer string, cfg ReplayConfig, wantErr error, want ReplayResult) {
		t.Helper()
		s := scripted(t, answer)
		cfg.Endpoint, cfg.InactivityTimeout, cfg.Logger = s.endpoint, 50*time.Millisecond, quiet
		last := uint64(0)
		res, err := Replay(patience(t), cfg, func(m Message) error {
			if last > 0 && m.Seq <= last {
				t.Errorf("%q: seq %d after %d", answer, m.Seq, last)
			}
			last = m.Seq
			if string(m.Payload) == "stop" {
				return stop
			}
			return nil
		})
		if !errors.Is(err, wantErr) {
			t.Errorf("%q: err %v, want %v", answer, err, wantErr)
		}
		if got, want := fmt.Sprintf("%+v", res), fmt.Sprintf("%+v", want); got != want {
			t.Errorf("%q:\n got %s\nwant %s", answer, got, want)
		}
	}
	from5 := ReplayConfig{From: 5}
	f("5-9 end", from5, nil, ReplayResult{Replies: 5, Bytes: 5, First: 5, Next: 10, Complete: true})
	f("old:5-9 old:end", from5, nil, ReplayResult{Replies: 5, Bytes: 5, First: 5, Next: 10, Complete: true})
	f("end", from5, nil, ReplayResult{First: 5, Next: 5, Complete: true})
	f("old:end", from5, nil, ReplayResult{First: 5, Next: 5, Complete: true})
	f("8-9 end", from5, nil, ReplayResult{Replies: 2, Bytes: 2, First: 8, Next: 10, Complete: true})
	f("5 7 10 end", from5, nil, ReplayResult{Replies: 3, Bytes: 3, First: 5, Next: 11, Complete: true,
		Holes: []SeqRange{{6, 7}, {8, 10}}, Missing: 3})
	f("5 4 5 6 junk end", from5, nil, ReplayResult{Replies: 2, Bytes: 2, First: 5, Next: 7, Complete: true, Malformed: 1, Disordered: 2})
	f("5-6", from5, ErrReplayInactive, ReplayResult{Replies: 2, Bytes: 2, First: 5, Next: 7})
	f("hang", from5, ErrReplayInactive, ReplayResult{First: 5, Next: 5})
	f("5-6 close", from5, ReasonClosed, ReplayResult{Replies: 2, Bytes: 2, First: 5, Next: 7})
	f("5 6=stop 7 end", from5, stop, ReplayResult{Replies: 1, Bytes: 1, First: 5, Next: 7})
	f(strings.Repeat("junk ", maxMalformed), from5, ReasonMalformedMessages, ReplayResult{First: 5, Next: 5, Malformed: maxMalformed})
	f("5-20", ReplayConfig{From: 5, Until: 8}, nil, ReplayResult{Replies: 3, Bytes: 3, First: 5, Next: 8, Complete: true})
	f("5 6="+strings.Repeat("x", 200)+" end", ReplayConfig{From: 5, MaxBytes: 100}, ErrReplayBytes,
		ReplayResult{Replies: 1, Bytes: 1, First: 5, Next: 6})
	f("5 6="+strings.Repeat("x", 200)+" end", ReplayConfig{From: 5, MaxMessage: 100}, ReasonOversizedFrame,
		ReplayResult{Replies: 1, Bytes: 1, First: 5, Next: 6})
}

// TestReplayLiar: a peer that makes a hole of every second number is counted
// and costs no more memory than that.
func TestReplayLiar(t *testing.T) {
	noLeaks(t)
	var b strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&b, "%d ", 2*i)
	}
	s := scripted(t, b.String()+" 18446744073709551614 end")
	res, err := Replay(patience(t), ReplayConfig{Endpoint: s.endpoint}, func(Message) error { return nil })
	if err != nil || len(res.Holes) != maxHoles || res.Missing != endSeq-1-2000 || res.Next != endSeq {
		t.Errorf("%d holes, %d missing, next %d, %v", len(res.Holes), res.Missing, res.Next, err)
	}
}

func TestReplayCancel(t *testing.T) {
	noLeaks(t)
	s := scripted(t, "0-2 hang")
	ctx, cancel := context.WithCancelCause(context.Background())
	gone := errors.New("gone")
	res, err := Replay(ctx, ReplayConfig{Endpoint: s.endpoint, InactivityTimeout: time.Hour}, func(m Message) error {
		if m.Seq == 2 {
			cancel(gone)
		}
		return nil
	})
	if err != gone || res.Replies != 3 || res.Complete {
		t.Errorf("%+v, %v; want the cause after 3 replies", res, err)
	}
	silent := peers(t, hold)
	_, err = Replay(patience(t), ReplayConfig{Endpoint: silent, HandshakeTimeout: 20 * time.Millisecond}, nil)
	if ReasonOf(err) != ReasonHandshakeTimeout {
		t.Errorf("silent endpoint: %v, want handshake_timeout", err)
	}
	if _, err := Replay(patience(t), ReplayConfig{Endpoint: "inproc://x"}, nil); !errors.Is(err, ErrEndpoint) {
		t.Errorf("%v, want ErrEndpoint", err)
	}
}

// TestReplayReadsAhead: a caller that takes its time does not keep replies on
// the publisher's side.
func TestReplayReadsAhead(t *testing.T) {
	noLeaks(t)
	const n, size = 2000, 10 << 10
	p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:*"})
	for range n {
		p.Publish(make([]byte, size))
	}
	ctx := patience(t)
	res, err := Replay(ctx, ReplayConfig{Endpoint: p.ReplayAddr(), From: 10}, func(m Message) error {
		for m.Seq == 10 && p.Stats().Replays == 0 { // Until the publisher has sent all.
			if ctx.Err() != nil {
				return ctx.Err()
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	})
	if err != nil || !res.Complete || res.Replies != n-10 || res.First != 10 || res.Next != n {
		t.Errorf("%+v, %v", res, err)
	}
}

// TestReplayAll: what one replay leaves open is asked again, from the number
// before the hole on.
func TestReplayAll(t *testing.T) {
	noLeaks(t)
	f := func(name string, from uint64, answers []string, wantSeqs, wantAsked string, want ReplayAllResult, wantErr error) {
		t.Helper()
		t.Run(name, func(t *testing.T) {
			s := scripted(t, answers...)
			var seqs []string
			cfg := ReplayConfig{Endpoint: s.endpoint, From: from, InactivityTimeout: 40 * time.Millisecond, Logger: quiet, Attempts: 2}
			res, err := ReplayAll(patience(t), cfg, func(m Replayed) error {
				s := fmt.Sprint(m.Seq)
				if m.Lost > 0 {
					s = fmt.Sprintf("lost:%d,%s", m.Lost, s)
				}
				if m.Burnt > 0 {
					s = fmt.Sprintf("burnt:%d,%s", m.Burnt, s)
				}
				seqs = append(seqs, s)
				return nil
			})
			if !errors.Is(err, wantErr) {
				t.Errorf("err %v, want %v", err, wantErr)
			}
			if got := strings.Join(seqs, " "); got != wantSeqs {
				t.Errorf("replies %s, want %s", got, wantSeqs)
			}
			if got := s.requests(); got != wantAsked {
				t.Errorf("asked %s, want %s", got, wantAsked)
			}
			if got, want := fmt.Sprintf("%+v", res), fmt.Sprintf("%+v", want); got != want {
				t.Errorf("\n got %s\nwant %s", got, want)
			}
		})
	}
	f("whole", 5, []string{"5-8 end"}, "5 6 7 8", "[5]",
		ReplayAllResult{Replies: 4, Bytes: 4, Next: 9, Complete: true, Requests: 1}, nil)
	f("nothing", 5, []string{"end"}, "", "[5]",
		ReplayAllResult{Next: 5, Complete: true, Requests: 1}, nil)
	f("history gone", 5, []string{"8-9 end"}, "lost:3,8 9", "[5]",
		ReplayAllResult{Replies: 2, Bytes: 2, Next: 10, Complete: true, Lost: 3, Requests: 1}, nil)
	f("dropped in the middle", 0, []string{"0-2 5-6 end", "2-6 end"}, "0 1 2 3 4 5 6", "[0 2]",
		ReplayAllResult{Replies: 7, Bytes: 7, Next: 7, Complete: true, Requests: 2}, nil)
	f("burnt", 0, []string{"0-2 5-6 end", "2 5-6 end"}, "0 1 2 burnt:2,5 6", "[0 2]",
		ReplayAllResult{Replies: 5, Bytes: 5, Next: 7, Complete: true, Burnt: 2, Requests: 2}, nil)
	f("burnt twice, two requests", 0, []string{"0 2 4 6 end", "0 2 4 6 end"}, "0 burnt:1,2 burnt:1,4 burnt:1,6", "[0 0]",
		ReplayAllResult{Replies: 4, Bytes: 4, Next: 7, Complete: true, Burnt: 3, Requests: 2}, nil)
	f("burnt and dropped", 0, []string{"0-1 4 6-9", "1 3-4 6 8-9 end", "6-9 end"}, "0 1 burnt:1,3 4 burnt:1,6 7 8 9", "[0 1 6]",
		ReplayAllResult{Replies: 8, Bytes: 8, Next: 10, Complete: true, Burnt: 2, Requests: 3}, nil)
	f("overwritten in the meantime", 0, []string{"0-2 5 end", "4-6 end"}, "0 1 2 lost:1,4 5 6", "[0 2]",
		ReplayAllResult{Replies: 6, Bytes: 6, Next: 7, Complete: true, Lost: 1, Requests: 2}, nil)
	f("no end marker", 0, []string{"0-2", "2 end"}, "0 1 2", "[0 2]",
		ReplayAllResult{Replies: 3, Bytes: 3, Next: 3, Complete: true, Requests: 2}, nil)
	f("closes in the middle", 0, []string{"0-2 close", "2-4 end"}, "0 1 2 3 4", "[0 2]",
		ReplayAllResult{Replies: 5, Bytes: 5, Next: 5, Complete: true, Requests: 2}, nil)
	f("silent", 3, []string{"hang"}, "", "[3 3]",
		ReplayAllResult{Next: 3, Requests: 2}, ErrReplayInactive)
	f("silent after a while", 3, []string{"3 hang", "3 hang"}, "3", "[3 3 3]",
		ReplayAllResult{Replies: 1, Bytes: 1, Next: 4, Requests: 3}, ErrReplayAttempts)
	f("restarted and empty", 3, []string{"3-5 close", "end"}, "3 4 5", "[3 5]",
		ReplayAllResult{Replies: 3, Bytes: 3, Next: 6, Requests: 2}, ErrReplayRestarted)
	f("restarted with other content", 3, []string{"3-5 close", "5=other 6 end"}, "3 4 5", "[3 5]",
		ReplayAllResult{Replies: 3, Bytes: 3, Next: 6, Requests: 2}, ErrReplayRestarted)
}

// TestReplayAllUntil: a caller that holds live messages from a seq on needs no
// end marker.
func TestReplayAllUntil(t *testing.T) {
	noLeaks(t)
	s := scripted(t, "0-9 hang")
	res, err := ReplayAll(patience(t), ReplayConfig{Endpoint: s.endpoint, Until: 5, InactivityTimeout: time.Hour},
		func(Replayed) error { return nil })
	if err != nil || res.Next != 5 || !res.Complete {
		t.Errorf("%+v, %v", res, err)
	}
}

// TestReplayAllEndless: a peer that gives one new reply and a hole each time is
// left at last.
func TestReplayAllEndless(t *testing.T) {
	noLeaks(t)
	var n uint64
	endpoint := peers(t, func(c net.Conn) {
		if !greet(c, "ROUTER", 1) {
			return
		}
		readFrame(c)
		b, err := readFrame(c)
		if err != nil {
			return
		}
		from := binary.BigEndian.Uint64(b[2:])
		n++ // One request at a time.
		c.Write(replyOf(false, from, "p"))
		c.Write(replyOf(false, from+1, "p"))
		c.Close()
	})
	res, err := ReplayAll(patience(t), ReplayConfig{Endpoint: endpoint, Logger: quiet}, func(Replayed) error { return nil })
	if !errors.Is(err, ErrReplayAttempts) || res.Requests != maxRequests {
		t.Errorf("%+v, %v; want %d requests", res, err, maxRequests)
	}
}
