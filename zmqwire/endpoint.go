package zmqwire

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// ErrEndpoint is wrapped by every error about an endpoint's text or ports.
var ErrEndpoint = errors.New("invalid endpoint")

// Endpoint is a ZeroMQ endpoint as Go's net package takes it.
type Endpoint struct {
	// Network is "tcp" or "unix".
	Network string
	// Address is host:port, the host empty for the wildcard and the port 0
	// for "*"; or a socket's path, "@name" for an abstract one.
	Address string
	// Wildcard says that the endpoint contains "*" and so can only be bound.
	Wildcard bool
}

// ParseEndpoint reads tcp://host:port, tcp://[v6]:port, tcp://*:port and
// ipc://path. inproc:// names nothing outside its own process and is refused.
func ParseEndpoint(s string) (Endpoint, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok || rest == "" {
		return Endpoint{}, fmt.Errorf("%w %q: expected tcp://host:port or ipc://path", ErrEndpoint, s)
	}
	switch scheme {
	case "tcp":
		return parseTCP(s, rest)
	case "ipc":
		if strings.ContainsRune(rest, 0) || len(rest) > maxSocketPath {
			return Endpoint{}, fmt.Errorf("%w %q: expected a socket path of at most %d bytes", ErrEndpoint, s, maxSocketPath)
		}
		return Endpoint{Network: "unix", Address: rest, Wildcard: rest == "*"}, nil
	}
	return Endpoint{}, fmt.Errorf("%w %q: expected scheme tcp or ipc, got %q", ErrEndpoint, s, scheme)
}

// maxSocketPath is sun_path without its terminating zero.
const maxSocketPath = 107

func parseTCP(s, rest string) (Endpoint, error) {
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w %q: %w", ErrEndpoint, s, err)
	}
	e := Endpoint{Network: "tcp", Wildcard: host == "*" || port == "*"}
	if host == "" {
		return Endpoint{}, fmt.Errorf("%w %q: no host", ErrEndpoint, s)
	}
	if host == "*" {
		host = ""
	}
	if port == "*" {
		port = "0"
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w %q: port %q is not a number of 0..65535", ErrEndpoint, s, port)
	}
	e.Address = net.JoinHostPort(host, strconv.FormatUint(n, 10))
	return e, nil
}

// binds reports whether a publisher binds this endpoint, by vLLM's rule: it
// contains "*" or "::", or is ipc. Port 0 can only be bound, too.
func (e Endpoint) binds() bool {
	return e.Wildcard || e.Network == "unix" || strings.Contains(e.Address, "::") || e.port() == 0
}

func (e Endpoint) port() int {
	_, p, err := net.SplitHostPort(e.Address)
	if e.Network != "tcp" || err != nil {
		return -1
	}
	n, _ := strconv.Atoi(p)
	return n
}

// endpointOf is the endpoint text of a listener's address.
func endpointOf(a net.Addr) string {
	if a.Network() == "unix" {
		return "ipc://" + a.String()
	}
	return "tcp://" + a.String()
}

// OffsetEndpoint is the endpoint of a data-parallel rank: vLLM publishes rank r
// on base port + r and replays on replay base port + r. A port of 0 or "*" has
// no neighbours and stays. An ipc endpoint has no port: only rank 0 can use it.
func OffsetEndpoint(endpoint string, rank int) (string, error) {
	e, err := ParseEndpoint(endpoint)
	if err != nil {
		return "", err
	}
	if rank == 0 {
		return endpoint, nil
	}
	if e.Network != "tcp" {
		return "", fmt.Errorf("%w %q: rank %d needs a tcp port to count from", ErrEndpoint, endpoint, rank)
	}
	base := e.port()
	if base == 0 {
		return endpoint, nil
	}
	port := base + rank
	if rank < 0 || port > 65535 {
		return "", fmt.Errorf("%w %q: rank %d would use port %d", ErrEndpoint, endpoint, rank, port)
	}
	i := strings.LastIndexByte(endpoint, ':')
	return endpoint[:i+1] + strconv.Itoa(port), nil
}

// CheckPorts reports whether dpSize ranks fit on port base+rank for events and
// replayBase+rank for replays without one rank's replay port being another's
// event port: 5557 and 5558 collide from two ranks on. replayBase 0: no replay.
func CheckPorts(base, replayBase, dpSize int) error {
	if dpSize < 1 {
		return fmt.Errorf("%w: dp size %d, expected at least 1", ErrEndpoint, dpSize)
	}
	last := max(base, replayBase) + dpSize - 1
	if base < 1 || replayBase < 0 || last > 65535 {
		return fmt.Errorf("%w: ports %d and %d with %d ranks leave 1..65535", ErrEndpoint, base, replayBase, dpSize)
	}
	if replayBase == 0 {
		return nil
	}
	if d := max(base, replayBase) - min(base, replayBase); d < dpSize {
		return fmt.Errorf("%w: event ports %d..%d and replay ports %d..%d of %d ranks overlap: place the bases at least %d apart",
			ErrEndpoint, base, base+dpSize-1, replayBase, replayBase+dpSize-1, dpSize, dpSize)
	}
	return nil
}
