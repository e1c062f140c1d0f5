package client

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestRetries(t *testing.T) {
	var asked atomic.Int32
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) < 3 {
			w.WriteHeader(http.StatusTooManyRequests)
			w.Write([]byte(`{"error":{"message":"busy","type":"rate_limit_error","code":429,"reason":"overloaded"}}`))
			return
		}
		if r.Header.Get("Authorization") != "Bearer t" {
			t.Error("no token")
		}
		w.Write([]byte(`{"model":"m","workers":[{"worker":"w0","device":16,"usable_tokens":null,"seq":18446744073709551615}],"best":"w0"}`))
	}))
	defer h.Close()
	c, err := New(h.URL, WithToken("t"), WithRetries(3, time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	a, err := c.Match(t.Context(), &MatchRequest{TokenIDs: []uint32{1}})
	if err != nil || a.Best != "w0" || a.Workers[0].UsableTokens != nil || *a.Workers[0].Seq != 1<<64-1 || asked.Load() != 3 {
		t.Errorf("%v %+v after %d", err, a, asked.Load())
	}

	// What changes something is not repeated.
	asked.Store(0)
	err = c.Report(t.Context(), &Outcome{Model: "m", Worker: "w"})
	var e *Error
	if !errors.As(err, &e) || e.Reason != "overloaded" || asked.Load() != 1 {
		t.Errorf("%v after %d", err, asked.Load())
	}

	// Retries end.
	asked.Store(-1000)
	if _, err = c.Match(t.Context(), &MatchRequest{}); !errors.As(err, &e) || asked.Load() != -996 {
		t.Errorf("%v after %d", err, asked.Load())
	}
}

func TestRefusals(t *testing.T) {
	answer := `{"error":{"message":"no","type":"invalid_request_error","code":409,"reason":"exact_mm_unavailable","param":"mm"},"refused":[{"worker":"w","reason":"no_image_token_id"}]}`
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusConflict)
		w.Write([]byte(answer))
	}))
	defer h.Close()
	c, err := New(strings.TrimPrefix(h.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Match(t.Context(), &MatchRequest{})
	var e *Error
	if !errors.As(err, &e) || e.Status != 409 || len(e.Refused) != 1 || !strings.Contains(e.Error(), "mm") {
		t.Errorf("%+v", err)
	}
	answer = "<html>"
	if _, err = c.Match(t.Context(), &MatchRequest{}); !errors.As(err, &e) || e.Reason != "unexpected_answer" {
		t.Errorf("%+v", err)
	}
}

func TestContextEnds(t *testing.T) {
	c, err := New("http://127.0.0.1:1", WithRetries(1000, time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Match(ctx, &MatchRequest{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAddresses(t *testing.T) {
	for _, bad := range []string{"", "ftp://x", "http://", "://"} {
		if _, err := New(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// Tokens of an empty prompt are sent, absent ones are not.
func TestRequestForm(t *testing.T) {
	f := func(r *MatchRequest, want string) {
		t.Helper()
		if b, err := json.Marshal(r); err != nil || string(b) != want {
			t.Errorf("%s %v, want %s", b, err, want)
		}
	}
	f(&MatchRequest{TokenIDs: []uint32{}}, `{"token_ids":[]}`)
	f(&MatchRequest{BlockHashes: []uint64{1 << 63}, HashBlockSize: 16}, `{"block_hashes":[9223372036854775808],"hash_block_size":16}`)
}
