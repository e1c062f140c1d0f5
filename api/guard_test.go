package api

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

func TestTokens(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	both, err := LoadTokens(write("change", "# operators\nsecret-change\n\n"))
	if err != nil {
		t.Fatal(err)
	}
	reading, err := LoadTokens(write("read", "secret-read\n"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := LoadTokens(write("empty", "# nothing\n")); err == nil {
		t.Error("a file without a token was accepted")
	}
	f0, err := fleet.New(fleet.Options{Logger: quiet(), Workers: []fleet.WorkerSpec{{ID: "w0", Model: "m", Endpoint: "tcp://127.0.0.1:5557"}}})
	if err != nil {
		t.Fatal(err)
	}
	_, h := newTestServer(t, f0, func(c *Config) { c.ReadTokens, c.ChangeTokens = reading, both })
	a := newAsker(t, h.URL)
	f := func(method, path, token string, want int) {
		t.Helper()
		header := []string{}
		if token != "" {
			header = []string{"Authorization", token}
		}
		if got, b := a.do(method, path, `{"token_ids":[1]}`, header...); got != want {
			t.Errorf("%s %s with %q: %d, want %d: %s", method, path, token, got, want, b)
		}
	}
	for _, path := range []string{"/healthz", "/readyz", "/openapi.json", "/"} {
		f("GET", path, "", 200)
	}
	f("GET", "/v1/workers", "", 401)
	f("GET", "/v1/workers", "Bearer wrong", 401)
	f("GET", "/v1/workers", "secret-read", 401)
	f("GET", "/v1/workers", "Bearer secret-read", 200)
	f("GET", "/v1/workers", "Bearer secret-change", 200)
	f("GET", "/metrics", "", 401)
	f("POST", "/v1/match", "Bearer secret-read", 200)
	f("DELETE", "/v1/workers/zz", "Bearer secret-read", 403)
	f("POST", "/register", "Bearer secret-read", 403)
	f("DELETE", "/v1/workers/zz", "Bearer secret-change", 404)
	if _, b := a.do("GET", "/readyz", ""); bytes.Contains(b, []byte("w0")) {
		t.Errorf("a stranger learns names: %s", b)
	}
	// Without a token for changes, nobody changes anything.
	_, h = newTestServer(t, f0, func(c *Config) { c.ReadTokens = reading })
	a.base = h.URL
	f("DELETE", "/v1/workers/zz", "Bearer secret-read", 403)
}

func TestEveryChangeIsGuarded(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 32))
	s, _ := newTestServer(t, off.Fleet, nil)
	asks := []string{"/v1/match", "/v1/match/batch", "/v1/explain", "/v1/outcomes", "/query", "/query_by_hash"}
	for _, rt := range s.routes() {
		asking := rt.method == "GET"
		for _, p := range asks {
			asking = asking || rt.path == p
		}
		if (rt.access == change) == asking {
			t.Errorf("%s %s: access %d", rt.method, rt.path, rt.access)
		}
	}
}

func TestCheckListen(t *testing.T) {
	f := func(address string, guarded, insecure, ok bool) {
		t.Helper()
		if err := CheckListen(address, guarded, insecure); (err == nil) != ok {
			t.Errorf("%s: %v", address, err)
		}
	}
	f("127.0.0.1:1", false, false, true)
	f("[::1]:1", false, false, true)
	f("localhost:1", false, false, true)
	f("0.0.0.0:1", false, false, false)
	f(":1", false, false, false)
	f("10.0.0.1:1", false, false, false)
	f("10.0.0.1:1", true, false, true)
	f(":1", false, true, true)
	f("nonsense", false, false, false)
}

