package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvindexd/kvindexd/api/client"
)

// askOptions are the flags of every command that asks a running daemon.
type askOptions struct {
	server    string
	tokenFile string
	ca        string
	cert, key string
	timeout   time.Duration
	wait      time.Duration
	asJSON    bool
}

func (o *askOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.server, "server", "http://"+defaultListen, "the daemon's address")
	f.StringVar(&o.tokenFile, "token-file", "", "file with the bearer token to send; the daemon's own file will do")
	f.StringVar(&o.ca, "tls-ca", "", "file of authorities for the daemon's certificate (default: the system's)")
	f.StringVar(&o.cert, "tls-client-cert", "", "client certificate to show")
	f.StringVar(&o.key, "tls-client-key", "", "key of --tls-client-cert")
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "patience for the whole answer")
	f.DurationVar(&o.wait, "wait", 0, "first wait so long for the daemon to be there and ready")
	f.BoolVar(&o.asJSON, "json", false, "print the answer as JSON")
}

// connect makes the client that the flags describe.
func (o *askOptions) connect() (*client.Client, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if err := o.secure(transport); err != nil {
		return nil, usageError{err}
	}
	options := []client.Option{client.WithHTTPClient(&http.Client{Transport: transport})}
	if o.tokenFile != "" {
		raw, err := os.ReadFile(o.tokenFile)
		if err != nil {
			return nil, usagef("--token-file: %w", err)
		}
		options = append(options, client.WithToken(firstToken(string(raw))))
	}
	c, err := client.New(o.server, options...)
	if err != nil {
		return nil, usagef("--server: %w", err)
	}
	return c, nil
}

// firstToken is the first line that is neither blank nor a comment.
func firstToken(text string) string {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			return line
		}
	}
	return ""
}

