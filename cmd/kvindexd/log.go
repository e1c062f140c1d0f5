package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func addLogFlags(f *pflag.FlagSet) {
	f.String("log-format", "text", "format of the log on stderr: text or json")
	f.String("log-level", "info", "least level that is logged: debug, info, warn or error")
}

// loggerOf makes the logger that the flags ask for. What runs for a person and
// not as a daemon logs from quiet on: pass slog.LevelInfo to follow the flag.
func loggerOf(cmd *cobra.Command, quiet slog.Level) (*slog.Logger, error) {
	format, _ := cmd.Flags().GetString("log-format")
	name, _ := cmd.Flags().GetString("log-level")
	var level slog.Level
	if err := level.UnmarshalText([]byte(name)); err != nil {
		return nil, usagef("--log-level %q: expected debug, info, warn or error", name)
	}
	if !cmd.Flags().Changed("log-level") {
		level = max(level, quiet)
	}
	o := &slog.HandlerOptions{Level: level}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(cmd.ErrOrStderr(), o)), nil
	}
	return nil, usagef("--log-format %q: expected text or json", format)
}

// isTerminal says whether a person may be at the other end of stream.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// warnf tells a person something on stderr.
func warnf(cmd *cobra.Command, format string, args ...any) {
	fmt.Fprintf(cmd.ErrOrStderr(), "kvindexd: "+format+"\n", args...)
}
