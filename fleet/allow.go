package fleet

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// AllowList bounds what a registration over the network may make the daemon
// dial. The zero list allows private and loopback addresses.
type AllowList struct {
	prefixes []netip.Prefix
	suffixes []string
	sockets  []string
}

// ParseAllowList reads patterns: a CIDR or an address, a host name's suffix
// (".svc.cluster.local", or a whole name), or an "ipc://" prefix of socket
// paths. No pattern at all means private and loopback addresses.
func ParseAllowList(patterns []string) (*AllowList, error) {
	a := new(AllowList)
	for _, p := range patterns {
		if path, ok := strings.CutPrefix(p, "ipc://"); ok {
			a.sockets = append(a.sockets, path)
			continue
		}
		if prefix, err := netip.ParsePrefix(p); err == nil {
			a.prefixes = append(a.prefixes, prefix.Masked())
			continue
		}
		if addr, err := netip.ParseAddr(p); err == nil {
			a.prefixes = append(a.prefixes, netip.PrefixFrom(addr, addr.BitLen()))
			continue
		}
		if p == "" || strings.ContainsAny(p, "/:@ *") {
			return nil, fmt.Errorf("%w: allowed endpoint %q: expected a CIDR, a host suffix or ipc://PREFIX", ErrInvalid, p)
		}
		a.suffixes = append(a.suffixes, strings.ToLower(p))
	}
	return a, nil
}

func (a *AllowList) empty() bool {
	return a == nil || len(a.prefixes)+len(a.suffixes)+len(a.sockets) == 0
}

// Check refuses an endpoint that could never be dialled. It looks nothing up:
// what a name stands for is checked when it is dialled.
func (a *AllowList) Check(endpoint string) error {
	e, err := zmqwire.ParseEndpoint(endpoint)
	if err != nil {
		return err
	}
	if e.Network == "unix" {
		return a.socket(endpoint, e.Address)
	}
	host, _, err := net.SplitHostPort(e.Address)
	if err != nil || host == "" {
		return err // a wildcard is bound, not dialled
	}
	if addr, err := netip.ParseAddr(host); err == nil && !a.address(addr) {
		return fmt.Errorf("%w: %s", ErrDenied, endpoint)
	}
	return nil
}

// Control is for the dials of one endpoint: it is asked with each resolved
// address, so that a name cannot lead elsewhere.
func (a *AllowList) Control(endpoint string) func(network, address string) error {
	trusted := a.trustedHost(endpoint)
	return func(network, address string) error {
		if strings.HasPrefix(network, "unix") {
			return a.socket(endpoint, address)
		}
		ap, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrDenied, address, err)
		}
		if trusted || a.address(ap.Addr()) {
			return nil
		}
		return fmt.Errorf("%w: %s is %s", ErrDenied, endpoint, address)
	}
}

func (a *AllowList) socket(endpoint, path string) error {
	if a != nil && !strings.Contains(path, "..") {
		for _, p := range a.sockets {
			if strings.HasPrefix(path, p) {
				return nil
			}
		}
	}
	return fmt.Errorf("%w: %s", ErrDenied, endpoint)
}

// trustedHost: the endpoint's own name is one that the operator named.
func (a *AllowList) trustedHost(endpoint string) bool {
	host, _, ok := hostPort(endpoint)
	if !ok || a == nil {
		return false
	}
	for _, s := range a.suffixes {
		if host == strings.TrimPrefix(s, ".") || strings.HasSuffix(host, "."+strings.TrimPrefix(s, ".")) {
			return true
		}
	}
	return false
}

func (a *AllowList) address(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	if a.empty() {
		return addr.IsLoopback() || addr.IsPrivate()
	}
	for _, p := range a.prefixes {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}
