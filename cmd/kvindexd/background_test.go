package main

import (
	"bytes"
	"context"
	"io"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// background is a command that runs in this process beside the test.
type background struct {
	out, err lockedBuffer
	cancel   context.CancelFunc
	ended    chan int
}

// lockedBuffer is written by the command while the test reads.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func startInBackground(t testing.TB, args ...string) *background {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	b := &background{cancel: cancel, ended: make(chan int, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.ended <- run(ctx, args, strings.NewReader(""), &b.out, &b.err)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return b
}

// wait returns the exit code.
func (b *background) wait(t testing.TB) int {
	t.Helper()
	select {
	case code := <-b.ended:
		return code
	case <-time.After(patience):
		t.Fatalf("does not end:\n%s%s", b.out.String(), b.err.String())
		return 0
	}
}

func (b *background) stderr() string { return b.err.String() }

var httpAddress = regexp.MustCompile(`http://[0-9.:]+[0-9]`)

// startCommand runs a command until the test ends, waits until it has said
// something, and returns the HTTP address that it printed, if any.
func startCommand(t testing.TB, says string, args ...string) string {
	t.Helper()
	b := startInBackground(t, args...)
	eventually(t, func() error {
		if all := b.out.String() + b.err.String(); !strings.Contains(all, says) {
			return &notSaid{says, all}
		}
		return nil
	})
	return httpAddress.FindString(b.out.String() + b.err.String())
}

type notSaid struct{ what, all string }

func (e *notSaid) Error() string { return "has not said " + e.what + ":\n" + e.all }

var _ io.Writer = (*lockedBuffer)(nil)
