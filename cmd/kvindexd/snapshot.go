package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/store"
)

func newSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Look into, check, export and import a snapshot directory offline",
		Long: `snapshot works on the directory that a daemon keeps its snapshots in, while no
daemon has it open. Nothing but import changes it.`,
		Example: `  kvindexd snapshot inspect /var/lib/kvindexd/snapshots
  kvindexd snapshot export /var/lib/kvindexd/snapshots -o picture.kvsnap`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newSnapshotReport("inspect", "Tell what a directory holds, from its manifest", store.Inspect),
		newSnapshotReport("verify", "Check every chunk; damage is exit code 1", store.Verify),
		newSnapshotExport(), newSnapshotImport(),
	)
	return cmd
}

func newSnapshotReport(name, short string, read func(string) (store.Report, error)) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: name + " DIR", Short: short, Args: cobra.ExactArgs(1),
		Example: "  kvindexd snapshot " + name + " /var/lib/kvindexd/snapshots",
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := read(args[0])
			if err != nil {
				return snapshotError(args[0], err)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), r)
			}
			printReport(cmd.OutOrStdout(), &r)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}

// snapshotError adds what to do about it.
func snapshotError(dir string, err error) error {
	switch {
	case errors.Is(err, store.ErrLocked):
		return fmt.Errorf("%s: a daemon has it open; stop that first: %w", dir, err)
	case errors.Is(err, store.ErrDamaged):
		return fmt.Errorf("%s: a daemon would set it aside and start cold: %w", dir, err)
	}
	return fmt.Errorf("%s: %w", dir, err)
}

func printReport(out io.Writer, r *store.Report) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	defer t.Flush()
	line := func(name, format string, args ...any) { fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	if r.Empty {
		line("generation", "none")
	} else {
		line("generation", "%d", r.Info.Generation)
		line("content", "%s, version %d", r.Info.Content, r.Info.ContentVersion)
		line("written by", "%s", r.Info.Producer)
		line("created", "%s", r.Info.Created.UTC().Format(time.RFC3339))
		line("chunks", "%d", r.Info.Chunks)
		line("size", "%d bytes, %d as stored", r.Info.RawBytes, r.Info.StoredBytes)
	}
	line("on disk", "%d bytes", r.DiskBytes)
	line("closed cleanly", "%t", r.Clean)
	if len(r.Leftovers) > 0 {
		line("leftovers", "generations %v, reclaimed at the next start", r.Leftovers)
	}
	if r.KilledStarts > 0 {
		line("killed starts", "%d in a row", r.KilledStarts)
	}
	if r.SetAside != "" {
		line("set aside", "%s", r.SetAside)
	}
}

func newSnapshotExport() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use: "export DIR", Short: "Write the standing generation into one file, verified first", Args: cobra.ExactArgs(1),
		Example: "  kvindexd snapshot export /var/lib/kvindexd/snapshots -o picture.kvsnap",
		RunE: func(cmd *cobra.Command, args []string) error {
			if out == "" {
				return usagef("--out FILE is needed, - for stdout")
			}
			return exportSnapshot(cmd, args[0], out)
		},
	}
	cmd.Flags().StringVarP(&out, "out", "o", "", "file to write, - for stdout")
	return cmd
}

func exportSnapshot(cmd *cobra.Command, dir, name string) (err error) {
	out := cmd.OutOrStdout()
	if name != "-" {
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err != nil {
			return err
		}
		defer func() {
			if cerr := f.Close(); err == nil {
				err = cerr
			}
			if err != nil {
				os.Remove(name)
			}
		}()
		out = f
	}
	info, err := store.Export(dir, out)
	if err != nil {
		return snapshotError(dir, err)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "generation %d of %s: %d chunks, %d bytes\n", info.Generation, dir, info.Chunks, info.StoredBytes)
	return nil
}

func newSnapshotImport() *cobra.Command {
	return &cobra.Command{
		Use: "import DIR FILE", Short: "Make an exported generation the standing one of a directory", Args: cobra.ExactArgs(2),
		Example: "  kvindexd snapshot import /var/lib/kvindexd/snapshots picture.kvsnap",
		RunE: func(cmd *cobra.Command, args []string) error {
			in := cmd.InOrStdin()
			if args[1] != "-" {
				f, err := os.Open(args[1])
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			info, err := store.Import(args[0], in)
			if err != nil {
				return snapshotError(args[0], err)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "generation %d of %s: %d chunks, %d bytes\n", info.Generation, args[0], info.Chunks, info.StoredBytes)
			return nil
		},
	}
}
