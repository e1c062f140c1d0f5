package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// daemon is kvindexd in a process of its own.
type daemon struct {
	cmd     *exec.Cmd
	address string
	dir     string // of the program, where it was built for this
}

var listening = regexp.MustCompile(`msg=listening address=(\S+)`)

// startDaemon runs kvindexd with the engines as its workers.
func startDaemon(ctx context.Context, s settings, e *engines) (*daemon, error) {
	d := new(daemon)
	if s.daemon == "" {
		dir, err := os.MkdirTemp("", "bench-api")
		if err != nil {
			return nil, err
		}
		d.dir, s.daemon = dir, filepath.Join(dir, "kvindexd")
		build := exec.CommandContext(ctx, "go", "build", "-o", s.daemon, "github.com/kvindexd/kvindexd/cmd/kvindexd")
		if out, err := build.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build: %w: %s", err, out)
		}
	}
	args := []string{"serve", "--listen", "127.0.0.1:0"}
	for i, p := range e.pubs {
		args = append(args, "--worker", fmt.Sprintf("id=w%d,model=m,endpoint=%s,replay_endpoint=%s", i, p.Addr(), p.ReplayAddr()))
	}
	d.cmd = exec.CommandContext(ctx, s.daemon, args...)
	log, err := d.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(log)
	for d.address == "" && lines.Scan() {
		if m := listening.FindSubmatch(lines.Bytes()); m != nil {
			d.address = string(m[1])
		}
	}
	if d.address == "" {
		return nil, errors.New("the daemon does not listen")
	}
	go func() {
		for lines.Scan() { // or it would block on its log
		}
	}()
	return d, nil
}

func (d *daemon) stop() {
	d.cmd.Process.Signal(os.Interrupt)
	d.cmd.Wait()
	if d.dir != "" {
		os.RemoveAll(d.dir)
	}
}

// cpu is the processor time that the daemon has used. The kernel counts it in
// hundredths of a second.
func (d *daemon) cpu() (time.Duration, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("unexpected /proc/stat: %q", raw)
	}
	user, err1 := strconv.Atoi(string(fields[11]))
	system, err2 := strconv.Atoi(string(fields[12]))
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err1, err2)
}

// settle asks until every worker holds the whole prompt.
func (d *daemon) settle(ctx context.Context, r *request, s settings) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	c, err := dial(ctx, d.address)
	if err != nil {
		return err
	}
	defer c.Close()
	for {
		body, err := c.ask(r)
		if err != nil {
			return err
		}
		if n := bytes.Count(body, r.held(s.tokens)); n >= min(topK, s.workers) {
			return nil
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("the workers do not hold the prompt: %w: %s", err, body)
		}
	}
}

// behind waits until every worker stands where its publisher does.
func (d *daemon) behind(ctx context.Context, e *engines) (time.Duration, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		ok, err := d.stands(ctx, e)
		if ok || err != nil {
			return time.Since(began), err
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return 0, fmt.Errorf("the daemon does not catch up: %w", err)
		}
	}
}

func (d *daemon) stands(ctx context.Context, e *engines) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.address+"/v1/workers", nil)
	if err != nil {
		return false, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err
	}
	defer res.Body.Close()
	var a struct {
		Workers []struct {
			ID    string
			Ranks []struct {
				Seq  uint64
				Lost uint64
			}
		}
	}
	if err := json.NewDecoder(res.Body).Decode(&a); err != nil {
		return false, err
	}
	for _, w := range a.Workers {
		var i int
		if _, err := fmt.Sscanf(w.ID, "w%d", &i); err != nil {
			return false, err
		}
		if w.Ranks[0].Lost > 0 {
			return false, fmt.Errorf("%s lost %d batches", w.ID, w.Ranks[0].Lost)
		}
		if w.Ranks[0].Seq != e.seqs[i] {
			return false, nil
		}
	}
	return true, nil
}

// A bucket says how many answers took at most so many seconds.
type bucket struct {
	seconds float64
	answers float64
}

// served reads the daemon's histogram of how long its matches took.
func (d *daemon) served() ([]bucket, error) {
	resp, err := http.Get("http://" + d.address + "/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var out []bucket
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), `kvindexd_query_duration_seconds_bucket{route="/v1/match",le="`)
		if !ok {
			continue
		}
		var b bucket
		edge, count, _ := strings.Cut(rest, `"} `)
		if b.seconds, err = strconv.ParseFloat(edge, 64); err != nil {
			return nil, err
		}
		if b.answers, err = strconv.ParseFloat(count, 64); err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, lines.Err()
}

// within returns the time that a part of the answers took at most, as closely as
// the buckets tell.
func within(buckets []bucket, part float64) string {
	if len(buckets) == 0 {
		return ""
	}
	most := part * buckets[len(buckets)-1].answers
	for _, b := range buckets {
		if b.answers >= most {
			return "<" + time.Duration(b.seconds*float64(time.Second)).String()
		}
	}
	return ""
}
