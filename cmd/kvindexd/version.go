package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the linker for a release; a build from a checkout tells its
// commit instead.
var version = ""

// versionText is one line for people, the API and the metrics.
func versionText() string {
	info, ok := debug.ReadBuildInfo()
	if version != "" || !ok {
		return version
	}
	rev, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			rev = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-modified"
		}
	}
	switch {
	case rev != "":
		return rev + dirty
	case info.Main.Version != "":
		return info.Main.Version
	}
	return "(devel)"
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version and the Go release it was built with",
		Example: "  kvindexd version",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintf(cmd.OutOrStdout(), "kvindexd %s %s %s/%s\n", versionText(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return nil
		},
	}
}
