// Package client asks a kvindexd daemon over HTTP.
//
// It is small on purpose: questions, the fleet's view and its changes, each a
// method that takes a context. Requests that change nothing are tried again
// when the daemon is not there or says that it is busy; an answer that refuses
// a request is an *Error and is not. Bodies are JSON as docs/api.md describes
// them; the token is sent as a bearer token and is in no error.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Client asks one daemon. It is safe for concurrent use.
type Client struct {
	base    string
	token   string
	http    *http.Client
	retries int
	backoff time.Duration
}

// Option changes a Client.
type Option func(*Client)

// WithToken sends a bearer token.
func WithToken(token string) Option { return func(c *Client) { c.token = token } }

// WithHTTPClient uses h, for its transport, TLS settings or timeout.
func WithHTTPClient(h *http.Client) Option { return func(c *Client) { c.http = h } }

// WithRetries tries a request that changes nothing up to n times more, with a
// pause that doubles from backoff. The default is 3 and 50 ms.
func WithRetries(n int, backoff time.Duration) Option {
	return func(c *Client) { c.retries, c.backoff = n, backoff }
}

// New makes a client of the daemon at base, such as http://127.0.0.1:8099.
func New(base string, options ...Option) (*Client, error) {
	if !strings.Contains(base, "://") {
		base = "http://" + base
	}
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("address %q: expected http://host:port", base)
	}
	c := &Client{base: strings.TrimSuffix(base, "/"), http: http.DefaultClient, retries: 3, backoff: 50 * time.Millisecond}
	for _, o := range options {
		o(c)
	}
	return c, nil
}

