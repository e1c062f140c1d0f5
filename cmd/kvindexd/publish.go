package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/api/client"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// publishOptions are the flags of publish.
type publishOptions struct {
	endpoint, replay, topic string
	bind                    bool
	ranks                   int
	format, hashes          string
	slots, ring             int
	oldReplies              bool

	model        string
	blockSize    int
	capacity     int
	rate         float64
	count        int
	wait         int
	seed         uint64
	prefixes     int
	prefixTokens int
	tokens       int
	images       float64
	imageID      uint32
	prompts      string
	hold         bool
}

func newPublish() *cobra.Command {
	var o publishOptions
	cmd := &cobra.Command{
		Use:   "publish [FILE]",
		Short: "Publish events as a vLLM worker does, without a GPU",
		Long: `publish behaves as vLLM's event publisher: a PUB socket and a replay socket, one
pair a data-parallel rank on port + rank, batches numbered from 0.

Without FILE it simulates engines: prompts that share beginnings are served, full
blocks kept, the least recently used evicted. --prompts-out writes the prompts as
request bodies, to be asked with kvindexd match.

FILE has batches, JSON, one a line; - is stdin. A batch is an object
{"events": […], "ts"?, "data_parallel_rank"?} or a whole batch as an array; events
are written as they stand there, so that odd ones can be tried. To publish a
capture, use kvindexd replay --to.`,
		Example: `  kvindexd publish
  kvindexd publish --endpoint tcp://*:5557 --replay-endpoint tcp://*:5657 --ranks 2 --rate 50
  kvindexd publish --format array --hashes bytes --images 0.5 --prompts-out prompts.jsonl
  kvindexd publish events.jsonl`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runPublish(cmd, &o, args) },
	}
	f := cmd.Flags()
	f.StringVar(&o.endpoint, "endpoint", "tcp://127.0.0.1:5557", "events of rank 0; bound if it has a * or --bind, as vLLM's")
	f.StringVar(&o.replay, "replay-endpoint", "tcp://127.0.0.1:5657", "replays of rank 0, empty for none")
	f.BoolVar(&o.bind, "bind", true, "bind the endpoint; false connects to a subscriber that binds")
	f.StringVar(&o.topic, "topic", "", "topic of every message")
	f.IntVar(&o.ranks, "ranks", 1, "data-parallel ranks")
	f.StringVar(&o.format, "format", "map", "form of events: map (vLLM 0.24 and later) or array")
	f.StringVar(&o.hashes, "hashes", "int", "form of engine hashes: int or bytes")
	f.IntVar(&o.slots, "slots", 0, "with --format array: 6 (vLLM 0.9), 8 (0.15) or 12 (0.22)")
	f.IntVar(&o.ring, "ring", 10_000, "batches that can be replayed")
	f.BoolVar(&o.oldReplies, "old-replies", false, "answer replays as vLLM up to 0.25")
	f.StringVar(&o.model, "model", "", "model named in --prompts-out")
	f.IntVar(&o.blockSize, "block-size", 16, "tokens of a block")
	f.IntVar(&o.capacity, "capacity", 4096, "blocks that an engine's cache holds")
	f.Float64Var(&o.rate, "rate", 10, "prompts a second, 0 for as many as go")
	f.IntVar(&o.count, "count", 0, "prompts to serve, 0 for no end")
	f.IntVar(&o.wait, "wait-subscribers", 0, "subscribers of each rank to wait for before the first batch")
	f.Uint64Var(&o.seed, "seed", 1, "seed of the prompts")
	f.IntVar(&o.prefixes, "prefixes", 8, "beginnings that prompts share")
	f.IntVar(&o.prefixTokens, "prefix-tokens", 512, "tokens of a beginning")
	f.IntVar(&o.tokens, "tokens", 768, "tokens of a prompt")
	f.Float64Var(&o.images, "images", 0, "share of the prompts that have an image, 0 to 1")
	f.Uint32Var(&o.imageID, "image-token-id", 151655, "placeholder token of images")
	f.BoolVar(&o.hold, "hold", true, "keep the sockets up after the last batch, until interrupted")
	f.StringVar(&o.prompts, "prompts-out", "", "file for the prompts as request bodies, JSON lines")
	return cmd
}

