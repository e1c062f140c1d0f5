package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/api"
	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// replayOptions are the flags of replay.
type replayOptions struct {
	queries string
	check   bool
	speed   string
	serve   string
	asJSON  bool
	to      republishOptions
	maxIdx  int64
}

func newReplay() *cobra.Command {
	var o replayOptions
	cmd := &cobra.Command{
		Use:   "replay FILE",
		Short: "Feed a capture through the path of live events; check, serve or publish it",
		Long: `replay reads a capture (.kvcap or .kvcap.zst; - for stdin) and applies its
records in their order, through the same code that live events pass, and prints
what each stream holds at the end.

--queries FILE --check puts each question of the file after the number of
records that it names, compares every figure that the file gives (device, host
and usable tokens, why a stream is not exact, who is refused, who must hold
nothing) and prints every difference with what the daemon says about it. The
last line is "N answers, N differ, N too long"; one that differs makes exit
code 1.

--serve ADDR keeps the result up for questions over HTTP until interrupted.

--to ENDPOINT publishes the capture over ZeroMQ instead, as its engines did: one
publisher and one replay socket a stream. Batches that the capture has only as
replies are put into the replay ring and not published, so that a subscriber
sees the gap and heals; a stream whose numbers begin again is closed and bound
anew, as a restarted engine.`,
		Example: `  kvindexd replay testdata/captures/text.kvcap.zst
  kvindexd replay images.kvcap.zst --queries images.queries.jsonl --check
  kvindexd replay load.kvcap.zst --serve 127.0.0.1:8099
  kvindexd replay text.kvcap.zst --to tcp://127.0.0.1:5557 --write-config workers.yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runReplay(cmd, args[0], &o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.queries, "queries", "", "file of questions with known answers, JSON lines")
	f.BoolVar(&o.check, "check", false, "compare the answers; a difference is exit code 1")
	f.StringVar(&o.speed, "speed", "full", `how fast: "full", "recorded", or a factor such as 2x`)
	f.StringVar(&o.serve, "serve", "", "address for questions over HTTP after the replay, such as 127.0.0.1:8099")
	f.BoolVar(&o.asJSON, "json", false, "print the results as JSON")
	f.Int64Var(&o.maxIdx, "max-index-bytes", 0, "byte budget of the index, all worker sets together, 0 for none")
	o.to.flags(f)
	return cmd
}

func runReplay(cmd *cobra.Command, file string, o *replayOptions) error {
	factor, err := parseSpeed(o.speed)
	switch {
	case err != nil:
		return err
	case o.check && o.queries == "":
		return usagef("--check needs --queries FILE")
	case o.to.endpoint != "" && (o.check || o.queries != "" || o.serve != ""):
		return usagef("--to publishes and keeps nothing: it excludes --queries, --check and --serve")
	}
	log, err := loggerOf(cmd, slog.LevelError)
	if err != nil {
		return err
	}
	c, err := openCapture(cmd, file)
	if err != nil {
		return err
	}
	if o.to.endpoint != "" {
		return republish(cmd, log, c, &o.to, newPacer(factor))
	}
	return (&replayer{cmd: cmd, o: o, log: log, capture: c, pace: newPacer(factor)}).run()
}

// parseSpeed returns how many times the recorded speed, 0 for full speed.
func parseSpeed(s string) (float64, error) {
	switch s {
	case "full":
		return 0, nil
	case "recorded":
		return 1, nil
	}
	f, err := strconv.ParseFloat(strings.TrimSuffix(s, "x"), 64)
	if err != nil || f <= 0 || f > 1e9 {
		return 0, usagef("--speed %q: expected full, recorded, or a factor such as 2x", s)
	}
	return f, nil
}

// pacer lets recorded time pass at a multiple of its speed.
type pacer struct {
	factor float64
	first  uint64 // of the record that began it, ns
	start  time.Time
}

func newPacer(factor float64) *pacer { return &pacer{factor: factor} }

// wait returns when a record of that time is due.
func (p *pacer) wait(ctx context.Context, timeNS uint64) error {
	if p.factor == 0 {
		return ctx.Err()
	}
	if p.start.IsZero() {
		p.first, p.start = timeNS, time.Now()
	}
	passed := time.Duration(float64(int64(timeNS-p.first)) / p.factor)
	t := time.NewTimer(time.Until(p.start.Add(passed)))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// replayer feeds one capture to an offline fleet.
type replayer struct {
	cmd     *cobra.Command
	o       *replayOptions
	log     *slog.Logger
	capture *captureFile
	pace    *pacer

	fleet     *fleet.Offline
	server    *api.Server
	checker   *checker
	questions []question
	records   int
	took      time.Duration
}

func (p *replayer) run() error {
	if p.o.queries != "" {
		var err error
		if p.questions, err = readQuestions(p.o.queries); err != nil {
			return err
		}
	}
	replies, err := p.capture.replies()
	if err != nil {
		return err
	}
	err = p.capture.read(func(r *zmqwire.CaptureReader) error {
		if err := p.begin(r.Header(), replies); err != nil {
			return err
		}
		return p.feed(r)
	})
	if err != nil {
		return err
	}
	if err := p.report(); err != nil {
		return err
	}
	if p.o.serve != "" {
		return p.serve()
	}
	return nil
}

func (p *replayer) begin(h zmqwire.CaptureHeader, replies fleet.Replies) (err error) {
	p.fleet, err = fleet.NewOffline(h, replies, fleet.Options{Logger: p.log, Index: p.indexOptions()})
	if err != nil {
		return err
	}
	p.server, err = api.NewServer(api.Config{Fleet: p.fleet.Fleet, Logger: p.log, Version: versionText()})
	if err != nil {
		return err
	}
	c, err := inProcess(p.server)
	p.checker = newChecker(c, h.Streams, p.cmd.OutOrStdout())
	if p.o.asJSON || !p.o.check {
		p.checker.out = p.cmd.ErrOrStderr()
	}
	return err
}

func (p *replayer) feed(r *zmqwire.CaptureReader) error {
	ctx := p.cmd.Context()
	start := time.Now()
	if err := p.ask(0); err != nil {
		return err
	}
	warn := func(format string, args ...any) { warnf(p.cmd, format, args...) }
	err := each(r, warn, func(rec *zmqwire.Record) error {
		if err := p.pace.wait(ctx, rec.TimeNS); err != nil {
			return err
		}
		if err := p.fleet.Feed(rec); err != nil {
			return err
		}
		p.records++
		return p.ask(p.records)
	})
	p.took = time.Since(start)
	if err != nil {
		return err
	}
	return p.ask(int(^uint(0) >> 1))
}

// ask puts the questions that are due after so many records.
func (p *replayer) ask(records int) error {
	for len(p.questions) > 0 && p.questions[0].After <= records {
		if err := p.checker.ask(p.cmd.Context(), &p.questions[0]); err != nil {
			return err
		}
		p.questions = p.questions[1:]
	}
	return nil
}

// replayResult is what replay prints with --json.
type replayResult struct {
	Records int            `json:"records"`
	Seconds float64        `json:"seconds"`
	Streams []streamResult `json:"streams"`
	Check   *checkTally    `json:"check,omitempty"`
}

// streamResult is where one stream stands. Blocks are counted in blocks.
type streamResult struct {
	Stream   string  `json:"stream"`
	State    string  `json:"state"`
	Seq      *uint64 `json:"seq"`
	Messages uint64  `json:"messages"`
	Replayed uint64  `json:"replayed"`
	Gaps     uint64  `json:"gaps"`
	Lost     uint64  `json:"lost"`
	Restarts uint64  `json:"restarts"`
	Device   int64   `json:"device"`
	Host     int64   `json:"host"`
	Disk     int64   `json:"disk"`
	Orphans  int64   `json:"orphans"`
	Error    string  `json:"last_error,omitempty"`
}

func (p *replayer) result() replayResult {
	r := replayResult{Records: p.records, Seconds: p.took.Seconds()}
	for _, s := range p.fleet.Positions() {
		n := streamResult{
			Stream: s.Stream, State: s.Status.State.String(), Messages: s.Counts.Messages, Replayed: s.Counts.Replayed,
			Gaps: s.Counts.Gaps, Lost: s.Status.Lost, Restarts: s.Counts.Restarts,
			Device: s.Stats.Resident[normalize.Device], Host: s.Stats.Resident[normalize.Host],
			Disk:    s.Stats.Resident[normalize.Disk] + s.Stats.Resident[normalize.External],
			Orphans: s.Stats.Orphans, Error: s.Status.LastError,
		}
		if s.Status.HasSeq {
			n.Seq = &s.Status.Seq
		}
		r.Streams = append(r.Streams, n)
	}
	if p.o.queries != "" {
		r.Check = &p.checker.tally
	}
	return r
}

func (p *replayer) report() error {
	r := p.result()
	out := p.cmd.OutOrStdout()
	if p.o.asJSON {
		if err := printJSON(out, r); err != nil {
			return err
		}
	} else {
		printResult(out, &r)
	}
	if p.o.check && r.Check.Differ > 0 {
		return errTold
	}
	return nil
}

func printResult(out io.Writer, r *replayResult) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "STREAM\tSTATE\tSEQ\tMESSAGES\tREPLAYED\tGAPS\tLOST\tRESTARTS\tDEVICE\tHOST\tDISK\tORPHANS\t")
	for _, s := range r.Streams {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n", s.Stream, s.State, optional(s.Seq), s.Messages, s.Replayed,
			s.Gaps, s.Lost, s.Restarts, s.Device, s.Host, s.Disk, s.Orphans)
	}
	t.Flush()
	fmt.Fprintf(out, "%d records in %.3f s; device, host and disk in blocks\n", r.Records, r.Seconds)
	if r.Check != nil {
		fmt.Fprintln(out, *r.Check)
	}
}

// serve answers questions about what was replayed, until interrupted.
func (p *replayer) serve() error {
	if err := api.CheckListen(p.o.serve, false, false); err != nil {
		return usageError{err}
	}
	l, err := net.Listen("tcp", p.o.serve)
	if err != nil {
		return err
	}
	fmt.Fprintf(p.cmd.ErrOrStderr(), "serving on http://%s until interrupted\n", l.Addr())
	return p.server.Serve(p.cmd.Context(), l)
}

// printJSON prints v for a program.
func printJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func (p *replayer) indexOptions() (o index.Options) {
	if p.o.maxIdx > 0 {
		o.Budget = index.NewBudget(p.o.maxIdx)
	}
	return o
}
