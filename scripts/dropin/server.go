package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// server is one of the two that are compared: a process of its own and where it
// answers.
type server struct {
	name   string
	base   string
	log    string
	client *http.Client
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the process has
}

const (
	startPatience = 30 * time.Second
	startTries    = 3
)

// startServer runs argv(port) on a free port of loopback and waits until
// GET /health answers. Neither program tells a port that it chose, so another
// process may take the free one first: then it is tried again with the next.
func startServer(ctx context.Context, name, log string, argv func(port string) []string) (s *server, err error) {
	for range startTries {
		if s, err = tryServer(ctx, name, log, argv); err == nil {
			return s, nil
		}
	}
	return nil, err
}

func tryServer(ctx context.Context, name, log string, argv func(port string) []string) (*server, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	args := argv(port)
	s := &server{
		name: name, base: "http://127.0.0.1:" + port, log: log, ended: make(chan struct{}),
		client: &http.Client{Timeout: 30 * time.Second, Transport: new(http.Transport)},
		cmd:    exec.CommandContext(ctx, args[0], args[1:]...),
	}
	s.cmd.Stdout, s.cmd.Stderr = out, out
	s.cmd.Cancel = func() error { return s.cmd.Process.Signal(syscall.SIGINT) }
	s.cmd.WaitDelay = 5 * time.Second
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	go func() {
		defer close(s.ended)
		_ = s.cmd.Wait() // how it ended does not matter: a test that needed it has failed
	}()
	if err := s.awaitHealth(ctx); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

func (s *server) awaitHealth(ctx context.Context) error {
	deadline := time.After(startPatience)
	for tick := time.NewTicker(50 * time.Millisecond); ; {
		if a, err := s.ask(ctx, http.MethodGet, "/health", nil); err == nil && a.status == http.StatusOK {
			tick.Stop()
			return nil
		}
		select {
		case <-s.ended:
			return fmt.Errorf("%s ended at once:\n%s", s.name, s.tail())
		case <-deadline:
			return fmt.Errorf("%s does not answer GET /health on %s:\n%s", s.name, s.base, s.tail())
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// tail is the end of the process's own output.
func (s *server) tail() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	const most = 4 << 10
	return strings.TrimSpace(string(b[max(0, len(b)-most):]))
}

// stop interrupts the process and waits for its end.
func (s *server) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGINT) // an error says that it has ended
	select {
	case <-s.ended:
	case <-time.After(5 * time.Second):
		_ = s.cmd.Process.Kill()
		<-s.ended
	}
}

// answer is what came back: JSON as encoding/json decodes it with UseNumber,
// any other body as its text.
type answer struct {
	status int
	kind   string // json, text or none
	body   any
}

// raw is a body that is sent as it stands, with its own content type.
type raw struct {
	contentType string
	body        []byte
}

func (s *server) ask(ctx context.Context, method, path string, body any) (answer, error) {
	var payload []byte
	contentType := "application/json"
	switch b := body.(type) {
	case nil:
		contentType = ""
	case raw:
		payload, contentType = b.body, b.contentType
	default:
		var err error
		if payload, err = json.Marshal(b); err != nil {
			return answer{}, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, s.base+path, bytes.NewReader(payload))
	if err != nil {
		return answer{}, err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	res, err := s.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return answer{}, err
	}
	return newAnswer(res, b)
}

func newAnswer(res *http.Response, b []byte) (answer, error) {
	a := answer{status: res.StatusCode, kind: "none"}
	switch {
	case len(b) == 0:
	case strings.HasPrefix(res.Header.Get("Content-Type"), "application/json"):
		a.kind = "json"
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		if err := d.Decode(&a.body); err != nil {
			return a, fmt.Errorf("an answer that calls itself JSON: %w", err)
		}
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return a, errors.New("an answer has something behind its JSON")
		}
	default:
		a.kind, a.body = "text", string(b)
	}
	return a, nil
}