// Bodies that somebody sends to break the daemon: a clear 4xx each.
func TestHostileBodies(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 32))
	s, h := newTestServer(t, off.Fleet, func(c *Config) { c.MaxBody = 1 << 20 })
	a := newAsker(t, h.URL)
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	z.Write(make([]byte, 10<<20))
	z.Close()
	const good = `{"token_ids":[1]}`
	f := func(body, reason string, status int, header ...string) {
		t.Helper()
		got, b := a.do("POST", "/v1/match", body, header...)
		if got != status || !strings.Contains(string(b), reason) {
			t.Errorf("%.60s %v: %d %.300s, want %d %s", body, header, got, b, status, reason)
		}
	}
	f(good, "prompt_tokens", 200)
	f(good, "prompt_tokens", 200, "Content-Type", "application/json; charset=utf-8")
	f(good, "unsupported_media_type", 415, "Content-Type", "text/plain")
	f(good, "unsupported_media_type", 415, "Content-Type", "application/x-www-form-urlencoded")
	f(good, "unsupported_media_type", 415, "Content-Type", "application/json; charset=utf-16")
	f(good, "malformed_body", 400, "Content-Type", "application/msgpack")
	f(bomb.String(), "unsupported_content_encoding", 415, "Content-Encoding", "gzip")
	f(`{"token_ids":[`+strings.Repeat("1,", 1<<20)+`1]}`, "body_too_large", 413)
	f(`{"token_ids":[1],"x":`+strings.Repeat(`{"x":`, 100_000), "nested deeper", 400)
	f(`{"token_ids":[1],"token_ids":[1]}`, "duplicate_field", 400)
	f(`{"token_ids":[NaN]}`, "malformed_body", 400)
	f(`{"token_ids":[-1]}`, "negative", 400)
	f(`{"token_ids":[4294967296]}`, "too large", 400)
	f("{\"token_ids\":[1]}\x00", "malformed_body", 400)
	f("\xff\xfe{\x00}\x00", "malformed_body", 400)
	f("", "malformed_body", 400)
	if n := s.bodies.used.Load(); n != 0 {
		t.Errorf("%d bytes of the body budget are not given back", n)
	}
}

// 100 MB announced and 100 MB sent: refused, in little memory, while others are
// served.
func TestHugeBodies(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 32))
	s, h := newTestServer(t, off.Fleet, nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for _, length := range []int64{100 << 20, -1} {
		req, _ := http.NewRequest("POST", h.URL+"/v1/match", io.LimitReader(spaces{}, 100<<20))
		req.ContentLength = length
		if res, err := http.DefaultClient.Do(req); err == nil {
			if res.StatusCode != 413 {
				t.Errorf("status %d", res.StatusCode)
			}
			res.Body.Close()
		}
	}
	newAsker(t, h.URL).want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "")
	runtime.ReadMemStats(&after)
	if grown := int64(after.TotalAlloc - before.TotalAlloc); grown > 6*s.MaxBody {
		t.Errorf("allocated %d MB", grown>>20)
	}
	if n := s.bodies.used.Load(); n != 0 {
		t.Errorf("%d bytes of the body budget are not given back", n)
	}
}

type spaces struct{}

func (spaces) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = ' '
	}
	return len(b), nil
}

// The budget of all bodies turns new uploads away and takes them again after.
func TestBodyBudget(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 32))
	s, h := newTestServer(t, off.Fleet, nil)
	a := newAsker(t, h.URL)
	s.bodies.used.Add(s.bodies.max - 100)
	a.want("POST", "/v1/match", `{"token_ids":[1]}`, 429, "overloaded")
	s.bodies.used.Add(100 - s.bodies.max)
	a.want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "")
}

func TestConcurrencyBound(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 32))
	s, h := newTestServer(t, off.Fleet, func(c *Config) { c.MaxConcurrent = 1 })
	s.slots <- struct{}{}
	res, err := http.Post(h.URL+"/v1/match", "application/json", strings.NewReader(`{"token_ids":[1]}`))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != 429 || res.Header.Get("Retry-After") != "1" {
		t.Errorf("%d %q", res.StatusCode, res.Header.Get("Retry-After"))
	}
	if res, err = http.Get(h.URL + "/metrics"); err != nil || res.StatusCode != 200 {
		t.Error("metrics must be readable under load", err)
	}
	res.Body.Close()
	<-s.slots
	newAsker(t, h.URL).want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "")
}

