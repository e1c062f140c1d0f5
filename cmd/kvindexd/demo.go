package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/api"
	"github.com/kvindexd/kvindexd/api/client"
	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

func newDemo() *cobra.Command {
	var keep bool
	var listen string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See it work: simulated workers, real sockets, questions and answers",
		Long: `demo starts a few simulated vLLM workers that publish over ZeroMQ on free loopback
ports, a daemon that subscribes to them, and asks it over HTTP. Each answer is
held against what the simulated engine then really finds in its cache. It ends by
itself within seconds, with exit code 1 if an answer was wrong.`,
		Example: "  kvindexd demo\n  kvindexd demo --keep",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := loggerOf(cmd, slog.LevelError)
			if err != nil {
				return err
			}
			d := &demo{ctx: cmd.Context(), out: cmd.OutOrStdout(), log: log, began: time.Now()}
			defer d.close()
			if err := d.run(listen); err != nil {
				return err
			}
			if keep {
				err = d.keep()
			}
			if d.wrong > 0 {
				return errTold
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "go on afterwards, with steady traffic, until interrupted")
	cmd.Flags().StringVar(&listen, "address", "127.0.0.1:0", "address to answer on")
	return cmd
}

const (
	demoModel     = "Qwen2-VL"
	demoImageID   = 151655
	demoBlock     = 16
	demoCapacity  = 256 // blocks of an engine's cache
	demoPatience  = 10 * time.Second
	demoLookEvery = 500 * time.Microsecond
)

// demo is a fleet of simulated engines, the daemon that follows them, and the
// story that they tell.
type demo struct {
	ctx   context.Context
	out   io.Writer
	log   *slog.Logger
	began time.Time

	engines []*demoEngine
	load    *simWorkload
	fleet   *fleet.Fleet
	address string
	client  *client.Client

	stop func() error // ends the daemon

	asked, right, wrong int
}

// demoEngine is one worker.
type demoEngine struct {
	*simEngine
	id  string
	cfg zmqwire.PublisherConfig
}

func (d *demo) run(listen string) error {
	if err := d.start(listen); err != nil {
		return err
	}
	for _, act := range []func() error{d.text, d.images, d.exact, d.eviction, d.lostBatch, d.restart} {
		if err := act(); err != nil {
			return err
		}
	}
	verdict := "every answer was what the engine then found in its cache"
	if d.wrong > 0 {
		verdict = fmt.Sprintf("%d ANSWERS WERE WRONG", d.wrong)
	}
	d.say("\n%d answers, %d as the engines say: %s. %.1f s.", d.asked, d.right, verdict, time.Since(d.began).Seconds())
	return nil
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }

// start brings up the engines and the daemon.
func (d *demo) start(listen string) error {
	d.load = newSimWorkload(7, 4, 512, 640, 0, demoImageID)
	forms := []zmqwire.EncodeOptions{{Maps: true}, {Maps: true, BytesHashes: true}, {}, {Maps: true}}
	what := []string{"maps, integer hashes", "maps, byte hashes", "arrays (vLLM 0.22)", "maps; no image token id is known of it"}
	var specs []fleet.WorkerSpec
	d.say("%d simulated vLLM workers of %s publish KV events over ZeroMQ; kvindexd follows them.\nNumbers are the tokens that a worker would take from its cache, as the HTTP API answers:", len(forms), demoModel)
	for i, form := range forms {
		e, err := d.engine(fmt.Sprintf("vllm-%d", i), form)
		if err != nil {
			return err
		}
		spec := fleet.WorkerSpec{ID: e.id, Model: demoModel, Endpoint: e.cfg.Endpoint, ReplayEndpoint: e.cfg.ReplayEndpoint, ExactMM: true}
		if i < 3 {
			id := uint32(demoImageID)
			spec.ImageTokenID = &id
		}
		specs = append(specs, spec)
		d.say("  %s  %-24s %s", e.id, e.cfg.Endpoint, what[i])
	}
	return d.daemon(specs, listen)
}

// engine starts one simulated worker on free ports.
func (d *demo) engine(id string, form zmqwire.EncodeOptions) (*demoEngine, error) {
	cfg := zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*", Logger: d.log}
	pub, err := zmqwire.NewPublisher(cfg)
	if err != nil {
		return nil, err
	}
	cfg.Endpoint, cfg.ReplayEndpoint, cfg.Bind = pub.Addr(), pub.ReplayAddr(), true
	e := &demoEngine{simEngine: newSimEngine(pub, demoBlock, demoCapacity, form), id: id, cfg: cfg}
	d.engines = append(d.engines, e)
	return e, nil
}

