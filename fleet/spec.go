package fleet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// LoraSpec is an adapter: its own name, as the engine calls it, and others.
type LoraSpec struct {
	Name    string   `json:"name" yaml:"name"`
	Aliases []string `json:"aliases,omitempty" yaml:"aliases,omitempty"`
}

// ModelSpec are the settings that all workers of a model share unless they say
// otherwise themselves.
type ModelSpec struct {
	Name    string   `json:"name" yaml:"name"`
	Aliases []string `json:"aliases,omitempty" yaml:"aliases,omitempty"`
	// ImageTokenID and VideoTokenID are the placeholder tokens; absent, they
	// are read from ModelDir's config.json.
	ImageTokenID *uint32 `json:"image_token_id,omitempty" yaml:"image_token_id,omitempty"`
	VideoTokenID *uint32 `json:"video_token_id,omitempty" yaml:"video_token_id,omitempty"`
	ModelDir     string  `json:"model_dir,omitempty" yaml:"model_dir,omitempty"`
	// TowerConnectorLora: vLLM scopes an image's identifier by the adapter.
	TowerConnectorLora *bool `json:"tower_connector_lora,omitempty" yaml:"tower_connector_lora,omitempty"`
	// BlockSize in tokens; absent, it is learned from the events. Given, the
	// events are checked against it.
	BlockSize uint32     `json:"block_size,omitempty" yaml:"block_size,omitempty"`
	Loras     []LoraSpec `json:"loras,omitempty" yaml:"loras,omitempty"`
}

// RankSpec is the publisher of one data-parallel rank at an endpoint of its
// own.
type RankSpec struct {
	Rank           int    `json:"rank" yaml:"rank"`
	Endpoint       string `json:"endpoint" yaml:"endpoint"`
	ReplayEndpoint string `json:"replay_endpoint,omitempty" yaml:"replay_endpoint,omitempty"`
}

// WorkerSpec is one worker as a source states it. The fields that a ModelSpec
// has too override the model's.
type WorkerSpec struct {
	ID        string `json:"id" yaml:"id"`
	Model     string `json:"model" yaml:"model"`
	Namespace string `json:"namespace,omitempty" yaml:"namespace,omitempty"`
	Role      string `json:"role,omitempty" yaml:"role,omitempty"`

	// Endpoint of rank 0's publisher, tcp://host:port or ipc://path; rank r
	// publishes on port + r. ReplayEndpoint counts the same way; empty: there
	// is none and gaps stay.
	Endpoint       string `json:"endpoint,omitempty" yaml:"endpoint,omitempty"`
	ReplayEndpoint string `json:"replay_endpoint,omitempty" yaml:"replay_endpoint,omitempty"`
	// Topic that a message must have, exactly; empty: any.
	Topic string `json:"topic,omitempty" yaml:"topic,omitempty"`
	// DPSize is the number of ranks, 0 meaning 1.
	DPSize int `json:"dp_size,omitempty" yaml:"dp_size,omitempty"`
	// RankIndex is the position on a shared host of a worker of one rank:
	// port + RankIndex. It excludes DPSize.
	RankIndex *int `json:"rank_index,omitempty" yaml:"rank_index,omitempty"`
	// Ranks gives each rank its own endpoint instead of counting ports. It
	// excludes Endpoint, DPSize and RankIndex.
	Ranks []RankSpec `json:"ranks,omitempty" yaml:"ranks,omitempty"`
	// Bind: the publisher connects to us. An endpoint with "*" always binds.
	Bind bool `json:"bind,omitempty" yaml:"bind,omitempty"`

	// ExactMM is what the worker claims. It is believed only with a resolved
	// image token id.
	ExactMM bool `json:"exact_mm,omitempty" yaml:"exact_mm,omitempty"`
	// ExtraKeys is how its events name images: native, bare_mm (vLLM before
	// 0.19) or none (older).
	ExtraKeys string `json:"extra_keys,omitempty" yaml:"extra_keys,omitempty"`
	// EagleDrop: drafting without lookahead hashes.
	EagleDrop bool `json:"eagle_drop,omitempty" yaml:"eagle_drop,omitempty"`
	// OnGap is what becomes of the entries when a gap stays: keep or clear.
	OnGap string `json:"on_gap,omitempty" yaml:"on_gap,omitempty"`

	ImageTokenID       *uint32    `json:"image_token_id,omitempty" yaml:"image_token_id,omitempty"`
	VideoTokenID       *uint32    `json:"video_token_id,omitempty" yaml:"video_token_id,omitempty"`
	ModelDir           string     `json:"model_dir,omitempty" yaml:"model_dir,omitempty"`
	TowerConnectorLora *bool      `json:"tower_connector_lora,omitempty" yaml:"tower_connector_lora,omitempty"`
	BlockSize          uint32     `json:"block_size,omitempty" yaml:"block_size,omitempty"`
	Loras              []LoraSpec `json:"loras,omitempty" yaml:"loras,omitempty"`
}

