package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/kvindexd/kvindexd/fleet"
)

// An entry of the fleet on the command line is the file's entry in one line:
// key=value pairs with commas between them. It is read by the file's own
// parser, so that keys, types and checks are the same.

// parseWorkers reads the values of --worker.
func parseWorkers(values []string) ([]fleet.WorkerSpec, error) {
	c, err := parseEntries("worker", "workers", values)
	return c.Workers, err
}

// parseModels reads the values of --model.
func parseModels(values []string) ([]fleet.ModelSpec, error) {
	c, err := parseEntries("model", "models", values)
	return c.Models, err
}

// parseDNS reads the values of --dns; what is not of the name itself is the
// template's.
func parseDNS(values []string) ([]fleet.DNSSpec, error) {
	c, err := parseEntries("dns", "dns", values)
	return c.DNS, err
}

func parseEntries(flag, section string, values []string) (fleet.Config, error) {
	var all fleet.Config
	for _, v := range values {
		entry, err := entryNode(section, v)
		if err != nil {
			return all, usagef("--%s %q: %w", flag, v, err)
		}
		list := &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{entry}}
		raw, err := yaml.Marshal(&yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{scalarNode(section), list}})
		if err != nil {
			return all, usagef("--%s %q: %w", flag, v, err)
		}
		c, err := fleet.ParseConfig("--"+flag, raw, fleet.EndpointDefaults{})
		if err != nil {
			return all, usagef("--%s %q: %s", flag, v, withoutLine(err))
		}
		all.Models = append(all.Models, c.Models...)
		all.Workers = append(all.Workers, c.Workers...)
		all.DNS = append(all.DNS, c.DNS...)
	}
	return all, nil
}

// entryPlace is where the parser saw an entry: a flag has no lines.
var entryPlace = regexp.MustCompile(`--(worker|model|dns):\d+: `)

func withoutLine(err error) string {
	return strings.TrimPrefix(entryPlace.ReplaceAllString(err.Error(), ""), fleet.ErrInvalid.Error()+": ")
}

// lists are the keys whose value is several, separated by "|".
var lists = []string{"aliases", "loras"}

// dnsKeys are those of a headless service itself.
var dnsKeys = []string{"dns", "port", "replay_port"}

func entryNode(section, text string) (*yaml.Node, error) {
	entry := &yaml.Node{Kind: yaml.MappingNode}
	template := &yaml.Node{Kind: yaml.MappingNode}
	for pair := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("%q: expected key=value pairs with commas between them", pair)
		}
		into := entry
		if section == "dns" && !slices.Contains(dnsKeys, key) {
			into = template
		}
		into.Content = append(into.Content, scalarNode(key), valueNode(key, value))
	}
	if len(template.Content) > 0 {
		entry.Content = append(entry.Content, scalarNode("worker"), template)
	}
	return entry, nil
}

func valueNode(key, value string) *yaml.Node {
	if !slices.Contains(lists, key) {
		return scalarNode(value)
	}
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for item := range strings.SplitSeq(value, "|") {
		n := scalarNode(item)
		if key == "loras" {
			n = &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{scalarNode("name"), n}}
		}
		list.Content = append(list.Content, n)
	}
	return list
}

func scalarNode(value string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Value: value} }
