package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// fromFile sets the flags that neither the command line nor the environment
// does and the file does: a mapping (YAML or JSON) of the flags' names, with -
// or _, to a value or a list of values.
func fromFile(flags *pflag.FlagSet, name string) error {
	raw, err := os.ReadFile(name)
	if err != nil {
		return usageError{err}
	}
	var root yaml.Node
	if err := yaml.Unmarshal(raw, &root); err != nil {
		return usagef("%s: %w", name, err)
	}
	if root.Kind == 0 {
		return nil // empty
	}
	top := root.Content[0]
	if top.Kind != yaml.MappingNode {
		return usagef("%s:%d: expected a mapping of flags to values", name, top.Line)
	}
	var errs []error
	for i := 0; i+1 < len(top.Content); i += 2 {
		if err := settingOf(flags, top.Content[i], top.Content[i+1]); err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %s: %w", name, top.Content[i].Line, top.Content[i].Value, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return usageError{err}
	}
	return nil
}

func settingOf(flags *pflag.FlagSet, key, value *yaml.Node) error {
	f := flags.Lookup(strings.ReplaceAll(key.Value, "_", "-"))
	switch {
	case f == nil || f.Name == "help" || f.Name == "settings":
		return errors.New("no flag of this command has that name")
	case f.Changed:
		return nil
	}
	var values []string
	switch value.Kind {
	case yaml.ScalarNode:
		values = []string{value.Value}
	case yaml.SequenceNode:
		if err := value.Decode(&values); err != nil {
			return err
		}
	default:
		return errors.New("expected a value or a list of values")
	}
	if _, list := f.Value.(pflag.SliceValue); !list && len(values) != 1 {
		return errors.New("expected one value")
	}
	return setFlag(flags, f, values)
}
