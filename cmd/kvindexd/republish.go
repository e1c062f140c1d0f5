package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// republishOptions are the flags that turn a capture back into publishers.
type republishOptions struct {
	endpoint    string
	replay      string
	writeConfig string
	wait        time.Duration
	hold        bool
	ring        int
}

func (o *republishOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.endpoint, "to", "", "publish over ZeroMQ: stream n of the capture, by name, on the endpoint's port + n; or an endpoint with {stream} in it")
	f.StringVar(&o.replay, "to-replay", "", "replay endpoint of stream 0, counted the same way (default: the ports after the last stream's; port * with --to tcp://…:*)")
	f.StringVar(&o.writeConfig, "write-config", "", "with --to: write a configuration file for serve --config with the streams' workers")
	f.DurationVar(&o.wait, "wait", 30*time.Second, "with --to: how long to wait for a subscriber of every stream, 0 to begin at once")
	f.BoolVar(&o.hold, "hold", false, "with --to: keep the publishers up after the last record, until interrupted")
	f.IntVar(&o.ring, "ring", 10_000, "with --to: batches that can be replayed, a stream")
}

// republish plays a whole capture over ZeroMQ.
func republish(cmd *cobra.Command, log *slog.Logger, c *captureFile, o *republishOptions, pace *pacer) error {
	ctx := cmd.Context()
	r, err := newRepublisher(log, c, o)
	if err != nil {
		return err
	}
	defer r.close()
	if o.writeConfig != "" {
		if err := r.writeConfig(o.writeConfig); err != nil {
			return err
		}
	}
	r.table(cmd)
	if err := r.waitSubscribers(ctx, o.wait); err != nil {
		return err
	}
	warn := func(format string, args ...any) { warnf(cmd, format, args...) }
	err = c.read(func(cr *zmqwire.CaptureReader) error {
		return each(cr, warn, func(rec *zmqwire.Record) error {
			if err := pace.wait(ctx, rec.TimeNS); err != nil {
				return err
			}
			return r.feed(ctx, rec)
		})
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%d batches published, %d kept for replays only\n", r.published, r.held)
	if o.hold {
		fmt.Fprintln(cmd.ErrOrStderr(), "holding the publishers until interrupted")
		<-ctx.Done()
	}
	return nil
}

// republisher is a publisher for each stream of a capture.
type republisher struct {
	log     *slog.Logger
	header  zmqwire.CaptureHeader
	wait    time.Duration // for subscribers to come back after a restart
	names   []string
	streams map[string]*republished

	published, held int
}

// republished is one stream. Its lives are what the capture has of it between
// two restarts.
type republished struct {
	cfg zmqwire.PublisherConfig
	pub *zmqwire.Publisher
	// missing are, for each life, the batches that came as replies.
	missing []map[uint64][]byte
	life    int
	place   place
}

// place is where a stream stands while its capture is read.
type place struct {
	live bool // a live message was seen
	last uint64
	next uint64 // the first seq that is neither published nor held
}

// restarts says whether a live message of that seq begins a new life.
func (p *place) restarts(seq uint64) bool { return p.live && seq <= p.last }

func (p *place) advance(seq uint64) {
	p.live, p.last = true, seq
	p.next = max(p.next, seq+1)
}

func newRepublisher(log *slog.Logger, c *captureFile, o *republishOptions) (*republisher, error) {
	r := &republisher{log: log, wait: o.wait, streams: map[string]*republished{}}
	err := c.read(func(cr *zmqwire.CaptureReader) error {
		r.header = cr.Header()
		for name := range r.header.Streams {
			r.names = append(r.names, name)
			r.streams[name] = &republished{missing: []map[uint64][]byte{{}}}
		}
		slices.Sort(r.names)
		return r.survey(cr)
	})
	for i, name := range r.names {
		if err == nil {
			err = r.streams[name].bind(o, log, name, i, len(r.names))
		}
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// survey reads the capture once: which topic a stream has, in which form its
// replies were, and which batches of each of its lives came as replies.
func (r *republisher) survey(cr *zmqwire.CaptureReader) error {
	quiet := func(string, ...any) {} // the reading that publishes will say it
	err := each(cr, quiet, func(rec *zmqwire.Record) error {
		s := r.streams[rec.Stream]
		if s == nil {
			return fmt.Errorf("record of stream %q, which the header does not have", rec.Stream)
		}
		if rec.Kind == zmqwire.Reply {
			s.surveyReply(rec)
			return nil
		}
		m, err := zmqwire.ParseMessage(rec.Frames)
		if err != nil {
			return nil // it cannot be published either
		}
		s.cfg.Topic = string(m.Topic)
		if s.place.restarts(m.Seq) {
			s.missing = append(s.missing, map[uint64][]byte{})
		}
		s.place.advance(m.Seq)
		return nil
	})
	for _, s := range r.streams {
		s.place = place{}
	}
	return err
}

func (s *republished) surveyReply(rec *zmqwire.Record) {
	m, end, err := zmqwire.ParseReply(rec.Frames)
	if err != nil {
		return
	}
	n := len(rec.Frames)
	s.cfg.OldReplyLayout = n == 2 || n == 3 && len(rec.Frames[0]) == 0
	if !end {
		s.missing[len(s.missing)-1][m.Seq] = slices.Clone(m.Payload)
	}
}

// bind makes the publisher of stream i of n.
func (s *republished) bind(o *republishOptions, log *slog.Logger, name string, i, n int) error {
	events, replay, err := endpointsOf(o, name, i, n)
	if err != nil {
		return usagef("--to: stream %s: %w", name, err)
	}
	s.cfg.Endpoint, s.cfg.ReplayEndpoint = events, replay
	s.cfg.Bind, s.cfg.RingSize, s.cfg.Logger = true, o.ring, log
	if s.pub, err = zmqwire.NewPublisher(s.cfg); err != nil {
		return fmt.Errorf("stream %s: %w", name, err)
	}
	s.cfg.Endpoint, s.cfg.ReplayEndpoint = s.pub.Addr(), s.pub.ReplayAddr()
	return nil
}

// endpointsOf says where stream i of n is published and replayed.
func endpointsOf(o *republishOptions, name string, i, n int) (events, replay string, err error) {
	at := func(endpoint string, offset int) (string, error) {
		if strings.Contains(endpoint, "{stream}") {
			return strings.ReplaceAll(endpoint, "{stream}", strings.ReplaceAll(name, "/", "-")), nil
		}
		return zmqwire.OffsetEndpoint(endpoint, offset)
	}
	if events, err = at(o.endpoint, i); err != nil {
		return "", "", err
	}
	switch {
	case o.replay != "":
		replay, err = at(o.replay, i)
	case strings.HasPrefix(events, "ipc://"):
		replay = events + ".replay"
	default:
		replay, err = at(o.endpoint, n+i)
	}
	return events, replay, err
}

// feed publishes one record. What the capture has of the numbers before it as
// replies only is put into the ring first: a subscriber that sees the gap finds
// it there.
func (r *republisher) feed(ctx context.Context, rec *zmqwire.Record) error {
	s := r.streams[rec.Stream]
	if rec.Kind == zmqwire.Reply {
		if m, end, err := zmqwire.ParseReply(rec.Frames); err == nil && !end && m.Seq >= s.place.next {
			r.hold(s, m.Seq+1)
		}
		return nil
	}
	m, err := zmqwire.ParseMessage(rec.Frames)
	if err != nil {
		r.log.Warn("record left out", "stream", rec.Stream, "reason", err)
		return nil
	}
	if s.place.restarts(m.Seq) {
		if err := r.restart(ctx, s); err != nil {
			return fmt.Errorf("stream %s: restart: %w", rec.Stream, err)
		}
	}
	r.hold(s, m.Seq)
	s.pub.PublishSeq(m.Seq, m.Payload)
	s.place.advance(m.Seq)
	r.published++
	return nil
}

// hold keeps what the capture has of [next, end) as replies for replays.
func (r *republisher) hold(s *republished, end uint64) {
	for ; s.place.next < end; s.place.next++ {
		if payload, ok := s.missing[s.life][s.place.next]; ok {
			s.pub.Hold(s.place.next, payload)
			r.held++
		}
	}
}

// restart ends a publisher and begins another in its place, as a restarted
// engine does, and lets its subscribers come back.
func (r *republisher) restart(ctx context.Context, s *republished) error {
	subscribers := s.pub.Subscribers()
	s.pub.Close()
	pub, err := rebind(ctx, s.cfg)
	if err != nil {
		return err
	}
	s.pub, s.place = pub, place{}
	s.life++
	if r.wait == 0 || subscribers == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.wait)
	defer cancel()
	return pub.WaitSubscribers(ctx, subscribers)
}

func (r *republisher) close() {
	for _, s := range r.streams {
		if s.pub != nil {
			s.pub.Close()
		}
	}
}

// waitSubscribers waits until every stream has a subscriber.
func (r *republisher) waitSubscribers(ctx context.Context, wait time.Duration) error {
	if wait == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for _, name := range r.names {
		if err := r.streams[name].pub.WaitSubscribers(ctx, 1); err != nil {
			return fmt.Errorf("nobody subscribed to stream %s at %s within %v (--wait 0 does not wait): %w", name, r.streams[name].cfg.Endpoint, wait, err)
		}
	}
	return nil
}

// table tells where the streams are.
func (r *republisher) table(cmd *cobra.Command) {
	t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "STREAM\tENDPOINT\tREPLAY\tTOPIC")
	for _, name := range r.names {
		s := r.streams[name]
		fmt.Fprintf(t, "%s\t%s\t%s\t%q\n", name, s.cfg.Endpoint, s.cfg.ReplayEndpoint, s.cfg.Topic)
	}
	t.Flush()
}

// workers are the streams as a configuration of a fleet has them.
func (r *republisher) workers() []fleet.WorkerSpec {
	var out []fleet.WorkerSpec
	index := map[streamKey]int{}
	for _, name := range r.names {
		cs, s := r.header.Streams[name], r.streams[name]
		key := keyOf(cs)
		key.rank = 0
		i, ok := index[key]
		if !ok {
			i = len(out)
			index[key] = i
			out = append(out, specOf(cs))
		}
		out[i].Ranks = append(out[i].Ranks, fleet.RankSpec{
			Rank: cs.DPRank, Endpoint: dialable(s.cfg.Endpoint), ReplayEndpoint: dialable(s.cfg.ReplayEndpoint),
		})
	}
	return out
}

// specOf is what a capture says of a stream's worker, without its endpoints.
func specOf(cs zmqwire.CaptureStream) fleet.WorkerSpec {
	spec := fleet.WorkerSpec{
		ID: cs.Worker, Model: cs.Model, Namespace: cs.Namespace, Role: cs.Role, Topic: cs.Topic,
		ExtraKeys: cs.ExtraKeys, EagleDrop: cs.EagleDrop, BlockSize: cs.BlockSize,
		ImageTokenID: cs.ImageTokenID, VideoTokenID: cs.VideoTokenID, ExactMM: cs.ImageTokenID != nil,
	}
	if cs.TowerConnectorLora {
		spec.TowerConnectorLora = &cs.TowerConnectorLora
	}
	return spec
}

// dialable replaces a wildcard host, which can be bound only.
func dialable(endpoint string) string {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return endpoint
	}
	host, port, err := net.SplitHostPort(rest)
	if ip := net.ParseIP(host); err == nil && (host == "*" || host == "" || ip != nil && ip.IsUnspecified()) {
		return "tcp://" + net.JoinHostPort("127.0.0.1", port)
	}
	return endpoint
}

func (r *republisher) writeConfig(name string) error {
	raw, err := yaml.Marshal(struct {
		Workers []fleet.WorkerSpec `yaml:"workers"`
	}{r.workers()})
	if err != nil {
		return err
	}
	return os.WriteFile(name, raw, 0o644)
}