// serveReal runs Serve on a port of its own and returns the address, and what
// ends it.
func serveReal(t *testing.T, edit func(*Config)) (addr string, stop func()) {
	t.Helper()
	off := textFleet(t, 1, promptOf(1, 32))
	c := Config{Fleet: off.Fleet, Logger: quiet()}
	edit(&c)
	s, err := NewServer(c)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	return l.Addr().String(), func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// Slow headers, slow bodies and idle connections cost nobody else anything and
// are ended.
func TestSlowClients(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	addr, stop := serveReal(t, func(c *Config) {
		c.HeaderTimeout, c.BodyTimeout, c.IdleTimeout = 200*time.Millisecond, 300*time.Millisecond, 200*time.Millisecond
	})
	var wg sync.WaitGroup
	for i := range 60 {
		send := []string{"POST /v1/match HTTP/1.1\r\nHost: x\r\n", "POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{\"token_ids\"", ""}[i%3]
		wg.Go(func() {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			io.WriteString(conn, send)
			conn.SetReadDeadline(time.Now().Add(20 * time.Second))
			b, err := io.ReadAll(conn)
			if err != nil {
				t.Errorf("the connection was not ended: %v", err)
			}
			if strings.Contains(send, "Content-Length") && !bytes.Contains(b, []byte("body_timeout")) {
				t.Errorf("a slow body was answered with %q", b)
			}
		})
	}
	a := newAsker(t, "http://"+addr)
	for range 50 {
		a.want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "")
	}
	wg.Wait()
	stop()
	http.DefaultClient.CloseIdleConnections()
}

// A server that is told to stop says so to who asks whether it is ready, serves on
// for the delay, and ends.
func TestDrain(t *testing.T) {
	addr, stop := serveReal(t, func(c *Config) { c.DrainDelay = 500 * time.Millisecond })
	a := newAsker(t, "http://"+addr)
	a.want("GET", "/readyz", "", 200, `"ready":true`)
	ended := make(chan struct{})
	go func() { defer close(ended); stop() }()
	for ready := true; ready; {
		status, b := a.do("GET", "/readyz", "")
		ready = status == 200
		if !ready && !bytes.Contains(b, []byte("stopping")) {
			t.Errorf("not ready: %s", b)
		}
	}
	a.want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "")
	<-ended
	if _, err := net.Dial("tcp", addr); err == nil {
		t.Error("the listener is still open")
	}
	http.DefaultClient.CloseIdleConnections()
}

// Ten thousand connections that say nothing end one another: memory stays
// bounded, and whoever asks is served. Where the listener takes a whole backlog in
// at once, the asker's own idle connection may be the oldest; it asks again then,
// as a client does with a request that it marks as safe to repeat.
func TestIdleConnections(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	const many, kept = 10_000, 500
	addr, stop := serveReal(t, func(c *Config) { c.MaxConnections = kept })
	a := newAsker(t, "http://"+addr)
	a.want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "")
	before, goroutines := memoryInUse(), runtime.NumGoroutine()
	conns := make([]net.Conn, 0, many)
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range many {
		c, err := net.Dial("tcp", addr)
		if errors.Is(err, syscall.EMFILE) {
			t.Skip("the limit of open files does not allow for so many connections")
		}
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		if i%2 == 0 {
			io.WriteString(c, "POST /v1/match HTTP/1.1\r\n")
		}
		if i%100 == 0 {
			a.want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "", "Idempotency-Key", "1")
		}
	}
	// The oldest were ended, the newest are there.
	conns[0].SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := conns[0].Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the longest idle connection was kept: %v", err)
	}
	last := conns[many-1]
	io.WriteString(last, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
	if n, err := last.Read(make([]byte, 12)); n != 12 {
		t.Errorf("the newest connection was not served: %v", err)
	}
	if n := runtime.NumGoroutine() - goroutines; n > 2*kept {
		t.Errorf("%d goroutines", n)
	}
	if grown := memoryInUse() - before; grown > 64<<20 {
		t.Errorf("memory grew by %d MB", grown>>20)
	}
	http.DefaultClient.CloseIdleConnections()
	stop()
}

func memoryInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// Who does not read an answer holds no place among the requests in flight.
func TestSlowReaders(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	addr, stop := serveReal(t, func(c *Config) { c.MaxConcurrent, c.BodyTimeout, c.WriteTimeout = 2, 2*time.Second, time.Second })
	// An answer of 10 MB: more than the sockets' buffers take.
	body := jsonBody(promptOf(1, 1_500_000), `,"include":["zero","projection"]`)
	for range 4 {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.(*net.TCPConn).SetReadBuffer(4096)
		if _, err := fmt.Fprintf(conn, "POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
			t.Fatal(err)
		}
		first := make([]byte, 12)
		if _, err := io.ReadFull(conn, first); err != nil || string(first) != "HTTP/1.1 200" {
			t.Fatalf("%q %v", first, err)
		}
	}
	a := newAsker(t, "http://"+addr)
	for range 20 {
		a.want("POST", "/v1/match", `{"token_ids":[1]}`, 200, "")
	}
	stop()
	http.DefaultClient.CloseIdleConnections()
}

