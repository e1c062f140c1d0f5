package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// request is a recorded request.
type request struct {
	name, contentType string
	body, wire        []byte
}

func newRequest(name, contentType string, body []byte) request {
	head := fmt.Appendf(nil, "POST /v1/match HTTP/1.1\r\nHost: bench\r\nContent-Type: %s\r\nAccept: %s\r\nContent-Length: %d\r\n\r\n", contentType, contentType, len(body))
	return request{name, contentType, body, append(head, body...)}
}

func jsonRequest(tokens []uint32) request {
	b := []byte(`{"model":"m","top_k":` + strconv.Itoa(topK) + `,"token_ids":[`)
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(t), 10)
	}
	return newRequest("JSON", "application/json", append(b, "]}"...))
}

func msgpackRequest(tokens []uint32) request {
	raw := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		raw = binary.LittleEndian.AppendUint32(raw, t)
	}
	b, err := msgpack.Marshal(map[string]any{"model": "m", "top_k": topK, "token_ids": raw})
	if err != nil {
		panic(err) // a map of strings, ints and bytes
	}
	return newRequest("msgpack", "application/msgpack", b)
}

// held is how an answer says that a worker holds n tokens on its device.
func (r *request) held(n int) []byte {
	if r.name == "JSON" {
		return fmt.Appendf(nil, `"device":%d,`, n)
	}
	b, err := msgpack.Marshal(uint16(n))
	if err != nil || n > 1<<16-1 {
		return nil
	}
	return append([]byte("\xa6device"), b...)
}

// conn is one keep-alive connection, for one goroutine.
type conn struct {
	net.Conn
	buf []byte
}

func dial(ctx context.Context, address string) (*conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", address)
	return &conn{c, make([]byte, 256<<10)}, err
}

// ask sends the recorded bytes and returns the answer's body, valid until the
// next call.
func (c *conn) ask(r *request) ([]byte, error) {
	if _, err := c.Write(r.wire); err != nil {
		return nil, err
	}
	n, head, length := 0, -1, 0
	for head < 0 || n < head+length {
		m, err := c.Read(c.buf[n:])
		if err != nil {
			return nil, err
		}
		n += m
		if head >= 0 {
			continue
		}
		end := bytes.Index(c.buf[:n], []byte("\r\n\r\n"))
		if end < 0 {
			continue
		}
		head = end + 4
		if !bytes.HasPrefix(c.buf, []byte("HTTP/1.1 200 ")) {
			return nil, fmt.Errorf("the daemon answers %.200q", c.buf[:n])
		}
		const field = "Content-Length: "
		at := bytes.Index(c.buf[:end+2], []byte(field))
		if at < 0 {
			return nil, errors.New("an answer without Content-Length")
		}
		digits, _, _ := bytes.Cut(c.buf[at+len(field):end+2], []byte("\r\n"))
		var err2 error
		if length, err2 = strconv.Atoi(string(digits)); err2 != nil {
			return nil, err2
		}
	}
	return c.buf[head:n], nil
}

// result is what a measurement saw.
type result struct {
	answers int
	took    time.Duration
	cpu     time.Duration // the daemon's
	waits   []time.Duration
	served  []bucket // the daemon's own times, from a request's headers to the end of its answer
}

func (r *result) rate() float64 { return float64(r.answers) / r.took.Seconds() }

// less is r without what the daemon spends on events.
func (r result) less(share float64) *result {
	r.cpu -= time.Duration(share * float64(r.took))
	return &r
}

func (r *result) print(what string) {
	cpu := time.Duration(float64(r.cpu) / float64(max(r.answers, 1)))
	fmt.Printf("%-34s %10.0f %12s", what, r.rate(), cpu.Round(100*time.Nanosecond))
	if len(r.waits) > 0 {
		slices.Sort(r.waits)
		at := func(q float64) time.Duration {
			return r.waits[min(len(r.waits)-1, int(q*float64(len(r.waits))))].Round(time.Microsecond)
		}
		fmt.Printf(" %9s %9s %9s", at(0.5), at(0.99), r.waits[len(r.waits)-1].Round(time.Microsecond))
	} else {
		fmt.Printf(" %9s %9s %9s", "", "", "")
	}
	fmt.Printf(" %9s\n", within(r.served, 0.99))
}