func (o *publishOptions) check() error {
	switch {
	case o.format != "map" && o.format != "array":
		return usagef("--format %q: expected map or array", o.format)
	case o.hashes != "int" && o.hashes != "bytes":
		return usagef("--hashes %q: expected int or bytes", o.hashes)
	case !slices.Contains([]int{0, 6, 8, 12}, o.slots):
		return usagef("--slots %d: expected 6, 8 or 12", o.slots)
	case o.ranks < 1 || o.ranks > 1024:
		return usagef("--ranks %d: expected 1 to 1024", o.ranks)
	case o.blockSize < 1 || o.capacity < 1 || o.prefixes < 1 || o.prefixTokens < 0 || o.tokens < 1:
		return usagef("--block-size, --capacity, --prefixes and --tokens must be at least 1")
	case o.tokens/o.blockSize > o.capacity:
		return usagef("--tokens %d: more than the %d blocks of %d tokens of --capacity", o.tokens, o.capacity, o.blockSize)
	case o.images < 0 || o.images > 1 || o.rate < 0:
		return usagef("--images is a share from 0 to 1, --rate is not negative")
	case o.images > 0 && (o.slots == 6 || o.slots == 8):
		return usagef("--images: events of %d slots have no extra keys", o.slots)
	}
	return nil
}

func runPublish(cmd *cobra.Command, o *publishOptions, args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	log, err := loggerOf(cmd, slog.LevelWarn)
	if err != nil {
		return err
	}
	if o.ranks > 1 {
		if err := checkRankPorts(o); err != nil {
			return err
		}
	}
	pubs, err := o.publishers(log)
	defer func() {
		for _, p := range pubs {
			p.Close()
		}
	}()
	if err != nil {
		return err
	}
	for rank, p := range pubs {
		fmt.Fprintf(cmd.OutOrStdout(), "rank %d: events %s, replays %s\n", rank, p.Addr(), orNone(p.ReplayAddr()))
	}
	for _, p := range pubs {
		if err := p.WaitSubscribers(cmd.Context(), o.wait); err != nil {
			return err
		}
	}
	if len(args) == 1 {
		err = publishFile(cmd, args[0], pubs)
	} else {
		err = publishWorkload(cmd, o, pubs)
	}
	if err == nil && o.hold && cmd.Context().Err() == nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "holding the sockets until interrupted")
		<-cmd.Context().Done()
	}
	return err
}

// publishers makes one publisher a rank. With an error it returns those that
// there are.
func (o *publishOptions) publishers(log *slog.Logger) (pubs []*zmqwire.Publisher, err error) {
	for rank := range o.ranks {
		p, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{
			Endpoint: o.endpoint, Bind: o.bind, ReplayEndpoint: o.replay, Topic: o.topic, DPRank: rank,
			RingSize: o.ring, OldReplyLayout: o.oldReplies, Logger: log,
		})
		if err != nil {
			return pubs, err
		}
		pubs = append(pubs, p)
	}
	return pubs, nil
}

func checkRankPorts(o *publishOptions) error {
	events, err := zmqwire.ParseEndpoint(o.endpoint)
	if err != nil {
		return usageError{err}
	}
	if o.replay == "" {
		return nil
	}
	replay, err := zmqwire.ParseEndpoint(o.replay)
	if err != nil {
		return usageError{err}
	}
	if err := zmqwire.CheckPorts(portOf(events), portOf(replay), o.ranks); err != nil {
		return usageError{err}
	}
	return nil
}

func portOf(e zmqwire.Endpoint) (port int) {
	if i := strings.LastIndexByte(e.Address, ':'); e.Network == "tcp" && i >= 0 {
		_, _ = fmt.Sscan(e.Address[i+1:], &port) // 0, for none, where it is no number
	}
	return port
}