// daemon starts what `kvindexd serve` runs, and a client of it.
func (d *demo) daemon(specs []fleet.WorkerSpec, listen string) error {
	f, err := fleet.New(fleet.Options{Logger: d.log, Workers: specs})
	if err != nil {
		return err
	}
	server, err := api.NewServer(api.Config{Fleet: f, Logger: d.log, Version: versionText()})
	if err != nil {
		return err
	}
	if err := api.CheckListen(listen, false, false); err != nil {
		return usagef("--address: %w", err)
	}
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(d.ctx)
	ended := make(chan error, 1)
	go func() { ended <- (&daemon{log: d.log, fleet: f, server: server, listener: l}).run(ctx) }()
	d.stop = func() error {
		cancel()
		return <-ended
	}
	d.fleet, d.address = f, "http://"+l.Addr().String()
	d.client, err = client.New(d.address)
	return err
}

func (d *demo) close() {
	if d.stop != nil {
		if err := d.stop(); err != nil {
			d.log.Error("the daemon ended badly", "reason", err)
		}
	}
	for _, e := range d.engines {
		e.pub.Close()
	}
}

// settle waits until the daemon stands where every engine does.
func (d *demo) settle() error {
	ctx, cancel := context.WithTimeout(d.ctx, demoPatience)
	defer cancel()
	look := time.NewTicker(demoLookEvery)
	defer look.Stop()
	for {
		waiting := d.behind()
		if waiting == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the daemon has not caught up within %v: %s", demoPatience, waiting)
		case <-look.C:
		}
	}
}

// behind names a stream that the daemon has not followed to its end, "" if
// there is none.
func (d *demo) behind() string {
	for _, set := range d.fleet.Sets() {
		for _, m := range set.Members {
			e := d.byID(m.Worker)
			s := m.Status()
			if n := e.published(); n > 0 && (!s.HasSeq || s.Seq != n-1 || s.State != fleet.Live) {
				return fmt.Sprintf("%s: %d batches published, daemon %s at %d (%s)", m.Worker, n, s.State, s.Seq, s.LastError)
			}
		}
	}
	return ""
}

func (d *demo) byID(id string) *demoEngine {
	for _, e := range d.engines {
		if e.id == id {
			return e
		}
	}
	return nil
}

// serve gives prompts to an engine.
func (d *demo) serve(e *demoEngine, prompts ...*simPrompt) error {
	for _, p := range prompts {
		if _, err := e.serve(p); err != nil {
			return err
		}
	}
	return nil
}

// ask puts a question, prints the answer in one line, and compares every figure
// with what the engines hold.
func (d *demo) ask(what string, p *simPrompt, mm string) error {
	if err := d.settle(); err != nil {
		return err
	}
	r := requestOf(p, demoModel)
	r.MM, r.Include = mm, []string{"zero"}
	a, err := d.client.Match(d.ctx, r)
	var refusal *client.Error
	if errors.As(err, &refusal) && len(refusal.Refused) > 0 {
		a, err = &client.MatchResponse{Refused: refusal.Refused}, nil
	}
	if err != nil {
		return err
	}
	var told []string
	for _, w := range a.Workers {
		if s := d.compare(p, &w); s != "" {
			told = append(told, s)
		}
	}
	for _, w := range a.Refused {
		told = append(told, fmt.Sprintf("%s refused (%s)", w.Worker, w.Reason))
	}
	if len(told) == 0 {
		told = []string{"nobody"}
	}
	d.say("  %-44s %s", what, strings.Join(told, ", "))
	return nil
}

// compare holds a row against its engine. A row that is not exact about images
// may be shorter, never longer.
func (d *demo) compare(p *simPrompt, w *client.Row) string {
	cached := d.byID(w.Worker).cachedTokens(p)
	d.asked++
	usable := 0
	if w.UsableTokens != nil {
		usable = *w.UsableTokens
	}
	switch {
	case usable == cached, !w.ExactMM && usable < cached:
		d.right++
	default:
		d.wrong++
		return fmt.Sprintf("%s %d (ENGINE SAYS %d)", w.Worker, usable, cached)
	}
	switch {
	case usable == 0:
		return ""
	case !w.ExactMM && len(p.Images) > 0:
		return fmt.Sprintf("%s %d (text only)", w.Worker, usable)
	}
	return fmt.Sprintf("%s %d", w.Worker, usable)
}

// text: prompts that share a beginning.
func (d *demo) text() error {
	first := d.load.next()
	second := &simPrompt{Tokens: append(append([]uint32(nil), first.Tokens[:512]...), d.load.text(128)...)}
	d.say("\nText. vllm-0 has served a prompt of %d tokens, vllm-1 another with the same first 512:", len(first.Tokens))
	if err := errors.Join(d.serve(d.engines[0], first), d.serve(d.engines[1], second)); err != nil {
		return err
	}
	longer := &simPrompt{Tokens: append(append([]uint32(nil), first.Tokens...), d.load.text(96)...)}
	salted := &simPrompt{Tokens: first.Tokens, Salt: "tenant-a"}
	return errors.Join(
		d.ask("the next turn of the first prompt", longer, ""),
		d.ask("a prompt that nobody has seen", &simPrompt{Tokens: d.load.text(640)}, ""),
		d.ask("the first prompt under a tenant's cache salt", salted, ""),
	)
}