// DNSSpec is a headless service: each of the name's addresses is a worker.
type DNSSpec struct {
	// Name is looked up again and again; worker ids are Name-address.
	Name string `json:"dns" yaml:"dns"`
	// Port of rank 0's publisher, ReplayPort of its replay socket or 0.
	Port       int `json:"port" yaml:"port"`
	ReplayPort int `json:"replay_port,omitempty" yaml:"replay_port,omitempty"`
	// Worker is the template: everything but id and endpoints.
	Worker WorkerSpec `json:"worker" yaml:"worker"`
}

// The values of WorkerSpec.OnGap.
const (
	OnGapKeep  = "keep"
	OnGapClear = "clear"
)

// bounds on what one entry may ask of the process.
const (
	maxName  = 512
	maxRanks = 1024
)

// withDefaults fills in what an absent field means, so that specs that mean the
// same compare equal.
func (s WorkerSpec) withDefaults() WorkerSpec {
	if s.Namespace == "" {
		s.Namespace = DefaultNamespace
	}
	if s.Role == "" {
		s.Role = string(Aggregated)
	}
	if s.DPSize == 0 && len(s.Ranks) == 0 {
		s.DPSize = 1
	}
	if s.ExtraKeys == "" {
		s.ExtraKeys = "native"
	}
	if s.OnGap == "" {
		s.OnGap = OnGapKeep
	}
	return s
}

// Key names the worker set that the worker belongs to.
func (s *WorkerSpec) Key() SetKey {
	d := s.withDefaults()
	return SetKey{Namespace: d.Namespace, Model: d.Model, Role: d.Role}
}

// Validate checks everything that can be known without the network. Its errors
// wrap ErrInvalid and name the field.
func (s *WorkerSpec) Validate() error {
	d := s.withDefaults()
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: worker %q: %s: %s", ErrInvalid, s.ID, field, fmt.Sprintf(format, args...)))
	}
	checkName(bad, "id", d.ID)
	checkName(bad, "model", d.Model)
	checkName(bad, "namespace", d.Namespace)
	switch Role(d.Role) {
	case Aggregated, Prefill, Decode, Encode:
	default:
		bad("role", "%q is none of aggregated, prefill, decode, encode", d.Role)
	}
	if d.OnGap != OnGapKeep && d.OnGap != OnGapClear {
		bad("on_gap", "%q is neither keep nor clear", d.OnGap)
	}
	if _, err := normalize.ParseExtraKeysMode(d.ExtraKeys); err != nil {
		bad("extra_keys", "%v", err)
	}
	if d.ImageTokenID != nil && d.VideoTokenID != nil && *d.ImageTokenID == *d.VideoTokenID {
		bad("video_token_id", "%d is the image token id too", *d.VideoTokenID)
	}
	checkLoras(bad, d.Loras)
	if _, err := d.ranks(); err != nil {
		errs = append(errs, fmt.Errorf("%w: worker %q: %w", ErrInvalid, s.ID, err))
	}
	return errors.Join(errs...)
}

