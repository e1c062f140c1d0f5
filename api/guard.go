package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// access is what a route needs of a caller.
type access uint8

const (
	// public routes tell nothing of the fleet: alive, ready, the page's shell.
	public access = iota
	read
	change
)

// Tokens are bearer tokens, kept as their hashes only.
type Tokens struct {
	sums [][sha256.Size]byte
}

// NewTokens are the given tokens, without empty ones.
func NewTokens(tokens ...string) Tokens {
	var t Tokens
	for _, token := range tokens {
		if token != "" {
			t.sums = append(t.sums, sha256.Sum256([]byte(token)))
		}
	}
	return t
}

// LoadTokens reads a file of tokens, one a line; blank lines and lines that
// begin with # are passed over. A file without a token is an error: it would
// open what it was meant to close. No error shows a token.
func LoadTokens(path string) (Tokens, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Tokens{}, fmt.Errorf("token file: %w", err)
	}
	var lines []string
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		return Tokens{}, fmt.Errorf("token file %s: holds no token", path)
	}
	return NewTokens(lines...), nil
}

// Empty says that there is no token.
func (t Tokens) Empty() bool { return len(t.sums) == 0 }

// has compares in constant time, whatever the lengths.
func (t Tokens) has(token string) bool {
	sum := sha256.Sum256([]byte(token))
	ok := 0
	for i := range t.sums {
		ok |= subtle.ConstantTimeCompare(sum[:], t.sums[i][:])
	}
	return ok == 1
}

// authorize lets a request pass, or says why not. Without any token configured
// everyone passes: CheckListen has seen to where the listener is. With only
// read tokens, nobody changes anything.
func (c *Config) authorize(need access, r *http.Request) *Error {
	if need == public || c.ReadTokens.Empty() && c.ChangeTokens.Empty() {
		return nil
	}
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return failf(http.StatusUnauthorized, ReasonUnauthenticated, "send the header Authorization: Bearer and a token")
	}
	switch {
	case c.ChangeTokens.has(token):
		return nil
	case !c.ReadTokens.has(token):
		return failf(http.StatusUnauthorized, ReasonUnauthenticated, "the token is not known here")
	case need == change:
		return failf(http.StatusForbidden, ReasonForbidden, "the token may read; changing the fleet needs another")
	}
	return nil
}

// CheckListen refuses to open what a token should guard: an address that is not
// loopback needs tokens or client certificates, or insecure said aloud.
func CheckListen(address string, guarded, insecure bool) error {
	if guarded || insecure {
		return nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("listen address %q: %w", address, err)
	}
	if host == "localhost" {
		return nil
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("listen address %q is reachable from elsewhere: give --auth-token-file (or --tls-client-ca), or say --insecure", address)
}

// TLSConfig loads a server certificate and, where clientCA is given, requires
// client certificates that it signed. The certificate is read again when its
// file changes, so that a rotation needs no restart.
func TLSConfig(certFile, keyFile, clientCA string) (*tls.Config, error) {
	if certFile == "" || keyFile == "" {
		return nil, errors.New("tls: certificate and key are both needed")
	}
	c := &certificate{cert: certFile, key: keyFile}
	if _, err := c.get(nil); err != nil {
		return nil, err
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get}
	if clientCA == "" {
		return cfg, nil
	}
	pem, err := os.ReadFile(clientCA)
	if err != nil {
		return nil, fmt.Errorf("tls: client CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("tls: client CA %s: holds no certificate", clientCA)
	}
	cfg.ClientCAs, cfg.ClientAuth = pool, tls.RequireAndVerifyClientCert
	return cfg, nil
}

// certificate is a key pair on disk.
type certificate struct {
	cert, key string

	mu      sync.Mutex
	loaded  *tls.Certificate
	modTime time.Time
}

// get loads the pair where its file is newer. A pair that cannot be read leaves
// the last one in use.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	info, err := os.Stat(c.cert)
	if err == nil && c.loaded != nil && info.ModTime().Equal(c.modTime) {
		return c.loaded, nil
	}
	if err == nil {
		var pair tls.Certificate
		if pair, err = tls.LoadX509KeyPair(c.cert, c.key); err == nil {
			c.loaded, c.modTime = &pair, info.ModTime()
		}
	}
	if c.loaded == nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	return c.loaded, nil
}
