package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// recordOptions are the flags of record.
type recordOptions struct {
	out      string
	force    bool
	workers  []string
	config   string
	model    string
	note     string
	replay   bool
	duration time.Duration
	messages uint64
}

func newRecord() *cobra.Command {
	var o recordOptions
	cmd := &cobra.Command{
		Use:   "record -o FILE [ENDPOINT…]",
		Short: "Subscribe to workers and write what they publish into a capture",
		Long: `record subscribes to event publishers and writes every message as it comes, until
SIGINT, --duration or --messages; then it closes the file, which is whole. What
was written a second ago survives even a kill.

Workers are given by endpoint (named w0, w1, … and of --model), or by --worker
and --config as for serve, which also keep the image token id and whatever else a
replay needs to know.

--replay also asks the replay endpoints: for the whole ring at the beginning and
for each gap. The replies stand in the capture as replies.`,
		Example: `  kvindexd record -o today.kvcap.zst tcp://10.0.0.5:5557 --model Qwen/Qwen3-8B
  kvindexd record -o vl.kvcap.zst --replay --worker id=vllm-0,model=qwen-vl,endpoint=tcp://10.0.0.5:5557,replay_endpoint=tcp://10.0.0.5:5657,image_token_id=151655
  kvindexd record -o all.kvcap.zst --config workers.yaml --duration 10m`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error { return runRecord(cmd, &o, args) },
	}
	f := cmd.Flags()
	f.StringVarP(&o.out, "out", "o", "", "file to write, compressed if it ends in .zst; - for stdout")
	f.BoolVar(&o.force, "force", false, "overwrite the file")
	f.StringArrayVar(&o.workers, "worker", nil, "a worker, as id=…,model=…,endpoint=…[,key=value…] (repeated)")
	f.StringVar(&o.config, "config", "", "file of workers, as for serve")
	f.StringVar(&o.model, "model", "model", "model of the endpoints that are given by themselves")
	f.StringVar(&o.note, "note", "", "a word about the capture, kept in it")
	f.BoolVar(&o.replay, "replay", false, "also fetch what the replay endpoints hold")
	f.DurationVar(&o.duration, "duration", 0, "end after so long")
	f.Uint64Var(&o.messages, "messages", 0, "end after so many live messages")
	return cmd
}