// Validate checks a model's settings. Its errors wrap ErrInvalid.
func (m *ModelSpec) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: model %q: %s: %s", ErrInvalid, m.Name, field, fmt.Sprintf(format, args...)))
	}
	checkName(bad, "name", m.Name)
	if m.ImageTokenID != nil && m.VideoTokenID != nil && *m.ImageTokenID == *m.VideoTokenID {
		bad("video_token_id", "%d is the image token id too", *m.VideoTokenID)
	}
	for _, a := range m.Aliases {
		checkName(bad, "aliases", a)
	}
	checkLoras(bad, m.Loras)
	return errors.Join(errs...)
}

// Validate checks a headless service's settings. Its errors wrap ErrInvalid.
func (d *DNSSpec) Validate() error {
	if d.Name == "" || strings.ContainsAny(d.Name, " /:@") {
		return fmt.Errorf("%w: dns: %q is not a host name", ErrInvalid, d.Name)
	}
	if d.Worker.Endpoint != "" || d.Worker.ReplayEndpoint != "" || len(d.Worker.Ranks) > 0 || d.Worker.ID != "" {
		return fmt.Errorf("%w: dns %q: worker: id and endpoints follow from the addresses", ErrInvalid, d.Name)
	}
	s := d.at(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	return s.Validate()
}

// at is the worker behind one of the name's addresses.
func (d *DNSSpec) at(a netip.Addr) WorkerSpec {
	s := d.Worker
	s.ID = d.Name + "-" + a.String()
	s.Endpoint = "tcp://" + net.JoinHostPort(a.String(), strconv.Itoa(d.Port))
	if d.ReplayPort != 0 {
		s.ReplayEndpoint = "tcp://" + net.JoinHostPort(a.String(), strconv.Itoa(d.ReplayPort))
	}
	return s
}

func checkName(bad func(string, string, ...any), field, name string) {
	switch {
	case name == "":
		bad(field, "missing")
	case len(name) > maxName:
		bad(field, "%d bytes, expected at most %d", len(name), maxName)
	case strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }):
		bad(field, "%q has control characters", name)
	}
}

func checkLoras(bad func(string, string, ...any), loras []LoraSpec) {
	for _, l := range loras {
		checkName(bad, "loras.name", l.Name)
		for _, a := range l.Aliases {
			checkName(bad, "loras.aliases", a)
		}
	}
}

// rankEndpoint is one publisher that a spec subscribes to.
type rankEndpoint struct {
	rank             int
	endpoint, replay string
	bind             bool
}

// ranks lists the spec's publishers in order of rank.
func (s *WorkerSpec) ranks() ([]rankEndpoint, error) {
	if len(s.Ranks) > 0 {
		return s.ownRanks()
	}
	if s.Endpoint == "" {
		return nil, errors.New("endpoint: missing")
	}
	if s.DPSize < 0 || s.DPSize > maxRanks {
		return nil, fmt.Errorf("dp_size: %d is not within 1..%d", s.DPSize, maxRanks)
	}
	if s.RankIndex == nil {
		return s.countedRanks(0, max(s.DPSize, 1))
	}
	if s.DPSize > 1 {
		return nil, fmt.Errorf("rank_index: %d with dp_size %d: a worker at a position has one rank", *s.RankIndex, s.DPSize)
	}
	if *s.RankIndex < 0 {
		return nil, fmt.Errorf("rank_index: %d is negative", *s.RankIndex)
	}
	r, err := s.countedRanks(*s.RankIndex, 1)
	if err == nil {
		r[0].rank = 0
	}
	return r, err
}

