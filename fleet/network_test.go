package fleet

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// newHost is an engine without proxies at an address of its own.
func newHost(t testing.TB, addr string, like *engine) *engine {
	t.Helper()
	e := &engine{t: t, kind: own, rank: -1, held: map[int]bool{}, known: map[block]bool{}}
	e.cfg = zmqwire.PublisherConfig{Endpoint: "tcp://" + addr + ":*", ReplayEndpoint: "tcp://" + addr + ":*", Linger: time.Millisecond, Logger: quiet}
	if like != nil {
		e.life, e.cfg.Bind = like.life+1, true
		e.cfg.Endpoint, e.cfg.ReplayEndpoint = at(addr, like.pub.Addr()), at(addr, like.pub.ReplayAddr())
	}
	e.spawn()
	return e
}

// at is the port of an endpoint at another address.
func at(addr, endpoint string) string {
	return "tcp://" + netip.AddrPortFrom(netip.MustParseAddr(addr), port(endpoint)).String()
}

func port(endpoint string) uint16 { return netip.MustParseAddrPort(hostOf(endpoint)).Port() }

// takesOver is e for what another engine held and e does not.
func (e *engine) takesOver(o *engine) {
	for b := range o.known {
		e.known[b] = true
	}
}

// TestNameMoves: the name in a worker's endpoints leads to another process after
// the first one died, whose numbers look like a continuation.
func TestNameMoves(t *testing.T) {
	noLeaks(t)
	a := newHost(t, "127.0.0.1", nil)
	b := newHost(t, "127.0.0.2", a)
	dns := wiretest.NewNameserver(t, "127.0.0.1")
	f := running(t, Options{Resolver: dns.Resolver(), Workers: []WorkerSpec{{
		ID: "w", Model: "m",
		Endpoint:       fmt.Sprintf("tcp://worker.test:%d", port(a.pub.Addr())),
		ReplayEndpoint: fmt.Sprintf("tcp://worker.test:%d", port(a.pub.ReplayAddr())),
	}}})
	a.churn(20)
	b.churn(35)
	a.truth(f, "w/0", Live)
	dns.Move("127.0.0.2")
	a.kill()
	b.takesOver(a)
	b.truth(f, "w/0", Live)
	b.churn(10)
	b.truth(f, "w/0", Live)
	if c := countsOf(f, "w/0"); c.Restarts != 1 {
		t.Errorf("%+v, want one restart", c)
	}
}

// TestServiceMoves: an address of a headless service is replaced by another.
func TestServiceMoves(t *testing.T) {
	noLeaks(t)
	a := newHost(t, "127.0.0.1", nil)
	b := newHost(t, "127.0.0.2", a)
	z := &zone{}
	z.set(nil, "127.0.0.1")
	timing := quick
	timing.Resolve = 20 * time.Millisecond
	f := running(t, Options{Timing: timing, Resolver: z, DNS: []DNSSpec{{
		Name: "vllm", Port: int(port(a.pub.Addr())), ReplayPort: int(port(a.pub.ReplayAddr())), Worker: WorkerSpec{Model: "m"},
	}}})
	a.churn(20)
	a.truth(f, "vllm-127.0.0.1/0", Live)
	z.set(nil, "127.0.0.1", "127.0.0.2")
	b.churn(35)
	b.truth(f, "vllm-127.0.0.2/0", Live)
	z.set(nil, "127.0.0.2") // a still runs
	eventually(t, func() string {
		if n := len(f.Workers()); n != 1 {
			return fmt.Sprintf("%d workers", n)
		}
		return ""
	})
	a.churn(5)
	b.churn(5)
	b.takesOver(a)
	b.truth(f, "vllm-127.0.0.2/0", Live)
	eventually(t, func() string {
		if n := a.pub.Subscribers(); n != 0 {
			return fmt.Sprintf("%d subscriptions of the address that is gone", n)
		}
		return ""
	})
}

// TestDuplicates: batches that come twice are applied once, whatever happened to
// their blocks since.
func TestDuplicates(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	store := e.encode(e.storeEvent(1), e.storeEvent(2))
	at := e.send(store)
	e.remove(1)
	e.truth(f, "w/0", Live)
	e.pub.PublishSeq(at, store)
	e.pub.PublishSeq(at+2, e.encode(e.storeEvent(3)))
	e.truth(f, "w/0", Live)
	if c := countsOf(f, "w/0"); c.Duplicates != 1 || c.Applied != 3 || c.Restarts != 0 {
		t.Errorf("%+v, want one duplicate of four", c)
	}
}