// publishWorkload serves prompts, each on the next rank.
func publishWorkload(cmd *cobra.Command, o *publishOptions, pubs []*zmqwire.Publisher) error {
	encode := zmqwire.EncodeOptions{Maps: o.format == "map", BytesHashes: o.hashes == "bytes", Slots: o.slots}
	engines := make([]*simEngine, len(pubs))
	for i, p := range pubs {
		engines[i] = newSimEngine(p, o.blockSize, o.capacity, encode)
		if len(pubs) > 1 {
			engines[i].rank = int32(i)
		}
	}
	var prompts io.Writer = io.Discard
	if o.prompts != "" {
		f, err := os.Create(o.prompts)
		if err != nil {
			return err
		}
		defer f.Close()
		prompts = f
	}
	load := newSimWorkload(o.seed, o.prefixes, o.prefixTokens, o.tokens, o.images, o.imageID)
	served, cached, total := 0, 0, 0
	tick := newTicker(o.rate)
	defer tick.stop()
	for ; (o.count == 0 || served < o.count) && tick.wait(cmd.Context()) == nil; served++ {
		p := load.next()
		n, err := engines[served%len(engines)].serve(p)
		if err != nil {
			return err
		}
		cached, total = cached+n, total+len(p.Tokens)
		if err := json.NewEncoder(prompts).Encode(requestOf(p, o.model)); err != nil {
			return err
		}
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%d prompts served, %d of %d tokens came from the cache\n", served, cached, total)
	return nil
}

// requestOf is the prompt as a question.
func requestOf(p *simPrompt, model string) *client.MatchRequest {
	r := &client.MatchRequest{Model: model, TokenIDs: p.Tokens, LoraName: p.Lora, CacheSalt: p.Salt}
	if f := p.features(); f != nil {
		r.Features, _ = json.Marshal(f) // strings and numbers
	}
	return r
}

// ticker paces a loop; of rate 0 it does not.
type ticker struct{ t *time.Ticker }

func newTicker(rate float64) ticker {
	if rate == 0 {
		return ticker{}
	}
	return ticker{time.NewTicker(max(time.Duration(float64(time.Second)/rate), 1))}
}

func (t ticker) wait(ctx context.Context) error {
	if t.t == nil {
		return ctx.Err()
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.t.C:
		return nil
	}
}

func (t ticker) stop() {
	if t.t != nil {
		t.t.Stop()
	}
}

// publishFile publishes batches that are written in JSON, each on its rank.
func publishFile(cmd *cobra.Command, name string, pubs []*zmqwire.Publisher) error {
	in := cmd.InOrStdin()
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	d := json.NewDecoder(in)
	d.UseNumber()
	for n := 1; ; n++ {
		var v any
		if err := d.Decode(&v); err == io.EOF {
			fmt.Fprintf(cmd.OutOrStdout(), "%d batches published\n", n-1)
			return nil
		} else if err != nil {
			return fmt.Errorf("%s: batch %d: %w", name, n, err)
		}
		payload, rank, err := batchFromJSON(v)
		if err != nil {
			return fmt.Errorf("%s: batch %d: %w", name, n, err)
		}
		if rank >= len(pubs) {
			return fmt.Errorf("%s: batch %d: rank %d, but --ranks is %d", name, n, rank, len(pubs))
		}
		pubs[rank].Publish(payload)
	}
}

// batchFromJSON writes a batch in msgpack as it stands in JSON.
func batchFromJSON(v any) (payload []byte, rank int, err error) {
	if m, ok := v.(map[string]any); ok {
		if m["ts"] == nil {
			m["ts"] = json.Number(fmt.Sprintf("%.6f", float64(time.Now().UnixNano())/1e9))
		}
		v = []any{m["ts"], m["events"], m["data_parallel_rank"]}
	}
	list, ok := v.([]any)
	if !ok || len(list) < 2 {
		return nil, 0, fmt.Errorf("expected an object with events, or an array of ts and events")
	}
	if len(list) > 2 {
		if n, ok := list[2].(json.Number); ok {
			r, err := n.Int64()
			if err != nil || r < 0 {
				return nil, 0, fmt.Errorf("data_parallel_rank %s: expected an integer from 0 on", n)
			}
			rank = int(r)
		}
	}
	var b bytes.Buffer
	e := msgpack.NewEncoder(&b)
	e.UseCompactInts(true)
	e.SetSortMapKeys(true)
	err = e.Encode(numbers(v))
	return b.Bytes(), rank, err
}

// numbers replaces the numbers of JSON by the narrowest of Go.
func numbers(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		var u uint64
		if err := json.Unmarshal([]byte(v), &u); err == nil {
			return u
		}
		f, _ := v.Float64() // ±Inf where it is out of range
		return f
	case []any:
		for i := range v {
			v[i] = numbers(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = numbers(v[k])
		}
	}
	return v
}