// Error is a request that the daemon refused.
type Error struct {
	// Status is the HTTP status, Reason the stable code, Param the field.
	Status  int    `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Param   string `json:"param,omitempty"`
	Type    string `json:"type"`
	// Refused are the workers that could not answer exactly.
	Refused []Refusal `json:"-"`
}

// Error makes it an error of Go.
func (e *Error) Error() string {
	if e.Param != "" {
		return fmt.Sprintf("%s (%d, %s: %s)", e.Message, e.Status, e.Reason, e.Param)
	}
	return fmt.Sprintf("%s (%d, %s)", e.Message, e.Status, e.Reason)
}

// MatchRequest is a question; see docs/api.md for the fields.
type MatchRequest struct {
	Model          string          `json:"model,omitempty"`
	LoraName       string          `json:"lora_name,omitempty"`
	Namespace      string          `json:"namespace,omitempty"`
	Role           string          `json:"role,omitempty"`
	CacheSalt      string          `json:"cache_salt,omitempty"`
	TokenIDs       []uint32        `json:"token_ids,omitzero"`
	BlockHashes    []uint64        `json:"block_hashes,omitzero"`
	SequenceHashes []uint64        `json:"sequence_hashes,omitzero"`
	HashBlockSize  uint32          `json:"hash_block_size,omitempty"`
	Features       json.RawMessage `json:"features,omitempty"`
	MM             string          `json:"mm,omitempty"`
	Workers        []string        `json:"workers,omitempty"`
	TopK           int             `json:"top_k,omitempty"`
	MinTokens      int             `json:"min_tokens,omitempty"`
	Include        []string        `json:"include,omitempty"`
	RequestID      string          `json:"request_id,omitempty"`
}

// MatchResponse is the answer; the rows are ordered, the best first.
type MatchResponse struct {
	RequestID    string      `json:"request_id,omitempty"`
	Model        string      `json:"model"`
	LoraName     string      `json:"lora_name,omitempty"`
	PromptTokens int         `json:"prompt_tokens"`
	MM           MM          `json:"mm"`
	Workers      []Row       `json:"workers"`
	Refused      []Refusal   `json:"refused"`
	Best         string      `json:"best,omitempty"`
	Projection   *Projection `json:"projection,omitempty"`
	Hashes       []Hashes    `json:"hashes,omitempty"`
}

// MM says how the images of a prompt were taken.
type MM struct {
	Mode         string  `json:"mode"`
	Reason       string  `json:"reason,omitempty"`
	Param        string  `json:"param,omitempty"`
	Images       int     `json:"images"`
	ImageTokenID *uint32 `json:"image_token_id,omitempty"`
}

// Row is what one stream holds of a prompt, in tokens.
type Row struct {
	Worker       string  `json:"worker"`
	DPRank       int     `json:"dp_rank"`
	Namespace    string  `json:"namespace"`
	Role         string  `json:"role"`
	BlockSize    uint32  `json:"block_size"`
	Device       int     `json:"device"`
	Host         int     `json:"host"`
	Disk         int     `json:"disk"`
	UsableTokens *int    `json:"usable_tokens"`
	UsableReason string  `json:"usable_reason,omitempty"`
	ExactMM      bool    `json:"exact_mm"`
	Reason       string  `json:"reason,omitempty"`
	State        string  `json:"state"`
	Seq          *uint64 `json:"seq"`
	AgeMS        *int64  `json:"age_ms"`
	Lost         uint64  `json:"lost"`
	Trimmed      int64   `json:"trimmed,omitempty"`
}

// Refusal is a stream that cannot answer exactly.
type Refusal struct {
	Worker         string `json:"worker"`
	DPRank         int    `json:"dp_rank"`
	Namespace      string `json:"namespace"`
	Role           string `json:"role"`
	Reason         string `json:"reason"`
	TextOnlyDevice int    `json:"text_only_device"`
}

// Projection is a prompt as the best row's kind of worker identifies it.
type Projection struct {
	BlockSize         uint32   `json:"block_size"`
	Window            string   `json:"window"`
	ImageTokenID      *uint32  `json:"image_token_id"`
	VideoTokenID      *uint32  `json:"video_token_id"`
	Exact             bool     `json:"exact"`
	Reason            string   `json:"reason,omitempty"`
	RoutingTokenIDs   []uint32 `json:"routing_token_ids"`
	ExpandedPromptLen int      `json:"expanded_prompt_len"`
	Markers           []string `json:"markers"`
}

// Hashes are a prompt's, for one kind of worker and shape of block.
type Hashes struct {
	BlockSize      uint32   `json:"block_size"`
	Window         string   `json:"window"`
	ImageTokenID   *uint32  `json:"image_token_id"`
	VideoTokenID   *uint32  `json:"video_token_id"`
	BlockHashes    []uint64 `json:"block_hashes"`
	SequenceHashes []uint64 `json:"sequence_hashes"`
}

// Match asks who holds how much of a prompt.
func (c *Client) Match(ctx context.Context, r *MatchRequest) (*MatchResponse, error) {
	a := new(MatchResponse)
	return a, c.ask(ctx, "/v1/match", r, a)
}

// MatchRaw is Match with a body that is JSON already, such as an answer of
// vLLM's render routes.
func (c *Client) MatchRaw(ctx context.Context, body []byte) (*MatchResponse, error) {
	a := new(MatchResponse)
	return a, c.ask(ctx, "/v1/match", json.RawMessage(body), a)
}

// Explain returns the daemon's account of where each stream's match ended, as
// JSON.
func (c *Client) Explain(ctx context.Context, body []byte) (json.RawMessage, error) {
	var a json.RawMessage
	return a, c.ask(ctx, "/v1/explain", json.RawMessage(body), &a)
}

// Outcome is what really happened to a request.
type Outcome struct {
	RequestID       string `json:"request_id,omitempty"`
	Model           string `json:"model"`
	Worker          string `json:"worker"`
	DPRank          int    `json:"dp_rank"`
	PredictedTokens int    `json:"predicted_tokens"`
	CachedTokens    int    `json:"cached_tokens"`
	PromptTokens    int    `json:"prompt_tokens"`
}

// Report tells the daemon an outcome. It is not tried again: it would count
// twice.
func (c *Client) Report(ctx context.Context, o *Outcome) error {
	return c.do(ctx, http.MethodPost, "/v1/outcomes", o, nil, false)
}

// Workers returns the fleet's view, as JSON.
func (c *Client) Workers(ctx context.Context) (json.RawMessage, error) {
	var a json.RawMessage
	return a, c.do(ctx, http.MethodGet, "/v1/workers", nil, &a, true)
}

// Models returns the worker sets, as JSON.
func (c *Client) Models(ctx context.Context) (json.RawMessage, error) {
	var a json.RawMessage
	return a, c.do(ctx, http.MethodGet, "/v1/models", nil, &a, true)
}

// PutWorker states a worker; spec is the JSON of docs/api.md. It may be
// repeated.
func (c *Client) PutWorker(ctx context.Context, id string, spec any) error {
	return c.do(ctx, http.MethodPut, "/v1/workers/"+url.PathEscape(id), spec, nil, true)
}

// DeleteWorker takes a worker out of the fleet.
func (c *Client) DeleteWorker(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, "/v1/workers/"+url.PathEscape(id), nil, nil, false)
}

// ResetWorker drops what is held for a worker and starts again from its replay.
func (c *Client) ResetWorker(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodPost, "/v1/workers/"+url.PathEscape(id)+"/reset", nil, nil, false)
}

// Ready asks whether the daemon is ready; missing says what is not.
func (c *Client) Ready(ctx context.Context) (ready bool, missing []string, err error) {
	var a struct {
		Ready   bool     `json:"ready"`
		Missing []string `json:"missing"`
	}
	status, body, err := c.once(ctx, http.MethodGet, "/readyz", nil)
	if err != nil {
		return false, nil, err
	}
	if status != http.StatusOK && status != http.StatusServiceUnavailable {
		return false, nil, refused(status, body)
	}
	err = json.Unmarshal(body, &a)
	return a.Ready, a.Missing, err
}

// ask is a question in a POST: it changes nothing and may be repeated.
func (c *Client) ask(ctx context.Context, path string, in, out any) error {
	return c.do(ctx, http.MethodPost, path, in, out, true)
}

// do sends in and reads the answer into out, trying again where that is safe.
func (c *Client) do(ctx context.Context, method, path string, in, out any, again bool) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	pause := c.backoff
	for try := 0; ; try++ {
		status, answer, err := c.once(ctx, method, path, body)
		if err == nil && status < 300 {
			if out == nil {
				return nil
			}
			return json.Unmarshal(answer, out)
		}
		if err == nil {
			err = refused(status, answer)
		}
		busy := status == 0 || status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable
		if !again || !busy || try >= c.retries || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pause/2 + rand.N(pause/2+1)):
		}
		pause *= 2
	}
}

// maxAnswer bounds what is read of one answer.
const maxAnswer = 1 << 30

func (c *Client) once(ctx context.Context, method, path string, body []byte) (int, []byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}
	a, err := c.http.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(io.LimitReader(a.Body, maxAnswer))
	if err != nil {
		return 0, nil, err
	}
	return a.StatusCode, b, nil
}

// refused makes the error of an answer that is none.
func refused(status int, body []byte) error {
	var a struct {
		Error   *Error    `json:"error"`
		Refused []Refusal `json:"refused"`
	}
	if json.Unmarshal(body, &a) != nil || a.Error == nil {
		return &Error{Status: status, Reason: "unexpected_answer", Message: "the answer is no error of kvindexd: status " + strconv.Itoa(status)}
	}
	a.Error.Refused = a.Refused
	return a.Error
}