func runRecord(cmd *cobra.Command, o *recordOptions, endpoints []string) error {
	if o.out == "" {
		return usagef("--out FILE is needed")
	}
	log, err := loggerOf(cmd, slog.LevelWarn)
	if err != nil {
		return err
	}
	specs, err := o.specs(endpoints)
	if err != nil {
		return err
	}
	r := &recorder{log: log, o: o, ended: make(chan struct{})}
	header := zmqwire.CaptureHeader{CreatedNS: uint64(time.Now().UnixNano()), Note: o.note, Streams: map[string]zmqwire.CaptureStream{}}
	for i := range specs {
		if err := r.add(&specs[i], header.Streams); err != nil {
			return err
		}
	}
	out, err := o.create(cmd.OutOrStdout())
	if err != nil {
		return err
	}
	if r.w, err = zmqwire.NewCaptureWriter(out, header, strings.HasSuffix(o.out, ".zst")); err == nil {
		err = r.run(cmd)
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("%s: %w", o.out, err)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s\n", o.out, r.progress())
	return nil
}

// specs are the workers of all the flags.
func (o *recordOptions) specs(endpoints []string) ([]fleet.WorkerSpec, error) {
	specs, err := parseWorkers(o.workers)
	if err != nil {
		return nil, err
	}
	if o.config != "" {
		raw, err := os.ReadFile(o.config)
		if err != nil {
			return nil, usagef("--config: %w", err)
		}
		c, err := fleet.ParseConfig(o.config, raw, fleet.EndpointDefaults{Model: o.model, EventPortBase: 5557})
		if err != nil {
			return nil, usageError{err}
		}
		specs = append(specs, withModels(&c)...)
	}
	for i, e := range endpoints {
		s := fleet.WorkerSpec{ID: "w" + strconv.Itoa(i), Model: o.model, Endpoint: e}
		if err := s.Validate(); err != nil {
			return nil, usageError{err}
		}
		specs = append(specs, s)
	}
	if len(specs) == 0 {
		return nil, usagef("nothing to record: give an endpoint, --worker or --config")
	}
	return specs, nil
}

// withModels are a file's workers with what their models say filled in.
func withModels(c *fleet.Config) []fleet.WorkerSpec {
	models := map[string]*fleet.ModelSpec{}
	for i := range c.Models {
		models[c.Models[i].Name] = &c.Models[i]
	}
	for i := range c.Workers {
		w, m := &c.Workers[i], models[c.Workers[i].Model]
		if m == nil {
			continue
		}
		if w.ImageTokenID == nil {
			w.ImageTokenID = m.ImageTokenID
		}
		if w.VideoTokenID == nil {
			w.VideoTokenID = m.VideoTokenID
		}
		if w.TowerConnectorLora == nil {
			w.TowerConnectorLora = m.TowerConnectorLora
		}
		if w.BlockSize == 0 {
			w.BlockSize = m.BlockSize
		}
	}
	return c.Workers
}

// create opens the output. An existing file is somebody's recording.
func (o *recordOptions) create(stdout io.Writer) (io.WriteCloser, error) {
	if o.out == "-" {
		return struct {
			io.Writer
			io.Closer
		}{stdout, io.NopCloser(nil)}, nil
	}
	flags := os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if o.force {
		flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	}
	f, err := os.OpenFile(o.out, flags, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil, usagef("%s exists; --force overwrites it", o.out)
	}
	return f, err
}

// recorder writes what all streams bring into one capture.
type recorder struct {
	log     *slog.Logger
	o       *recordOptions
	streams []*recordedStream

	messages, replies, bytes, gaps atomic.Uint64
	connected                      atomic.Int64
	ended                          chan struct{} // closed when --messages have come
	once                           sync.Once

	// mu guards what follows.
	mu  sync.Mutex
	w   *zmqwire.CaptureWriter
	err error // the first failure to write
}

// recordedStream is one publisher.
type recordedStream struct {
	r        *recorder
	name     string
	sub      *zmqwire.Subscriber
	replay   string
	requests chan replayRange

	// The subscriber's goroutine only:
	up      bool
	started bool
	next    uint64
}

// replayRange is what is to be asked of a replay endpoint; until 0 is open.
type replayRange struct{ from, until uint64 }

// add makes the streams of a worker.
func (r *recorder) add(spec *fleet.WorkerSpec, header map[string]zmqwire.CaptureStream) error {
	ranks, err := ranksOf(spec)
	if err != nil {
		return usagef("worker %s: %w", spec.ID, err)
	}
	for _, rank := range ranks {
		name := spec.ID + "/" + strconv.Itoa(rank.Rank)
		if _, twice := header[name]; twice {
			return usagef("stream %s stands twice", name)
		}
		header[name] = streamOf(spec, rank.Rank)
		sub, err := zmqwire.NewSubscriber(zmqwire.SubscriberConfig{Endpoint: rank.Endpoint, Bind: spec.Bind, Topic: spec.Topic, Logger: r.log})
		if err != nil {
			return usageError{err}
		}
		s := &recordedStream{r: r, name: name, sub: sub, requests: make(chan replayRange, 64)}
		if r.o.replay {
			s.replay = rank.ReplayEndpoint
		}
		r.streams = append(r.streams, s)
	}
	return nil
}

// ranksOf are a worker's publishers: counted ports, or its own list.
func ranksOf(spec *fleet.WorkerSpec) (ranks []fleet.RankSpec, err error) {
	if len(spec.Ranks) > 0 {
		return spec.Ranks, nil
	}
	for rank := range max(spec.DPSize, 1) {
		offset := rank
		if spec.RankIndex != nil {
			offset += *spec.RankIndex
		}
		at := fleet.RankSpec{Rank: rank}
		if at.Endpoint, err = zmqwire.OffsetEndpoint(spec.Endpoint, offset); err != nil {
			return nil, err
		}
		if spec.ReplayEndpoint != "" {
			if at.ReplayEndpoint, err = zmqwire.OffsetEndpoint(spec.ReplayEndpoint, offset); err != nil {
				return nil, err
			}
		}
		ranks = append(ranks, at)
	}
	return ranks, nil
}

// streamOf is what a capture keeps of a worker's rank.
func streamOf(spec *fleet.WorkerSpec, rank int) zmqwire.CaptureStream {
	return zmqwire.CaptureStream{
		Worker: spec.ID, DPRank: rank, Model: spec.Model, Namespace: spec.Namespace, Role: spec.Role, Topic: spec.Topic,
		ExtraKeys: spec.ExtraKeys, BlockSize: spec.BlockSize, ImageTokenID: spec.ImageTokenID, VideoTokenID: spec.VideoTokenID,
		TowerConnectorLora: spec.TowerConnectorLora != nil && *spec.TowerConnectorLora, EagleDrop: spec.EagleDrop,
	}
}

// run records until the command ends, the limits are reached or the file cannot
// be written.
func (r *recorder) run(cmd *cobra.Command) error {
	ctx, cancel := context.WithCancel(cmd.Context())
	defer cancel()
	if r.o.duration > 0 {
		ctx, cancel = context.WithTimeout(ctx, r.o.duration)
		defer cancel()
	}
	var wg sync.WaitGroup
	for _, s := range r.streams {
		wg.Go(func() { _ = s.sub.Run(ctx, s.message, s.state) })
		wg.Go(func() { s.replays(ctx) })
	}
	r.watch(ctx, cmd.ErrOrStderr())
	cancel()
	wg.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(r.err, r.w.Close())
}

// watch flushes the capture each second and shows how far it is.
func (r *recorder) watch(ctx context.Context, stderr io.Writer) {
	tty := isTerminal(stderr)
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
		case <-r.ended:
		case <-t.C:
			if r.flush() != nil {
				return
			}
			switch {
			case tty:
				fmt.Fprintf(stderr, "\r\033[K%s", r.progress())
			case n%10 == 0:
				fmt.Fprintln(stderr, r.progress())
			}
			continue
		}
		if tty {
			fmt.Fprint(stderr, "\r\033[K")
		}
		return
	}
}

