package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/api/client"
)

// workerList is what the commands print of GET /v1/workers.
type workerList struct {
	Workers []listedWorker `json:"workers"`
}

type listedWorker struct {
	ID        string   `json:"id"`
	Model     string   `json:"model"`
	Namespace string   `json:"namespace"`
	Role      string   `json:"role"`
	State     string   `json:"state"`
	Source    string   `json:"source"`
	Rejected  []string `json:"rejected"`
	ExactMM   bool     `json:"exact_mm"`
	MMReason  string   `json:"exact_mm_reason"`
	MMClaim   string   `json:"exact_mm_claim"`
	Ranks     []struct {
		Rank      int     `json:"dp_rank"`
		Endpoint  string  `json:"endpoint"`
		State     string  `json:"state"`
		Connected bool    `json:"connected"`
		Seq       *uint64 `json:"seq"`
		AgeMS     *int64  `json:"age_ms"`
		Lost      uint64  `json:"lost"`
		LastError string  `json:"last_error"`
		Resident  struct {
			Device int64 `json:"device"`
			Host   int64 `json:"host"`
			Disk   int64 `json:"disk"`
		} `json:"resident"`
	} `json:"ranks"`
}

func newWorkers() *cobra.Command {
	var o askOptions
	cmd := &cobra.Command{
		Use:     "workers",
		Short:   "List a running daemon's workers and how far to trust each",
		Long:    `workers lists each stream of each worker: its state, position and what it holds, in blocks.`,
		Example: "  kvindexd workers\n  kvindexd workers --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.ask(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				raw, err := c.Workers(ctx)
				if err != nil {
					return err
				}
				return printListed(cmd.OutOrStdout(), raw, o.asJSON, printWorkers)
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

// printListed prints a daemon's answer as it is, or by a table.
func printListed[T any](out io.Writer, raw []byte, asJSON bool, table func(io.Writer, *T)) error {
	if asJSON {
		return printJSON(out, json.RawMessage(raw))
	}
	v := new(T)
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("the daemon's answer cannot be read: %w", err)
	}
	table(out, v)
	return nil
}

func printWorkers(out io.Writer, l *workerList) {
	if len(l.Workers) == 0 {
		fmt.Fprintln(out, "no workers")
		return
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WORKER\tRANK\tMODEL\tSTATE\tSEQ\tAGE\tLOST\tDEVICE\tHOST\tDISK\tIMAGES\tENDPOINT\tLAST ERROR")
	for i := range l.Workers {
		w := &l.Workers[i]
		for _, r := range w.Ranks {
			fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n", w.ID, r.Rank, w.Model, r.State, optional(r.Seq), ageText(r.AgeMS),
				r.Lost, r.Resident.Device, r.Resident.Host, r.Resident.Disk, imagesText(w), r.Endpoint, r.LastError)
		}
		if len(w.Rejected) > 0 {
			fmt.Fprintf(t, "%s\t-\t%s\trejected\t-\t-\t-\t-\t-\t-\t%s\t-\tdiffers from its set: %s\n", w.ID, w.Model, imagesText(w), strings.Join(w.Rejected, "; "))
		}
	}
	t.Flush()
}

// imagesText says whether questions with images are answered exactly.
func imagesText(w *listedWorker) string {
	switch {
	case w.ExactMM:
		return "exact"
	case w.MMClaim != "":
		return w.MMClaim
	}
	return "no: " + orNone(w.MMReason)
}
