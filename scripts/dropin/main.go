// Command dropin runs kvindexd beside Dynamo's standalone indexer. Both get the
// same registrations, the same events over ZeroMQ and the same requests, and
// their answers are compared field by field.
//
// Where the two differ on purpose, a deviation says so, names the fields and
// the reason, and kvindexd's answer is held against what the publisher itself
// holds. Any other difference makes it exit with 1; a deviation that does not
// show any more is reported.
//
// It is run by scripts/conformance, which installs Dynamo's indexer.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"time"
)

func main() {
	python := flag.String("python", "", "interpreter that has dynamo.indexer")
	daemon := flag.String("kvindexd", "", "the kvindexd program")
	only := flag.String("only", "", "run this scenario only")
	verbose := flag.Bool("v", false, "show the answers of every request that differs")
	logs := flag.String("logs", "", "directory for the logs of both, kept; default: a temporary one")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the publishers' transitions are no news here
	ok, err := run(ctx, *python, *daemon, *logs, *only, *verbose)
	if err != nil {
		fmt.Fprintln(os.Stderr, "dropin:", err)
	}
	if err != nil || !ok {
		cancel()
		os.Exit(1)
	}
}

// run carries out the scenarios and prints the report; false if there was a
// difference that nobody expected.
func run(ctx context.Context, python, daemon, logs, only string, verbose bool) (bool, error) {
	if logs == "" {
		dir, err := os.MkdirTemp("", "dropin")
		if err != nil {
			return false, err
		}
		defer os.RemoveAll(dir)
		logs = dir
	}
	dynamo, err := startServer(ctx, "dynamo", filepath.Join(logs, "dynamo.log"), func(port string) []string {
		return []string{python, "-m", "dynamo.indexer", "--port", port}
	})
	if err != nil {
		return false, err
	}
	defer dynamo.stop()
	ours, err := startServer(ctx, "kvindexd", filepath.Join(logs, "kvindexd.log"), func(port string) []string {
		return []string{daemon, "serve", "--listen", "127.0.0.1:" + port}
	})
	if err != nil {
		return false, err
	}
	defer ours.stop()
	p := &pair{dynamo: dynamo, ours: ours}
	for _, s := range slices.Concat(scenarios, plays) {
		if only != "" && only != s.name {
			continue
		}
		p.scenario = s.name
		s.run(ctx, p)
	}
	return report(os.Stdout, p.results, verbose), nil
}
