// Package wiretest is what tests of the wire share: Python processes that speak
// through real libzmq, and a proxy that misbehaves on command. It is for tests
// only and knows nothing of the packages it tests.
package wiretest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Patience bounds every wait of this package. It is no measure of anything: a
// test that runs into it has failed.
const Patience = 20 * time.Second

// Interpreter is a Python that can import the modules named: KVINDEXD_PYTHON,
// else python3. Without one the test is skipped, or fails where
// KVINDEXD_REQUIRE_PYTHON is 1.
func Interpreter(tb testing.TB, modules ...string) string {
	tb.Helper()
	python := os.Getenv("KVINDEXD_PYTHON")
	if python == "" {
		python = "python3"
	}
	reason := cannotImport(python, strings.Join(modules, ","))
	if reason == "" {
		return python
	}
	if os.Getenv("KVINDEXD_REQUIRE_PYTHON") == "1" {
		tb.Fatal(reason)
	}
	tb.Skip(reason)
	return ""
}

// found remembers what was tried: a test may start many processes.
var found sync.Map

func cannotImport(python, modules string) string {
	try, _ := found.LoadOrStore(python+" "+modules, sync.OnceValue(func() string {
		out, err := exec.Command(python, "-c", "import "+modules).CombinedOutput()
		if err == nil {
			return ""
		}
		return fmt.Sprintf("%s cannot import %s: %v %s", python, modules, err, lastLine(out))
	}))
	return try.(func() string)()
}

func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}

// Process is a running script: commands in by line, answers out by line.
type Process struct {
	tb    testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
	done  chan struct{}
}

// Python starts script (which needs pyzmq) and kills it at the test's end.
func Python(tb testing.TB, script string, args ...string) *Process {
	tb.Helper()
	python := Interpreter(tb, "zmq")
	p := &Process{tb: tb, lines: make(chan string, 64), done: make(chan struct{})}
	p.cmd = exec.Command(python, append([]string{"-u", script}, args...)...)
	p.cmd.Stderr = os.Stderr
	in, err := p.cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	p.in = in
	go func() {
		defer close(p.done)
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	tb.Cleanup(p.Kill)
	return p
}

// Say sends one line.
func (p *Process) Say(format string, args ...any) {
	p.tb.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.tb.Fatalf("script: %v", err)
	}
}

// Line is the next line that the script prints.
func (p *Process) Line() string {
	p.tb.Helper()
	select {
	case l, ok := <-p.lines:
		if !ok {
			p.tb.Fatal("script ended")
		}
		return l
	case <-time.After(Patience):
		p.tb.Fatal("script says nothing")
	}
	return ""
}

// Ask is Say and Line.
func (p *Process) Ask(format string, args ...any) string {
	p.tb.Helper()
	p.Say(format, args...)
	return p.Line()
}

// Signal sends a signal: SIGSTOP and SIGCONT make it silent and wake it.
func (p *Process) Signal(s syscall.Signal) {
	p.tb.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.tb.Fatal(err)
	}
}

// Kill is kill -9, and waits for the end.
func (p *Process) Kill() {
	if p.cmd.ProcessState != nil {
		return
	}
	_ = p.cmd.Process.Kill()
	p.in.Close()
	for range p.lines {
		continue // Unblock the reader.
	}
	<-p.done
	_ = p.cmd.Wait()
}
