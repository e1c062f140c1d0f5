package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/api"
	"github.com/kvindexd/kvindexd/api/client"
)

func newExplain() *cobra.Command {
	var o askOptions
	var p promptOptions
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Ask a running daemon why each match ended where it did",
		Long: `explain takes the same prompt as match and tells, for every stream and tier, at
which block the match ended and why, in a code and a sentence.`,
		Example: `  kvindexd explain --tokens 1,2,3,4
  kvindexd explain --file request.json --workers vllm-3`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			bodies, err := p.bodies(cmd)
			if err != nil {
				return err
			}
			return o.ask(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				for _, body := range bodies {
					raw, err := c.Explain(ctx, body)
					if err != nil {
						return err
					}
					if err := printExplanation(cmd.OutOrStdout(), raw, o.asJSON); err != nil {
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

func printExplanation(out io.Writer, raw []byte, asJSON bool) error {
	if asJSON {
		return printJSON(out, json.RawMessage(raw))
	}
	var x api.Explanation
	if err := json.Unmarshal(raw, &x); err != nil {
		return fmt.Errorf("the daemon's explanation cannot be read: %w", err)
	}
	fmt.Fprintf(out, "%s, %d tokens\n", x.Model, x.PromptTokens)
	for i := range x.Streams {
		s := &x.Streams[i]
		usable := "vLLM's own figure is not known"
		if s.Usable != nil {
			usable = fmt.Sprintf("vLLM would take %d", *s.Usable)
		}
		fmt.Fprintf(out, "\n%s rank %d (%s, blocks of %d): device %d, host %d, disk %d tokens; %s\n",
			s.Worker, s.Rank, s.State, s.BlockSize, s.Device, s.Host, s.Disk, usable)
		for _, line := range sentences(s) {
			fmt.Fprintf(out, "  %s\n", line)
		}
	}
	return nil
}

// sentences are what an explanation says of one stream. A tier that ended where
// the one before it did, for the same reason, is not worth a line.
func sentences(s *api.ExplainedMatch) []string {
	var out []string
	for i, e := range s.Ended {
		if i > 0 && e.Block == s.Ended[i-1].Block && e.Code == s.Ended[i-1].Code {
			continue
		}
		out = append(out, fmt.Sprintf("%s ends at block %d (token %d): %s [%s]", e.Tier, e.Block, e.Token, e.Text, e.Code))
	}
	for _, n := range s.Notes {
		out = append(out, fmt.Sprintf("note: %s [%s]", n.Text, n.Code))
	}
	return out
}

// sentencesFor are those of one stream of an explanation.
func sentencesFor(raw []byte, worker string, rank int) []string {
	var x api.Explanation
	if json.Unmarshal(raw, &x) != nil {
		return nil
	}
	for i := range x.Streams {
		if s := &x.Streams[i]; s.Worker == worker && s.Rank == rank {
			return sentences(s)
		}
	}
	return nil
}
