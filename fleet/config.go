package fleet

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Config is what one configuration file states. JSON is read as YAML.
type Config struct {
	Models  []ModelSpec
	Workers []WorkerSpec
	DNS     []DNSSpec
}

// EndpointDefaults fill in what an llm-d endpoints file does not tell.
type EndpointDefaults struct {
	Model                         string
	EventPortBase, ReplayPortBase int
}

// maxConfig bounds a configuration file.
const maxConfig = 16 << 20

// fileEntry is one entry of a file: exactly one of the specs, or an error.
type fileEntry struct {
	line   int
	id     string // the worker's id or the model's name, as far as it can be read
	model  *ModelSpec
	worker *WorkerSpec
	dns    *DNSSpec
	err    error
}

// ParseConfig reads a configuration file or an llm-d endpoints file. The error
// joins one error per bad entry, each beginning with path:line; the Config has
// the good ones. A file that is no YAML at all has no good ones.
func ParseConfig(path string, raw []byte, d EndpointDefaults) (Config, error) {
	entries, err := parseFile(path, raw, d)
	if err != nil {
		return Config{}, err
	}
	var c Config
	var errs []error
	for _, e := range entries {
		switch {
		case e.err != nil:
			errs = append(errs, e.err)
		case e.model != nil:
			c.Models = append(c.Models, *e.model)
		case e.worker != nil:
			c.Workers = append(c.Workers, *e.worker)
		case e.dns != nil:
			c.DNS = append(c.DNS, *e.dns)
		}
	}
	return c, errors.Join(errs...)
}

// parseFile reads every entry by itself. It fails only where the file as a
// whole cannot be read.
func parseFile(path string, raw []byte, d EndpointDefaults) ([]fileEntry, error) {
	if len(raw) > maxConfig {
		return nil, fmt.Errorf("%w: %s: more than %d bytes", ErrInvalid, path, maxConfig)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(raw, &doc); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, path, err)
	}
	if doc.Kind == 0 || len(doc.Content) == 0 || doc.Content[0].Tag == "!!null" {
		return nil, nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%w: %s:%d: expected a mapping with models, workers, dns or endpoints", ErrInvalid, path, root.Line)
	}
	p := fileParser{path: path, defaults: d, seen: map[string]int{}}
	for i := 0; i+1 < len(root.Content); i += 2 {
		p.section(root.Content[i], root.Content[i+1])
	}
	return p.out, nil
}

type fileParser struct {
	path     string
	defaults EndpointDefaults
	seen     map[string]int // line of each id
	out      []fileEntry
}

func (p *fileParser) errorf(line int, format string, args ...any) error {
	return fmt.Errorf("%w: %s:%d: %w", ErrInvalid, p.path, line, fmt.Errorf(format, args...))
}

// section reads one list of the file.
func (p *fileParser) section(key, list *yaml.Node) {
	read := map[string]func(*yaml.Node) fileEntry{
		"models": p.modelEntry, "workers": p.workerEntry, "dns": p.dnsEntry, "endpoints": p.endpointEntry,
	}[key.Value]
	switch {
	case read == nil:
		p.out = append(p.out, fileEntry{line: key.Line, err: p.errorf(key.Line, "unknown key %q, expected models, workers, dns or endpoints", key.Value)})
		return
	case list.Tag == "!!null":
		return
	case list.Kind != yaml.SequenceNode:
		p.out = append(p.out, fileEntry{line: list.Line, err: p.errorf(list.Line, "%s: expected a list", key.Value)})
		return
	}
	for _, n := range list.Content {
		e := read(n)
		e.line = n.Line
		p.unique(key.Value, &e)
		p.out = append(p.out, e)
	}
}

// unique refuses the second entry of one name.
func (p *fileParser) unique(section string, e *fileEntry) {
	if e.err != nil || e.id == "" {
		return
	}
	name := section + "\x00" + e.id
	if e.worker != nil {
		name = fmt.Sprintf("workers\x00%s\x00%v", e.id, e.worker.Key())
	}
	if line, ok := p.seen[name]; ok {
		e.err = p.errorf(e.line, "%q stands already at line %d", e.id, line)
		return
	}
	p.seen[name] = e.line
}

func (p *fileParser) modelEntry(n *yaml.Node) fileEntry {
	m := new(ModelSpec)
	e := fileEntry{model: m, id: scalar(n, "name")}
	e.err = p.entry(n, m, m.Validate)
	return e
}

func (p *fileParser) workerEntry(n *yaml.Node) fileEntry {
	w := new(WorkerSpec)
	e := fileEntry{worker: w, id: scalar(n, "id")}
	e.err = p.entry(n, w, w.Validate)
	return e
}

func (p *fileParser) dnsEntry(n *yaml.Node) fileEntry {
	d := new(DNSSpec)
	e := fileEntry{dns: d, id: scalar(n, "dns")}
	e.err = p.entry(n, d, d.Validate)
	return e
}

