package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/api/client"
)

func newMatch() *cobra.Command {
	var o askOptions
	var p promptOptions
	cmd := &cobra.Command{
		Use:   "match",
		Short: "Ask a running daemon who holds how much of a prompt",
		Long: `match asks a running daemon. The prompt is token ids (--tokens, a file, stdin) or
whole request bodies, such as that of vLLM's /inference/v1/generate or the answer
of its render endpoints, one a line. Flags win over a body's fields.

Columns are in tokens: DEVICE, the unbroken run from the prompt's start in the
worker's device cache; HOST and DISK, the run continued there; USABLE, what vLLM
will report as cached tokens.`,
		Example: `  kvindexd match --tokens 1,2,3,4
  kvindexd match --model qwen-vl --file request.json --mm exact
  echo 1 2 3 | kvindexd match --include zero --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			bodies, err := p.bodies(cmd)
			if err != nil {
				return err
			}
			return o.ask(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				for _, body := range bodies {
					if err := matchOne(ctx, cmd.OutOrStdout(), c, body, o.asJSON); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	o.flags(cmd.Flags())
	p.flags(cmd.Flags())
	return cmd
}

func matchOne(ctx context.Context, out io.Writer, c *client.Client, body []byte, asJSON bool) error {
	a, err := c.MatchRaw(ctx, body)
	var refused *client.Error
	if errors.As(err, &refused) && len(refused.Refused) > 0 && !asJSON {
		printRefused(out, refused.Refused)
	}
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(out, a)
	}
	printMatch(out, a)
	return nil
}

func printMatch(out io.Writer, a *client.MatchResponse) {
	fmt.Fprintf(out, "%s, %d tokens%s\n", a.Model, a.PromptTokens, mmText(a))
	if len(a.Workers) > 0 {
		t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "WORKER\tRANK\tDEVICE\tHOST\tDISK\tUSABLE\tBLOCK\tSTATE\tSEQ\tAGE\tLOST\tNOT EXACT")
		for i := range a.Workers {
			w := &a.Workers[i]
			fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%s\t%d\t%s\t%s\t%s\t%d\t%s\n", w.Worker, w.DPRank, w.Device, w.Host, w.Disk, usableText(w),
				w.BlockSize, w.State, optional(w.Seq), ageText(w.AgeMS), w.Lost, w.Reason)
		}
		t.Flush()
	}
	printRefused(out, a.Refused)
	if len(a.Workers) == 0 || a.Workers[0].Disk == 0 {
		fmt.Fprintln(out, "no worker holds any of it")
		return
	}
	fmt.Fprintf(out, "best: %s\n", a.Best)
}

func mmText(a *client.MatchResponse) string {
	if a.MM.Images == 0 {
		return ""
	}
	s := fmt.Sprintf(", %d images taken %s", a.MM.Images, a.MM.Mode)
	if a.MM.Reason != "" {
		s += " (" + a.MM.Reason + ")"
	}
	return s
}

func usableText(w *client.Row) string {
	if w.UsableTokens == nil {
		return "? (" + w.UsableReason + ")"
	}
	return fmt.Sprint(*w.UsableTokens)
}

func ageText(ms *int64) string {
	if ms == nil {
		return "-"
	}
	return (time.Duration(*ms) * time.Millisecond).String()
}

func printRefused(out io.Writer, refused []client.Refusal) {
	for _, r := range refused {
		fmt.Fprintf(out, "refused: %s rank %d: %s (the text before the first image: %d tokens)\n", r.Worker, r.DPRank, r.Reason, r.TextOnlyDevice)
	}
}