func TestCrossOrigin(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 32))
	_, h := newTestServer(t, off.Fleet, nil)
	a := newAsker(t, h.URL)
	if got, b := a.do("POST", "/register", `{}`, "Origin", "http://evil.example", "Sec-Fetch-Site", "cross-site"); got != 403 {
		t.Errorf("%d %s", got, b)
	}
}

// pair makes a certificate signed by parent (by itself where nil) as two files.
func pair(t *testing.T, dir, name string, parent *tls.Certificate) (certFile, keyFile string, c tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: parent == nil, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	signer, signerKey := tmpl, any(key)
	if parent != nil {
		signer, signerKey = parent.Leaf, parent.PrivateKey
	}
	der, err := x509.CreateCertificate(crand.Reader, tmpl, signer, &key.PublicKey, signerKey)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
	if os.WriteFile(certFile, certPEM, 0o600) != nil || os.WriteFile(keyFile, keyPEM, 0o600) != nil {
		t.Fatal("cannot write the pair")
	}
	if c, err = tls.X509KeyPair(certPEM, keyPEM); err != nil {
		t.Fatal(err)
	}
	return certFile, keyFile, c
}

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	caFile, _, ca := pair(t, dir, "ca", nil)
	certFile, keyFile, _ := pair(t, dir, "server", &ca)
	_, _, clientPair := pair(t, dir, "client", &ca)
	cfg, err := TLSConfig(certFile, keyFile, caFile)
	if err != nil {
		t.Fatal(err)
	}
	off := textFleet(t, 1, promptOf(1, 32))
	s, err := NewServer(Config{Fleet: off.Fleet, Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { served <- s.Serve(ctx, l) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	roots := x509.NewCertPool()
	roots.AddCert(ca.Leaf)
	get := func(certs ...tls.Certificate) error {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}}
		defer tr.CloseIdleConnections()
		res, err := (&http.Client{Transport: tr}).Get("https://" + l.Addr().String() + "/healthz")
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	if err := get(clientPair); err != nil {
		t.Error(err)
	}
	if err := get(); err == nil {
		t.Error("a client without a certificate was served")
	}
	if _, err := TLSConfig(filepath.Join(dir, "none"), keyFile, ""); err == nil {
		t.Error("a missing certificate was accepted")
	}
	if _, err := TLSConfig(certFile, keyFile, keyFile); err == nil {
		t.Error("a key was accepted as a client CA")
	}
	// A rotated pair is used without a restart; a broken one is not.
	c := &certificate{cert: certFile, key: keyFile}
	first, err := c.get(nil)
	if err != nil {
		t.Fatal(err)
	}
	pair(t, dir, "server", &ca)
	os.Chtimes(certFile, time.Now(), time.Now().Add(time.Minute))
	second, err := c.get(nil)
	if err != nil || bytes.Equal(first.Certificate[0], second.Certificate[0]) {
		t.Error("the new pair is not used", err)
	}
	os.WriteFile(certFile, []byte("broken"), 0o600)
	if third, err := c.get(nil); err != nil || third != second {
		t.Error("a broken file took the pair away", err)
	}
}

// A salt and a token are sent along every route: no answer, log line or metric
// shows either, and no namespace shows another's blocks.
func TestNothingShowsSecrets(t *testing.T) {
	const salt, token = "s4lt-5ecret", "t0ken-5ecret"
	prompt := promptOf(5, 32)
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{
		"a": {Worker: "wa", Model: "m", BlockSize: 16, Namespace: "tenant-a"},
		"b": {Worker: "wb", Model: "m", BlockSize: 16, Namespace: "tenant-b"},
	}}
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	salted := storeOf(prompt, 16, 0)
	salted.CacheSalt = []byte(salt)
	feedEvents(t, off, "a", 0, salted)
	feedEvents(t, off, "b", 0, storeOf(prompt, 16, 0))
	var log lockedBuffer
	s, srv := newTestServer(t, off.Fleet, func(c *Config) {
		c.Logger = slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		c.ChangeTokens = NewTokens(token)
	})
	ask := func(method, path, body string) string {
		t.Helper()
		req, _ := http.NewRequest(method, srv.URL+path, strings.NewReader(body))
		req.Header.Set("Authorization", "Bearer "+token)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, _ := io.ReadAll(res.Body)
		if strings.Contains(string(b), salt) || strings.Contains(string(b), token) {
			t.Errorf("%s %s shows a secret: %s", method, path, b)
		}
		return string(b)
	}
	body := func(rest string) string { return string(jsonBody(prompt, rest)) }
	salty := `,"cache_salt":"` + salt + `"`
	if b := ask("POST", "/v1/match", body(salty+`,"namespace":"tenant-a"`)); !strings.Contains(b, `"device":32`) {
		t.Errorf("the salted prompt is not found: %s", b)
	}
	if b := ask("POST", "/v1/match", body(`,"namespace":"tenant-a"`)); strings.Contains(b, `"device"`) {
		t.Errorf("the salted prompt is found without its salt: %s", b)
	}
	if b := ask("POST", "/v1/match", body(salty+`,"namespace":"tenant-b"`)); strings.Contains(b, `"device"`) || strings.Contains(b, "wa") {
		t.Errorf("another namespace's prompt: %s", b)
	}
	bodies := []string{
		body(salty), body(salty + salty), body(`,"cache_salt":5,"x":"` + salt + `"`), body(`,"tenant_id":"` + salt + `"`), body(`,"cache_salt":["` + salt + `"]`),
		`{"requests":[` + body(salty) + `]}`, `{"model":"m","worker":"` + salt[:0] + `wa","predicted_tokens":1,"cached_tokens":1,"prompt_tokens":2` + salty + `}`,
		`{"instance_id":1,"endpoint":"tcp://127.0.0.1:1","model_name":"m","additional_salt":"` + salt + `"` + salty + `}`,
		`{"model_name":"m","block_hashes":[1]` + salty + `}`, `{"url":"` + salt[:0] + `x"` + salty + `}`, salty,
	}
	for _, rt := range s.routes() {
		if rt.method == "DELETE" || rt.path == "/unregister" || strings.HasSuffix(rt.path, "/reset") {
			continue
		}
		path := strings.NewReplacer("{id}", "wa", "{$}", "").Replace(rt.path)
		for _, b := range bodies {
			ask(rt.method, path, b)
		}
	}
	if text := log.String(); strings.Contains(text, salt) || strings.Contains(text, token) || !strings.Contains(text, "/v1/match") {
		t.Errorf("the log shows a secret, or nothing: %.2000s", text)
	}
	if b := ask("GET", "/metrics", ""); !strings.Contains(b, "kvindexd_") || strings.Contains(b, "tenant_id") {
		t.Errorf("%.500s", b)
	}
}

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