// entry decodes n into v strictly and validates it.
func (p *fileParser) entry(n *yaml.Node, v any, validate func() error) error {
	if err := p.strict(n, reflect.TypeOf(v).Elem(), ""); err != nil {
		return err
	}
	if err := n.Decode(v); err != nil {
		return fmt.Errorf("%w: %s:%d: %w", ErrInvalid, p.path, n.Line, err)
	}
	if err := validate(); err != nil {
		return fmt.Errorf("%s:%d: %w", p.path, n.Line, err)
	}
	return nil
}

// strict refuses keys that t has no field for, and keys that stand twice.
func (p *fileParser) strict(n *yaml.Node, t reflect.Type, field string) error {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t.Kind() == reflect.Slice && n.Kind == yaml.SequenceNode:
		for _, c := range n.Content {
			if err := p.strict(c, t.Elem(), field); err != nil {
				return err
			}
		}
	case t.Kind() == reflect.Struct && n.Kind == yaml.MappingNode:
		return p.strictStruct(n, t, field)
	case n.Tag == "!!null":
	case t.Kind() == reflect.Slice:
		return p.errorf(n.Line, "%sexpected a list", dotted(field, ": "))
	case t.Kind() == reflect.Struct:
		return p.errorf(n.Line, "%sexpected a mapping", dotted(field, ": "))
	case n.Decode(reflect.New(t).Interface()) != nil:
		return p.errorf(n.Line, "%sexpected %s, got %.40q", dotted(field, ": "), t.Kind(), n.Value)
	}
	return nil
}

func (p *fileParser) strictStruct(n *yaml.Node, t reflect.Type, field string) error {
	known := map[string]reflect.Type{}
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
		known[name] = t.Field(i).Type
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i]
		ft, ok := known[k.Value]
		switch {
		case k.Value == "<<":
			continue
		case !ok:
			return p.errorf(k.Line, "%sunknown key %q, expected one of %s", dotted(field, ": "), k.Value, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		case seen[k.Value]:
			return p.errorf(k.Line, "%skey %q stands twice", dotted(field, ": "), k.Value)
		}
		seen[k.Value] = true
		if err := p.strict(n.Content[i+1], ft, dotted(field, ".")+k.Value); err != nil {
			return err
		}
	}
	return nil
}

func dotted(field, sep string) string {
	if field == "" {
		return ""
	}
	return field + sep
}

// scalar is the value of one key of a mapping, for naming an entry that may be
// bad otherwise.
func scalar(n *yaml.Node, key string) string {
	if n.Kind != yaml.MappingNode {
		return ""
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key && n.Content[i+1].Kind == yaml.ScalarNode {
			return n.Content[i+1].Value
		}
	}
	return ""
}

// routerEndpoint is one entry of an llm-d router's endpoints file. Keys that
// are not of our concern are the router's.
type routerEndpoint struct {
	Name      string            `yaml:"name"`
	Namespace string            `yaml:"namespace"`
	Address   string            `yaml:"address"`
	Port      any               `yaml:"port"`
	Labels    map[string]string `yaml:"labels"`
	RankIndex int               `yaml:"rankIndex"`
}

// The labels that name what the file has no field for, first match wins.
var (
	modelLabels = []string{"llm-d.ai/model", "kvindexd/model", "model"}
	roleLabels  = []string{"llm-d.ai/role", "kvindexd/role", "role"}
)

// endpointEntry makes a worker of a router's endpoint: its event port is the
// base + rankIndex, so that replicas on one host have sources of their own.
func (p *fileParser) endpointEntry(n *yaml.Node) fileEntry {
	var r routerEndpoint
	e := fileEntry{id: scalar(n, "name")}
	if err := n.Decode(&r); err != nil {
		e.err = fmt.Errorf("%w: %s:%d: %w", ErrInvalid, p.path, n.Line, err)
		return e
	}
	w := &WorkerSpec{
		ID: r.Name, Namespace: r.Namespace, Model: label(r.Labels, modelLabels, p.defaults.Model),
		Role: routerRole(label(r.Labels, roleLabels, "")), RankIndex: &r.RankIndex,
	}
	e.worker = w
	if r.Address == "" {
		e.err = p.errorf(n.Line, "endpoint %q: address: missing", r.Name)
		return e
	}
	w.Endpoint = "tcp://" + net.JoinHostPort(r.Address, strconv.Itoa(p.defaults.EventPortBase))
	if p.defaults.ReplayPortBase != 0 {
		w.ReplayEndpoint = "tcp://" + net.JoinHostPort(r.Address, strconv.Itoa(p.defaults.ReplayPortBase))
	}
	if err := w.Validate(); err != nil {
		e.err = fmt.Errorf("%s:%d: %w", p.path, n.Line, err)
	}
	return e
}

func label(labels map[string]string, names []string, otherwise string) string {
	for _, n := range names {
		if v := labels[n]; v != "" {
			return v
		}
	}
	return otherwise
}

// routerRole is a role label as we spell it: a router's "both" is a worker that
// does everything.
func routerRole(s string) string {
	switch s {
	case "both", "prefill-decode", "encode-prefill-decode":
		return string(Aggregated)
	}
	return s
}