func (o *askOptions) secure(t *http.Transport) error {
	if o.ca == "" && o.cert == "" {
		return nil
	}
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if o.ca != "" {
		pem, err := os.ReadFile(o.ca)
		if err != nil {
			return fmt.Errorf("--tls-ca: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return fmt.Errorf("--tls-ca: %s holds no certificate", o.ca)
		}
		t.TLSClientConfig.RootCAs = pool
	}
	if o.cert != "" {
		pair, err := tls.LoadX509KeyPair(o.cert, o.key)
		if err != nil {
			return fmt.Errorf("--tls-client-cert: %w", err)
		}
		t.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	return nil
}

// ask runs one exchange with the daemon within the timeout and says what to do
// when there is none.
func (o *askOptions) ask(ctx context.Context, exchange func(context.Context, *client.Client) error) error {
	c, err := o.connect()
	if err != nil {
		return err
	}
	if o.wait > 0 {
		if err := awaitReady(ctx, c, o.wait); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	err = exchange(ctx, c)
	var refused *client.Error
	var usage usageError
	if err == nil || errors.As(err, &refused) || errors.As(err, &usage) {
		return err
	}
	return fmt.Errorf("no answer from %s (is `kvindexd serve` running there? --server takes another address): %w", o.server, err)
}

// awaitReady returns when the daemon is ready.
func awaitReady(ctx context.Context, c *client.Client, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	look := time.NewTicker(50 * time.Millisecond)
	defer look.Stop()
	for {
		ready, missing, err := c.Ready(ctx)
		if ready {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return fmt.Errorf("the daemon is not ready after %v: %w", wait, errors.Join(err, errors.New(strings.Join(missing, "; "))))
		}
	}
}

// promptOptions are the flags that say what a question is about.
type promptOptions struct {
	file      string
	tokens    string
	model     string
	lora      string
	namespace string
	role      string
	salt      string
	mm        string
	workers   []string
	topK      int
	minTokens int
	include   []string
	requestID string
}

func (o *promptOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.file, "file", "", "file with the prompt, - for stdin: token ids (a JSON array, or separated by blanks or commas), or whole request bodies (JSON, one a line)")
	f.StringVar(&o.tokens, "tokens", "", "the prompt's token ids, such as 1,2,3")
	f.StringVar(&o.model, "model", "", "model, alias or adapter; may be left out where there is one")
	f.StringVar(&o.lora, "lora-name", "", "adapter")
	f.StringVar(&o.namespace, "namespace", "", "only this namespace")
	f.StringVar(&o.role, "role", "", "only this role: aggregated, prefill, decode or encode")
	f.StringVar(&o.salt, "cache-salt", "", "the request's cache salt")
	f.StringVar(&o.mm, "mm", "", "how to take images: auto, exact or text_only")
	f.StringSliceVar(&o.workers, "workers", nil, "only these workers")
	f.IntVar(&o.topK, "top-k", 0, "at most so many rows")
	f.IntVar(&o.minTokens, "min-tokens", 0, "only rows that match so many tokens")
	f.StringSliceVar(&o.include, "include", nil, "what else to answer: zero, projection, hashes")
	f.StringVar(&o.requestID, "request-id", "", "id to be echoed and logged")
}

// bodies are the requests that the flags and their file make.
func (o *promptOptions) bodies(cmd *cobra.Command) ([][]byte, error) {
	text, err := o.text(cmd)
	if err != nil {
		return nil, err
	}
	text = bytes.TrimSpace(text)
	if len(text) == 0 {
		return nil, usagef("no prompt: give --tokens, --file, or token ids on stdin")
	}
	if text[0] != '{' {
		tokens, err := parseTokens(text)
		if err != nil {
			return nil, usageError{err}
		}
		body, err := o.onto(map[string]json.RawMessage{"token_ids": tokens})
		return [][]byte{body}, err
	}
	return o.objects(text)
}

func (o *promptOptions) text(cmd *cobra.Command) ([]byte, error) {
	switch {
	case o.tokens != "" && o.file != "":
		return nil, usagef("give --tokens or --file, not both")
	case o.tokens != "":
		return []byte(o.tokens), nil
	case o.file != "" && o.file != "-":
		text, err := os.ReadFile(o.file)
		if err != nil {
			return nil, usageError{err}
		}
		return text, nil
	}
	if o.file == "" && isTerminal(cmd.InOrStdin()) {
		return nil, nil
	}
	return io.ReadAll(cmd.InOrStdin())
}

// objects reads one request body after the other; the flags are put onto each.
func (o *promptOptions) objects(text []byte) ([][]byte, error) {
	var out [][]byte
	d := json.NewDecoder(bytes.NewReader(text))
	for d.More() {
		var body map[string]json.RawMessage
		if err := d.Decode(&body); err != nil {
			return nil, usagef("request %d: %w", len(out)+1, err)
		}
		// A line of a file of questions carries its request inside.
		if inner, ok := body["request"]; ok && body["token_ids"] == nil {
			body = nil
			if err := json.Unmarshal(inner, &body); err != nil {
				return nil, usagef("request %d: %w", len(out)+1, err)
			}
		}
		b, err := o.onto(body)
		if err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}

// onto puts the flags that are given onto a body.
func (o *promptOptions) onto(body map[string]json.RawMessage) ([]byte, error) {
	set := func(key string, given bool, v any) {
		if given {
			raw, _ := json.Marshal(v) // strings, numbers and lists of them
			body[key] = raw
		}
	}
	set("model", o.model != "", o.model)
	set("lora_name", o.lora != "", o.lora)
	set("namespace", o.namespace != "", o.namespace)
	set("role", o.role != "", o.role)
	set("cache_salt", o.salt != "", o.salt)
	set("mm", o.mm != "", o.mm)
	set("workers", len(o.workers) > 0, o.workers)
	set("top_k", o.topK > 0, o.topK)
	set("min_tokens", o.minTokens > 0, o.minTokens)
	set("include", len(o.include) > 0, o.include)
	set("request_id", o.requestID != "", o.requestID)
	return json.Marshal(body)
}

// parseTokens makes a JSON array of token ids: of one, or of numbers with
// blanks or commas between them.
func parseTokens(text []byte) (json.RawMessage, error) {
	if text[0] == '[' {
		var ids []uint32
		if err := json.Unmarshal(text, &ids); err != nil {
			return nil, fmt.Errorf("token ids: %w", err)
		}
		return json.Marshal(ids)
	}
	var ids []uint32
	words := bufio.NewScanner(bytes.NewReader(bytes.ReplaceAll(text, []byte(","), []byte(" "))))
	words.Buffer(nil, 1<<20)
	words.Split(bufio.ScanWords)
	for words.Scan() {
		id, err := strconv.ParseUint(words.Text(), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("token id %d: %q is not a number from 0 to 4294967295", len(ids)+1, words.Text())
		}
		ids = append(ids, uint32(id))
	}
	if err := words.Err(); err != nil {
		return nil, fmt.Errorf("token ids: %w", err)
	}
	return json.Marshal(ids)
}