func (r *recorder) flush() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = r.w.Flush()
	}
	return r.err
}

func (r *recorder) progress() string {
	return fmt.Sprintf("%d of %d streams connected, %d messages, %d replies, %.1f MB, %d gaps",
		r.connected.Load(), len(r.streams), r.messages.Load(), r.replies.Load(), float64(r.bytes.Load())/1e6, r.gaps.Load())
}

func (r *recorder) write(rec zmqwire.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = r.w.Write(rec)
	}
}

// message takes a live message.
func (s *recordedStream) message(m zmqwire.Message) {
	r := s.r
	n := r.messages.Add(1)
	if limit := r.o.messages; limit > 0 && n >= limit {
		r.once.Do(func() { close(r.ended) })
		if n > limit {
			r.messages.Add(^uint64(0))
			return
		}
	}
	if m.Seq > s.next && (s.started || m.Seq > 0) {
		r.gaps.Add(1)
		s.request(replayRange{s.next, m.Seq})
	}
	s.started, s.next = true, m.Seq+1
	r.bytes.Add(uint64(len(m.Payload)))
	var seq [8]byte
	binary.BigEndian.PutUint64(seq[:], m.Seq)
	r.write(zmqwire.Record{
		TimeNS: uint64(time.Now().UnixNano()), Stream: s.name, Kind: zmqwire.Live, Frames: [][]byte{m.Topic, seq[:], m.Payload},
	})
}

// state asks for the ring after every connect: what was published before the
// subscription is in no live message.
func (s *recordedStream) state(e zmqwire.ConnEvent) {
	up := e.Peers > 0
	if up && !s.up {
		s.r.connected.Add(1)
		s.request(replayRange{from: s.next})
	}
	if !up && s.up {
		s.r.connected.Add(-1)
	}
	s.up = up
}

func (s *recordedStream) request(q replayRange) {
	if s.replay == "" {
		return
	}
	select {
	case s.requests <- q:
	default:
		s.r.log.Warn("replay left out: too many are waiting", "stream", s.name, "from", q.from)
	}
}

// replays asks for one range after the other.
func (s *recordedStream) replays(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case q := <-s.requests:
			_, err := zmqwire.ReplayAll(ctx, zmqwire.ReplayConfig{Endpoint: s.replay, From: q.from, Until: q.until, Logger: s.r.log}, s.reply)
			if err != nil && ctx.Err() == nil {
				s.r.log.Warn("replay ended early", "stream", s.name, "from", q.from, "reason", err)
			}
			s.writeReply(nil, ^uint64(0), nil)
		}
	}
}

func (s *recordedStream) reply(m zmqwire.Replayed) error {
	s.r.replies.Add(1)
	s.r.bytes.Add(uint64(len(m.Payload)))
	s.writeReply(m.Topic, m.Seq, m.Payload)
	return nil
}

// writeReply writes a reply in the newer layout, or the end marker.
func (s *recordedStream) writeReply(topic []byte, seq uint64, payload []byte) {
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], seq)
	s.r.write(zmqwire.Record{
		TimeNS: uint64(time.Now().UnixNano()), Stream: s.name, Kind: zmqwire.Reply, Frames: [][]byte{nil, topic, n[:], payload},
	})
}