// Any bytes to any route: an answer, no panic, and a status that is documented.
func FuzzHandlers(f *testing.F) {
	off := textFleet(f, 2, promptOf(1, 64))
	s, err := NewServer(Config{Fleet: off.Fleet, Logger: quiet()})
	if err != nil {
		f.Fatal(err)
	}
	doc := loadOpenAPI(f).doc
	posts := []string{"/v1/match", "/v1/match/batch", "/v1/explain", "/v1/outcomes", "/query", "/query_by_hash", "/unregister", "/register_peer", "/deregister_peer"}
	f.Add(uint8(0), false, []byte(`{"token_ids":[1,2,3],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":0,"length":1}]}}}`))
	f.Add(uint8(1), false, []byte(`[{"token_ids":[1]},{}]`))
	f.Add(uint8(5), true, []byte("\x82\xaamodel_name\xa1m\xacblock_hashes\x91\x01"))
	f.Add(uint8(3), false, []byte(`{"model":"m","worker":"w0","predicted_tokens":1,"cached_tokens":1,"prompt_tokens":1}`))
	f.Fuzz(func(t *testing.T, which uint8, packed bool, body []byte) {
		path := posts[int(which)%len(posts)]
		r, _ := http.NewRequest("POST", path, bytes.NewReader(body))
		if packed {
			r.Header.Set("Content-Type", "application/msgpack")
		}
		w := &discard{header: http.Header{}}
		s.Handler().ServeHTTP(w, r)
		if w.status == 0 || w.status >= 500 || w.status == 422 {
			t.Fatalf("%s: %d", path, w.status)
		}
		if dig(doc, "paths", path, "post", "responses", fmt.Sprint(w.status)) == nil {
			t.Fatalf("%s: status %d is not documented", path, w.status)
		}
	})
}

type discard struct {
	header http.Header
	status int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) WriteHeader(status int)      { d.status = status }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