// countedRanks are n publishers on port + first and up.
func (s *WorkerSpec) countedRanks(first, n int) ([]rankEndpoint, error) {
	if err := s.checkPorts(first + n); err != nil {
		return nil, err
	}
	out := make([]rankEndpoint, 0, n)
	for r := first; r < first+n; r++ {
		e, err := s.rankAt(r, s.Endpoint, s.ReplayEndpoint, r)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

func (s *WorkerSpec) ownRanks() ([]rankEndpoint, error) {
	if s.Endpoint != "" || s.DPSize > 0 || s.RankIndex != nil {
		return nil, errors.New("ranks: given together with endpoint, dp_size or rank_index")
	}
	if len(s.Ranks) > maxRanks {
		return nil, fmt.Errorf("ranks: %d, expected at most %d", len(s.Ranks), maxRanks)
	}
	var out []rankEndpoint
	for _, r := range s.Ranks {
		if r.Rank < 0 || r.Rank > 1<<20 {
			return nil, fmt.Errorf("ranks: rank %d is not within 0..%d", r.Rank, 1<<20)
		}
		if slices.ContainsFunc(out, func(o rankEndpoint) bool { return o.rank == r.Rank }) {
			return nil, fmt.Errorf("ranks: rank %d stands twice", r.Rank)
		}
		e, err := s.rankAt(r.Rank, r.Endpoint, r.ReplayEndpoint, 0)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b rankEndpoint) int { return a.rank - b.rank })
	return out, nil
}

// rankAt places one rank offset ports above the endpoints.
func (s *WorkerSpec) rankAt(rank int, endpoint, replay string, offset int) (rankEndpoint, error) {
	e := rankEndpoint{rank: rank}
	var err error
	if e.endpoint, err = zmqwire.OffsetEndpoint(endpoint, offset); err != nil {
		return e, fmt.Errorf("endpoint: %w", err)
	}
	parsed, err := zmqwire.ParseEndpoint(e.endpoint)
	if err != nil {
		return e, fmt.Errorf("endpoint: %w", err)
	}
	e.bind = s.Bind || parsed.Wildcard
	if replay == "" {
		return e, nil
	}
	if e.replay, err = zmqwire.OffsetEndpoint(replay, offset); err != nil {
		return e, fmt.Errorf("replay_endpoint: %w", err)
	}
	if parsed, err = zmqwire.ParseEndpoint(e.replay); err != nil {
		return e, fmt.Errorf("replay_endpoint: %w", err)
	}
	if parsed.Wildcard {
		return e, fmt.Errorf("replay_endpoint: %q: a replay is asked for, so it needs a host and a port", replay)
	}
	if e.replay == e.endpoint {
		return e, fmt.Errorf("replay_endpoint: %q is the event endpoint too", replay)
	}
	return e, nil
}

// checkPorts refuses event and replay ports of n ranks that overlap on one
// host.
func (s *WorkerSpec) checkPorts(n int) error {
	host, port, ok := hostPort(s.Endpoint)
	rhost, rport, rok := hostPort(s.ReplayEndpoint)
	if !ok || !rok || port == 0 || host != rhost {
		return nil
	}
	return zmqwire.CheckPorts(port, rport, n)
}

// hostPort splits a tcp endpoint; the several names of the own host are one.
func hostPort(endpoint string) (host string, port int, ok bool) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", 0, false
	}
	host, p, err := net.SplitHostPort(rest)
	if err != nil {
		return "", 0, false
	}
	port, err = strconv.Atoi(p)
	if p == "*" {
		port, err = 0, nil
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "localhost" || host == "::1" {
		host = "127.0.0.1"
	}
	return host, port, err == nil
}

// publisherKey is equal for endpoints that name one publisher. A bound
// endpoint of port 0 is nobody else's.
func publisherKey(e rankEndpoint) string {
	host, port, ok := hostPort(e.endpoint)
	if !ok {
		return e.endpoint
	}
	if port == 0 {
		return ""
	}
	return net.JoinHostPort(host, strconv.Itoa(port))
}
