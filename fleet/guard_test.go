package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
	"github.com/kvindexd/kvindexd/zmqwire/wiretest"
)

// A registration onto another's publisher is refused, whichever of the two was
// there first, and nobody falls out of the fleet for it.
func TestRegistrationTakesNobodysPublisher(t *testing.T) {
	f, err := New(Options{Logger: quiet, DNS: []DNSSpec{{Name: "svc", Port: 7000, Worker: WorkerSpec{Model: "m"}}}, Resolver: fixed{"127.0.0.9"}})
	if err != nil {
		t.Fatal(err)
	}
	f.dns.lookUp(t.Context())
	put := func(id, endpoint string) error { return f.Put(WorkerSpec{ID: id, Model: "m", Endpoint: endpoint}) }
	if err := errors.Join(put("7", "tcp://127.0.0.1:5557"), put("abc", "tcp://127.0.0.1:5558")); err != nil {
		t.Fatal(err)
	}
	refused := func(err error, names ...string) {
		t.Helper()
		if !errors.Is(err, ErrConflict) {
			t.Fatalf("%v, want ErrConflict", err)
		}
		for _, n := range names {
			if !strings.Contains(err.Error(), n) {
				t.Errorf("%v, want %s named", err, n)
			}
		}
	}
	refused(put("7", "tcp://localhost:5558"), `"7"`, `"abc"`)
	refused(put("abc", "tcp://127.0.0.1:5557"), `"7"`, `"abc"`)
	refused(put("7", "tcp://127.0.0.9:7000"), `"7"`, `"svc-127.0.0.9"`)
	waitWorkers(t, f, "7 g1", "abc g1", "svc-127.0.0.9 g1")
	if got := f.Registered("7")[0].Endpoint; got != "tcp://127.0.0.1:5557" {
		t.Errorf("the refused registration is kept: %s", got)
	}
}

// fixed is a resolver that knows one address.
type fixed [1]string

func (r fixed) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	return []netip.Addr{netip.MustParseAddr(r[0])}, nil
}

// The fleet of a capture is looked at, not changed.
func TestCaptureFleetIsNotChanged(t *testing.T) {
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{"s": {Worker: "w", Model: "m", BlockSize: 4}}}
	off, err := NewOffline(h, Replies{}, Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	spec := WorkerSpec{ID: "x", Model: "m", Endpoint: "tcp://127.0.0.1:1"}
	for name, err := range map[string]error{
		"Put": off.Put(spec), "Register": off.Register(spec), "Delete": off.Delete("w"),
		"Unregister": off.Unregister("w", spec.Key()), "Reset": off.Reset("w"),
	} {
		if !errors.Is(err, ErrCapture) {
			t.Errorf("%s: %v, want ErrCapture", name, err)
		}
	}
	if got := off.Registered("w"); got != nil {
		t.Errorf("registered: %v", got)
	}
}

// Readiness is of the workers that are followed now.
func TestReady(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	silent := newEngine(t, zmqwire.PublisherConfig{})
	idle := silent.spec("idle")
	idle.ReplayEndpoint = ""
	gone := e.spec("gone")
	gone.Endpoint, gone.ReplayEndpoint = "tcp://127.0.0.1:1", ""
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w"), idle, gone}})
	ready := func(settled int, waiting ...string) {
		t.Helper()
		want := fmt.Sprint(Readiness{3, settled, waiting})
		eventually(t, func() string {
			if got := fmt.Sprint(f.Ready()); got != want {
				return got + ", want " + want
			}
			return ""
		})
	}
	e.store(0)
	// Nothing more can be waited for of a connected worker without a replay
	// endpoint.
	ready(2, "gone/0: connecting")
	e.replay.Silence(true)
	e.lose(e.encode(e.storeEvent(1)))
	e.store(2) // a gap
	e.truthless(f)
	ready(2, "gone/0: connecting")
	e.events.Close()
	ready(1, "gone/0: connecting", "w/0: disconnected")
}

// truthless waits until the gap was noticed.
func (e *engine) truthless(f *Fleet) {
	eventually(e.t, func() string {
		if countsOf(f, "w/0").Gaps == 0 {
			return "no gap was noticed"
		}
		return ""
	})
}

// A name that led where it may when it was registered, and leads elsewhere
// later, is not followed there.
func TestNameThatChangesItsMind(t *testing.T) {
	noLeaks(t)
	allow, err := ParseAllowList([]string{"127.0.0.2/32"})
	if err != nil {
		t.Fatal(err)
	}
	names := wiretest.NewNameserver(t, "127.0.0.2")
	pub, err := zmqwire.NewPublisher(zmqwire.PublisherConfig{Endpoint: "tcp://127.0.0.2:*", Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(pub.Addr(), "tcp://"))
	trap, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		t.Skip("the port is taken on 127.0.0.1: ", err)
	}
	defer trap.Close()
	var caught atomic.Int64
	go func() {
		for {
			c, err := trap.Accept()
			if err != nil {
				return
			}
			caught.Add(1)
			c.Close()
		}
	}()
	f := running(t, Options{Allow: allow, Resolver: names.Resolver()})
	if err := f.Put(WorkerSpec{ID: "w", Model: "m", Endpoint: "tcp://worker.example:" + port}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); !st.Connected {
			return fmt.Sprintf("%+v, want connected", st)
		}
		return ""
	})
	names.Move("127.0.0.1")
	pub.Close()
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); !strings.Contains(st.LastError, "not allowed") {
			return fmt.Sprintf("%+v, want a dial that is not allowed", st)
		}
		return ""
	})
	if n := caught.Load(); n != 0 {
		t.Errorf("%d connections to an address that is not allowed", n)
	}
}

// One word everywhere for what keeps a worker from being exact.
func TestReasonsAreTheRequests(t *testing.T) {
	e := entry{spec: WorkerSpec{ID: "w", Model: "m", Endpoint: "tcp://127.0.0.1:1", ExtraKeys: "none", ImageTokenID: new(uint32(9))}}
	s, err := new(Fleet).state(&e, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := normalize.Prompt{Tokens: []uint32{9}, Features: normalize.ParseFeaturesJSON(
		[]byte(`{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":0,"length":1}]}}`))}
	pr := p.Project(s.view, normalize.Shape{BlockSize: 1})
	if got := s.mmReason(); got != pr.Reason || got != normalize.ExtraKeysHidden {
		t.Errorf("the worker says %q, a request %q", got, pr.Reason)
	}
}
