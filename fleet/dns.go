package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"
)

// Resolver looks up a host name's addresses; *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// dnsSource makes a worker of each address of each headless service.
type dnsSource struct {
	fleet *Fleet
	state *sourceState
	wake  chan struct{}
	known map[string]*service
}

// service is what is known of one name.
type service struct {
	addrs []netip.Addr
	// absent counts answers in a row that the name does not exist.
	absent int
	err    error
}

// A name that does not exist loses its workers only after so many answers: a
// cluster's DNS says so for a moment when it restarts.
const absentAnswers = 3

// lookupTimeout bounds one lookup.
const lookupTimeout = 5 * time.Second

func (f *Fleet) addDNS() {
	f.dns = &dnsSource{fleet: f, state: f.addSource("dns"), wake: make(chan struct{}, 1), known: map[string]*service{}}
	if f.o.Resolver == nil {
		f.o.Resolver = net.DefaultResolver
	}
}

// dialResolver looks up the names that stand in endpoints, before each dial.
func (f *Fleet) dialResolver() *net.Resolver {
	r, _ := f.o.Resolver.(*net.Resolver)
	return r // nil is the system's
}

// specs are the services of flags and files.
func (d *dnsSource) specs() []DNSSpec {
	out := slices.Clone(d.fleet.o.DNS)
	for _, s := range d.fleet.files {
		out = append(out, s.services()...)
	}
	return out
}

// run looks every name up again and again.
func (d *dnsSource) run(ctx context.Context) {
	t := time.NewTicker(d.fleet.o.Timing.Resolve)
	defer t.Stop()
	for {
		d.lookUp(ctx)
		select {
		case <-ctx.Done():
			return
		case <-d.wake:
		case <-t.C:
		}
	}
}

// nudge looks the names up now: a file has others.
func (d *dnsSource) nudge() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *dnsSource) lookUp(ctx context.Context) {
	specs := d.specs()
	if len(specs) == 0 && len(d.state.entries) == 0 {
		return
	}
	var entries []entry
	var problems []Problem
	for i := range specs {
		s := &specs[i]
		sv := d.service(ctx, s.Name)
		if ctx.Err() != nil {
			return
		}
		where := "dns:" + s.Name
		if sv.err != nil {
			problems = append(problems, Problem{Source: "dns", Where: where, Entry: s.Name, Err: sv.err})
		}
		for _, a := range sv.addrs {
			entries = append(entries, entry{spec: s.at(a), source: "dns", where: where})
		}
	}
	d.fleet.update(d.state, entries, nil, problems)
}

// service looks one name up; what fails keeps what was known.
func (d *dnsSource) service(ctx context.Context, name string) *service {
	sv := d.known[name]
	if sv == nil {
		sv = new(service)
		d.known[name] = sv
	}
	lctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addrs, err := d.fleet.o.Resolver.LookupNetIP(lctx, "ip", name)
	var dnsErr *net.DNSError
	switch {
	case err == nil:
		for i := range addrs {
			addrs[i] = addrs[i].Unmap()
		}
		slices.SortFunc(addrs, netip.Addr.Compare)
		sv.addrs, sv.absent, sv.err = slices.Compact(addrs), 0, nil
	case errors.As(err, &dnsErr) && dnsErr.IsNotFound:
		sv.absent++
		if sv.absent >= absentAnswers {
			sv.addrs = nil
		}
		sv.err = fmt.Errorf("dns %q: %w", name, err)
	default:
		sv.err = fmt.Errorf("dns %q: %w", name, err)
	}
	return sv
}
