package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/api/client"
)

// asCommand makes this test binary the command itself: tests start real
// processes by it.
const asCommand = "KVINDEXD_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) == "1" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// patience bounds every wait of these tests. It measures nothing: a test that
// runs into it has failed.
const patience = 20 * time.Second

// runs executes a command in this process.
func runs(t testing.TB, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	code = run(ctx, args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// mustRun executes a command that must go well, and returns what it printed.
func mustRun(t testing.TB, args ...string) string {
	t.Helper()
	code, out, errs := runs(t, args...)
	if code != exitOK {
		t.Fatalf("kvindexd %s: exit code %d\n%s%s", strings.Join(args, " "), code, out, errs)
	}
	return out
}

// served is a running `kvindexd serve`, in this process or in one of its own.
type served struct {
	t       testing.TB
	address string
	client  *client.Client

	log   *logLines
	stop  func() // asks it to end
	ended chan int
	cmd   *exec.Cmd
}

// serveHere runs serve in this process until the test ends.
func serveHere(t testing.TB, args ...string) *served {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	s := &served{t: t, log: readLog(r), stop: cancel, ended: make(chan int, 1)}
	go func() {
		code := run(ctx, serveArgs(args), strings.NewReader(""), io.Discard, w)
		w.Close()
		s.ended <- code
	}()
	t.Cleanup(func() {
		cancel()
		<-s.log.closed
	})
	s.connect()
	return s
}

// serveProcess runs serve in a process of its own.
func serveProcess(t testing.TB, args ...string) *served {
	t.Helper()
	cmd := exec.Command(os.Args[0], serveArgs(args)...)
	cmd.Env = append(os.Environ(), asCommand+"=1")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &served{t: t, log: readLog(stderr), ended: make(chan int, 1), cmd: cmd}
	s.stop = func() { _ = cmd.Process.Signal(syscall.SIGTERM) }
	go func() {
		<-s.log.closed
		_ = cmd.Wait()
		s.ended <- cmd.ProcessState.ExitCode()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-s.log.closed
	})
	s.connect()
	return s
}

func serveArgs(args []string) []string {
	return append([]string{"serve", "--listen", "127.0.0.1:0", "--log-format", "json"}, args...)
}

func (s *served) connect() {
	s.t.Helper()
	line := s.log.wait(s.t, "listening")
	s.address = "http://" + line["address"].(string)
	var err error
	if s.client, err = client.New(s.address); err != nil {
		s.t.Fatal(err)
	}
}

// exit waits for the end and returns the exit code.
func (s *served) exit() int {
	s.t.Helper()
	select {
	case code := <-s.ended:
		return code
	case <-time.After(patience):
		s.t.Fatal("serve does not end")
		return 0
	}
}

// logLines are a JSON log as it comes.
type logLines struct {
	mu      sync.Mutex
	lines   []map[string]any
	raw     []string
	changed chan struct{}
	closed  chan struct{}
}

func readLog(r io.Reader) *logLines {
	l := &logLines{changed: make(chan struct{}), closed: make(chan struct{})}
	go func() {
		defer close(l.closed)
		lines := bufio.NewScanner(r)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			line := map[string]any{}
			_ = json.Unmarshal(lines.Bytes(), &line)
			l.mu.Lock()
			l.lines = append(l.lines, line)
			l.raw = append(l.raw, lines.Text())
			close(l.changed)
			l.changed = make(chan struct{})
			l.mu.Unlock()
		}
	}()
	return l
}

// wait returns the first line with that message.
func (l *logLines) wait(t testing.TB, msg string) map[string]any {
	t.Helper()
	deadline := time.After(patience)
	for {
		l.mu.Lock()
		for _, line := range l.lines {
			if line["msg"] == msg {
				l.mu.Unlock()
				return line
			}
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-l.closed:
			t.Fatalf("ended without saying %q:\n%s", msg, l)
		case <-deadline:
			t.Fatalf("has not said %q:\n%s", msg, l)
		}
	}
}

// String is the log so far.
func (l *logLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.raw, "\n")
}

// eventually waits until check has nothing more to say.
func eventually(t testing.TB, check func() error) {
	t.Helper()
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	deadline := time.After(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-look.C:
		case <-deadline:
			t.Fatal(err)
		}
	}
}

// fleetView is the daemon's list of workers.
func (s *served) fleetView() (*workerList, error) {
	raw, err := s.client.Workers(s.t.Context())
	if err != nil {
		return nil, err
	}
	l := new(workerList)
	return l, json.Unmarshal(raw, l)
}

// captures are the names of all recorded histories.
func captures(t testing.TB) []string {
	files, err := filepath.Glob("../../testdata/captures/*.kvcap.zst")
	if err != nil || len(files) == 0 {
		t.Fatalf("no captures: %v", err)
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), ".kvcap.zst")
	}
	return files
}

func capturePath(name string) string { return "../../testdata/captures/" + name + ".kvcap.zst" }
func queriesPath(name string) string { return "../../testdata/captures/" + name + ".queries.jsonl" }

var errNotYet = errors.New("not yet")