// picture is a prompt with one image between texts.
func (d *demo) picture(before, after []uint32, identifier string) *simPrompt {
	p := &simPrompt{Tokens: append([]uint32(nil), before...)}
	p.addImage(demoImageID, 256, identifier)
	p.Tokens = append(p.Tokens, after...)
	return p
}

// images: the same placeholder tokens, other images.
func (d *demo) images() error {
	before, after := d.load.text(64), d.load.text(160)
	cat, dog := d.load.identifier(), d.load.identifier()
	d.say("\nImages. vllm-0 has seen a cat, vllm-2 a dog, in the same text, by the same placeholder tokens:")
	err := errors.Join(d.serve(d.engines[0], d.picture(before, after, cat)), d.serve(d.engines[2], d.picture(before, after, dog)))
	if err != nil {
		return err
	}
	return errors.Join(
		d.ask("the prompt with the cat", d.picture(before, after, cat), ""),
		d.ask("the prompt with the dog", d.picture(before, after, dog), ""),
		d.ask("the prompt with a third image", d.picture(before, after, d.load.identifier()), ""),
	)
}

// exact: who cannot identify images says so instead of guessing.
func (d *demo) exact() error {
	before, after := d.load.text(64), d.load.text(160)
	cat := d.load.identifier()
	d.say("\nExact or nothing. vllm-1 and vllm-3 have seen one more image; of vllm-3 no image token id is known:")
	p := d.picture(before, after, cat)
	if err := errors.Join(d.serve(d.engines[1], p), d.serve(d.engines[3], p)); err != nil {
		return err
	}
	return errors.Join(d.ask(`mm: "auto"`, p, "auto"), d.ask(`mm: "exact"`, p, "exact"))
}

// eviction: a cache that fills up.
func (d *demo) eviction() error {
	d.say("\nEviction. vllm-2, whose cache holds %d blocks, serves 12 more prompts:", demoCapacity)
	p := d.load.next()
	if err := d.serve(d.engines[2], p); err != nil {
		return err
	}
	if err := d.ask("a prompt before", p, ""); err != nil {
		return err
	}
	for range 12 {
		if err := d.serve(d.engines[2], &simPrompt{Tokens: d.load.text(640)}); err != nil {
			return err
		}
	}
	return d.ask("and after", p, "")
}

// lostBatch: what a socket drops comes back by replay.
func (d *demo) lostBatch() error {
	d.say("\nLoss. Two batches of vllm-3 are lost on the way; the gap shows, the replay socket has them:")
	e := d.engines[3]
	if err := d.settle(); err != nil {
		return err
	}
	lost := []*simPrompt{d.load.next(), d.load.next()}
	e.lose(true)
	err := d.serve(e, lost...)
	e.lose(false)
	if err == nil {
		err = d.serve(e, &simPrompt{Tokens: d.load.text(64)})
	}
	if err != nil {
		return err
	}
	if err := d.ask("the prompt of the first lost batch", lost[0], ""); err != nil {
		return err
	}
	return d.tellCounts(e)
}

// tellCounts prints what the daemon noticed of a worker's stream.
func (d *demo) tellCounts(e *demoEngine) error {
	ws, err := d.fleet.Worker(e.id)
	if err != nil {
		return err
	}
	s := ws[0].Streams[0]
	d.say("  %-44s gaps %d, replayed %d, restarts %d, lost %d, %s", e.id+" as the daemon sees it",
		s.Counts.Gaps, s.Counts.Replayed, s.Counts.Restarts, s.Status.Lost, s.Status.State)
	return nil
}

// restart: another process in the place of the old one.
func (d *demo) restart() error {
	e := d.engines[0]
	p := d.load.next()
	d.say("\nRestart. vllm-0 is killed and starts again, empty, on the same ports:")
	if err := d.serve(e, p); err != nil {
		return err
	}
	if err := d.ask("a prompt before", p, ""); err != nil {
		return err
	}
	e.pub.Close()
	pub, err := rebind(d.ctx, e.cfg)
	if err != nil {
		return err
	}
	e.simEngine = newSimEngine(pub, demoBlock, demoCapacity, e.encode)
	if err := d.serve(e, &simPrompt{Tokens: d.load.text(64)}); err != nil {
		return err
	}
	if err := d.ask("and after", p, ""); err != nil {
		return err
	}
	return d.tellCounts(e)
}

// keep goes on with steady traffic until interrupted.
func (d *demo) keep() error {
	d.say("\nServing on %s until interrupted: / is the dashboard. Ask, for example:", d.address)
	p := d.load.next()
	tokens, _ := json.Marshal(p.Tokens[:32]) // numbers
	d.say("  kvindexd match --server %s --tokens %s", d.address, strings.Trim(string(tokens), "[]"))
	t := newTicker(8)
	defer t.stop()
	for n := 0; t.wait(d.ctx) == nil; n++ {
		if err := d.serve(d.engines[n%len(d.engines)], p); err != nil {
			return err
		}
		p = d.load.next()
	}
	return nil
}