// measure adds what the daemon says of itself to what f sees.
func (d *daemon) measure(f func() (result, error)) (result, error) {
	served, err := d.served()
	if err != nil {
		return result{}, err
	}
	before, err := d.cpu()
	if err != nil {
		return result{}, err
	}
	r, err := f()
	if err != nil {
		return r, err
	}
	after, err := d.cpu()
	if err != nil {
		return r, err
	}
	r.cpu = after - before
	r.served, err = d.served()
	for i := range min(len(served), len(r.served)) {
		r.served[i].answers -= served[i].answers
	}
	return r, err
}

// closedLoop asks over each connection as soon as it has its answer.
func closedLoop(ctx context.Context, address string, r *request, conns int, d time.Duration) (result, error) {
	end := time.Now().Add(d)
	return together(conns, func(int) ([]time.Duration, error) {
		c, err := dial(ctx, address)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		var waits []time.Duration
		for {
			began := time.Now()
			if began.After(end) || ctx.Err() != nil {
				return waits, ctx.Err()
			}
			if _, err := c.ask(r); err != nil {
				return nil, err
			}
			waits = append(waits, time.Since(began))
		}
	})
}

// openLoop asks at a steady rate. A request that is late because of those before
// it has waited since it was due; one that only the client's clock woke late for
// has not.
func openLoop(ctx context.Context, address string, r *request, rate float64, d time.Duration) (result, error) {
	const conns = 4
	began := time.Now()
	return together(conns, func(i int) ([]time.Duration, error) {
		c, err := dial(ctx, address)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		var waits []time.Duration
		for n := i; ; n += conns {
			due := began.Add(time.Duration(float64(n) / rate * float64(time.Second)))
			if due.Sub(began) > d {
				return waits, nil
			}
			start := due
			if d := time.Until(due); d > 0 {
				nap(d)
				start = time.Now()
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if _, err := c.ask(r); err != nil {
				return nil, err
			}
			waits = append(waits, time.Since(start))
		}
	})
}

// together runs n askers and joins what they saw.
func together(n int, ask func(i int) ([]time.Duration, error)) (result, error) {
	var (
		mu   sync.Mutex
		wg   sync.WaitGroup
		all  result
		errs []error
	)
	began := time.Now()
	for i := range n {
		wg.Go(func() {
			waits, err := ask(i)
			mu.Lock()
			defer mu.Unlock()
			all.waits = append(all.waits, waits...)
			errs = append(errs, err)
		})
	}
	wg.Wait()
	all.took, all.answers = time.Since(began), len(all.waits)
	return all, errors.Join(errs...)
}

var wrkRequests = regexp.MustCompile(`(\d+) requests in`)

// wrk asks with the recorded body through wrk.
func wrk(ctx context.Context, address string, r *request, d time.Duration) (result, error) {
	program, err := exec.LookPath("wrk")
	if err != nil {
		return result{}, errors.New("not installed")
	}
	dir, err := os.MkdirTemp("", "bench-api")
	if err != nil {
		return result{}, err
	}
	defer os.RemoveAll(dir)
	body, script := filepath.Join(dir, "body"), filepath.Join(dir, "ask.lua")
	lua := fmt.Sprintf("local f = io.open(%q, \"rb\")\nwrk.body = f:read(\"*a\")\nf:close()\nwrk.method = \"POST\"\nwrk.headers[\"Content-Type\"] = %q\nwrk.headers[\"Accept\"] = %q\n", body, r.contentType, r.contentType)
	if err := errors.Join(os.WriteFile(body, r.body, 0o600), os.WriteFile(script, []byte(lua), 0o600)); err != nil {
		return result{}, err
	}
	began := time.Now()
	out, err := exec.CommandContext(ctx, program, "-t1", "-c4", "-d"+strconv.Itoa(max(1, int(d.Seconds()))), "-s", script, "http://"+address+"/v1/match").CombinedOutput()
	if err != nil {
		return result{}, fmt.Errorf("%w: %s", err, out)
	}
	m := wrkRequests.FindSubmatch(out)
	if m == nil || bytes.Contains(out, []byte("Non-2xx")) {
		return result{}, fmt.Errorf("unexpected output: %s", out)
	}
	n, err := strconv.Atoi(string(m[1]))
	return result{answers: n, took: time.Since(began)}, err
}
