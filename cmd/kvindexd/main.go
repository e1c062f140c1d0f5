package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// The exit codes. They are part of the command line's contract: the help of the
// root command tells them.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// usageError is a command line that cannot be run as it is.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return usageError{fmt.Errorf(format, args...)}
}

// errTold ends a command with exit code 1 after it has printed everything that
// there is to say.
var errTold = errors.New("failed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process: tests call it.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errTold):
		return exitFailed
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "kvindexd: %v\nTry: %s --help\n", err, cmd.CommandPath())
		return exitUsage
	}
	fmt.Fprintf(stderr, "kvindexd: %v\n", err)
	return exitFailed
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvindexd",
		Short: "Which vLLM worker holds how much of this prompt?",
		Long: `kvindexd follows the KV-cache events that vLLM workers publish over ZeroMQ and
answers, over HTTP, which worker holds how much of a prompt: text, images,
adapters, salts. An answer may be too short, never too long.

Every flag can also be given by the environment, as KVINDEXD_ and the flag's
name in capitals with _ for -: --log-level is KVINDEXD_LOG_LEVEL. A flag that
may be repeated takes its values separated by semicolons or newlines there. The
command line wins over the environment, the environment over a file.

Exit codes: 0 it went well; 1 it failed, or a check found differences; 2 the
command line cannot be run as it is.`,
		Example: `  kvindexd demo
  kvindexd serve --worker id=vllm-0,model=Qwen/Qwen3-8B,endpoint=tcp://10.0.0.5:5557
  kvindexd match --tokens 1,2,3`,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return fromEnvironment(cmd.Flags())
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return cmd.Help()
		},
		Args: cobra.ArbitraryArgs,
	}
	addLogFlags(root.PersistentFlags())
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(
		newServe(), newDemo(),
		newMatch(), newExplain(), newWorkers(), newModels(),
		newRecord(), newReplay(), newPublish(), newSnapshot(),
		newVersion(),
	)
	wrapArgs(root)
	return root
}

// wrapArgs makes a wrong number of arguments a usage error in every command.
func wrapArgs(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if check := c.Args; check != nil {
			c.Args = func(cmd *cobra.Command, args []string) error {
				if err := check(cmd, args); err != nil {
					return usageError{err}
				}
				return nil
			}
		}
		wrapArgs(c)
	}
}

// envName is the variable that stands for a flag.
func envName(flag string) string {
	return "KVINDEXD_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fromEnvironment sets the flags that the command line does not and the
// environment does.
func fromEnvironment(flags *pflag.FlagSet) error {
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		value, ok := os.LookupEnv(envName(f.Name))
		if !ok || f.Changed || f.Name == "help" {
			return
		}
		if err := setFlag(flags, f, splitList(f, value)); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", envName(f.Name), err))
		}
	})
	if err := errors.Join(errs...); err != nil {
		return usageError{err}
	}
	return nil
}

// splitList separates the values of a flag that may be repeated.
func splitList(f *pflag.Flag, value string) []string {
	if _, list := f.Value.(pflag.SliceValue); !list {
		return []string{value}
	}
	return strings.FieldsFunc(value, func(r rune) bool { return r == ';' || r == '\n' })
}

func setFlag(flags *pflag.FlagSet, f *pflag.Flag, values []string) error {
	for _, v := range values {
		if err := flags.Set(f.Name, strings.TrimSpace(v)); err != nil {
			return err
		}
	}
	return nil
}
