// Command bench-api measures what an answer costs: the CPU time of the daemon
// alone, which runs as a process of its own, and the latency that a client
// sees, quiet and while events come in. Simulated workers publish over ZeroMQ;
// requests are recorded bytes over keep-alive connections. Where wrk is
// installed it asks too.
//
//	go run ./scripts/bench-api
//
// The question is the one that routers ask: a long prompt that all workers
// hold, the best eight wanted.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"time"
)

// settings are the flags.
type settings struct {
	daemon   string
	workers  int
	tokens   int
	ops      int
	duration time.Duration
}

func main() {
	var s settings
	flag.StringVar(&s.daemon, "kvindexd", "", "the program; built from this repository where not given")
	flag.IntVar(&s.workers, "workers", 32, "workers that hold the prompt")
	flag.IntVar(&s.tokens, "tokens", 8192, "tokens of the prompt")
	flag.IntVar(&s.ops, "ops", 200_000, "block operations a second while events come in")
	flag.DurationVar(&s.duration, "duration", 3*time.Second, "of each measurement")
	flag.Parse()
	runtime.GOMAXPROCS(max(16, runtime.NumCPU())) // one that naps in the kernel keeps its processor for a while
	slog.SetDefault(slog.New(slog.DiscardHandler))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, s); err != nil {
		fmt.Fprintln(os.Stderr, "bench-api:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, s settings) error {
	engines, err := newEngines(s)
	if err != nil {
		return err
	}
	defer engines.close()
	d, err := startDaemon(ctx, s, engines)
	if err != nil {
		return err
	}
	defer d.stop()
	bodies := []request{jsonRequest(engines.prompt), msgpackRequest(engines.prompt)}
	for i := range bodies {
		if err := d.settle(ctx, &bodies[i], s); err != nil {
			return err
		}
	}
	fmt.Printf("%d tokens in blocks of %d, held by %d workers; top_k %d\n\n", s.tokens, blockSize, s.workers, topK)
	fmt.Printf("%-34s %10s %12s %9s %9s %9s %9s\n", "", "answers/s", "server CPU", "p50", "p99", "max", "served")
	for i := range bodies {
		if err := quiet(ctx, d, &bodies[i], s); err != nil {
			return err
		}
	}
	return underLoad(ctx, d, bodies, engines, s)
}

// quiet measures with one connection and with four, and by wrk.
func quiet(ctx context.Context, d *daemon, r *request, s settings) error {
	for _, conns := range []int{1, 4} {
		m, err := d.measure(func() (result, error) { return closedLoop(ctx, d.address, r, conns, s.duration) })
		if err != nil {
			return err
		}
		m.print(fmt.Sprintf("%s, %d connection(s)", r.name, conns))
	}
	m, err := d.measure(func() (result, error) { return wrk(ctx, d.address, r, s.duration) })
	if err != nil {
		fmt.Printf("%-34s %v\n", r.name+", wrk", err)
		return nil
	}
	m.print(r.name + ", wrk, 4 connections")
	return nil
}

// underLoad measures at half of the rate that can be reached while events come
// in.
func underLoad(ctx context.Context, d *daemon, bodies []request, engines *engines, s settings) error {
	load := engines.publish(ctx, s.ops)
	alone, err := d.measure(func() (result, error) { return result{took: s.duration}, sleep(ctx, s.duration) })
	if err != nil {
		return err
	}
	share := alone.cpu.Seconds() / s.duration.Seconds()
	fmt.Printf("\nwhile %d block operations a second come in, which alone take %.0f %% of a core (not counted below):\n", s.ops, 100*share)
	for i := range bodies {
		r := &bodies[i]
		most, err := d.measure(func() (result, error) { return closedLoop(ctx, d.address, r, 4, s.duration) })
		if err != nil {
			return err
		}
		most.less(share).print(r.name + ", 4 connections")
		// One connection comes near that half by itself, without a timer of the
		// client's between the daemon and its figure.
		one, err := d.measure(func() (result, error) { return closedLoop(ctx, d.address, r, 1, 2*s.duration) })
		if err != nil {
			return err
		}
		one.less(share).print(r.name + ", 1 connection")
		m, err := d.measure(func() (result, error) { return openLoop(ctx, d.address, r, most.rate()/2, 2*s.duration) })
		if err != nil {
			return err
		}
		m.less(share).print(r.name + ", at half of that rate")
	}
	sent, took := load()
	behind, err := d.behind(ctx, engines)
	if err != nil {
		return err
	}
	fmt.Printf("%.0f block operations a second were published; the daemon caught up %s after the last\n", float64(sent)/took.Seconds(), behind.Round(time.Millisecond))
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
