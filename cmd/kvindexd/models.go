package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/api/client"
)

// modelList is what is printed of GET /v1/models.
type modelList struct {
	Models []struct {
		Model        string   `json:"model"`
		Namespace    string   `json:"namespace"`
		Role         string   `json:"role"`
		Aliases      []string `json:"aliases"`
		Adapters     []string `json:"adapters"`
		BlockSizes   []uint32 `json:"block_sizes"`
		ImageTokenID *uint32  `json:"image_token_id"`
		ExactMM      bool     `json:"exact_mm"`
		Members      int      `json:"members"`
		Rejected     []struct {
			Worker string `json:"worker"`
		} `json:"rejected"`
		Blocks      int64 `json:"blocks"`
		Memberships int64 `json:"memberships"`
		Bytes       int64 `json:"bytes"`
	} `json:"models"`
}

func newModels() *cobra.Command {
	var o askOptions
	cmd := &cobra.Command{
		Use:   "models",
		Short: "List a running daemon's worker sets",
		Long: `models lists the worker sets: the workers of one model, namespace and role. BLOCKS
are distinct blocks, HELD the blocks of all streams together.`,
		Example: "  kvindexd models\n  kvindexd models --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.ask(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				raw, err := c.Models(ctx)
				if err != nil {
					return err
				}
				return printListed(cmd.OutOrStdout(), raw, o.asJSON, printModels)
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func printModels(out io.Writer, l *modelList) {
	if len(l.Models) == 0 {
		fmt.Fprintln(out, "no models")
		return
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "MODEL\tNAMESPACE\tROLE\tSTREAMS\tREJECTED\tBLOCK SIZES\tIMAGE TOKEN\tIMAGES\tBLOCKS\tHELD\tBYTES\tADAPTERS\tALIASES")
	for i := range l.Models {
		m := &l.Models[i]
		sizes := make([]string, len(m.BlockSizes))
		for i, s := range m.BlockSizes {
			sizes[i] = strconv.Itoa(int(s))
		}
		images := "text only"
		if m.ExactMM {
			images = "exact"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%d\t%d\t%d\t%s\t%s\n", m.Model, m.Namespace, m.Role, m.Members, len(m.Rejected),
			joined(sizes), optional(m.ImageTokenID), images, m.Blocks, m.Memberships, m.Bytes, joined(m.Adapters), joined(m.Aliases))
	}
	t.Flush()
}

func joined(s []string) string {
	if len(s) == 0 {
		return "-"
	}
	return strings.Join(s, ",")
}
