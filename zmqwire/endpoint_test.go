package zmqwire

import (
	"errors"
	"strings"
	"testing"
)

func TestParseEndpoint(t *testing.T) {
	f := func(in, network, address string, wildcard, binds bool) {
		t.Helper()
		e, err := ParseEndpoint(in)
		if err != nil || e.Network != network || e.Address != address || e.Wildcard != wildcard || e.binds() != binds {
			t.Errorf("%q: %+v binds %v, %v", in, e, e.binds(), err)
		}
	}
	f("tcp://10.0.0.5:5557", "tcp", "10.0.0.5:5557", false, false)
	f("tcp://worker-0.vllm:5557", "tcp", "worker-0.vllm:5557", false, false)
	f("tcp://*:5557", "tcp", ":5557", true, true)
	f("tcp://127.0.0.1:*", "tcp", "127.0.0.1:0", true, true)
	f("tcp://127.0.0.1:0", "tcp", "127.0.0.1:0", false, true)
	f("tcp://[fd00::5]:5557", "tcp", "[fd00::5]:5557", false, true)
	f("tcp://[::]:5557", "tcp", "[::]:5557", false, true)
	f("ipc:///tmp/kv", "unix", "/tmp/kv", false, true)
	f("ipc://@kv", "unix", "@kv", false, true)

	bad := func(in string) {
		t.Helper()
		if _, err := ParseEndpoint(in); !errors.Is(err, ErrEndpoint) {
			t.Errorf("%q: %v, want ErrEndpoint", in, err)
		}
	}
	bad("")
	bad("10.0.0.5:5557")
	bad("tcp://")
	bad("tcp://host")
	bad("tcp://:5557")
	bad("tcp://host:port")
	bad("tcp://host:65536")
	bad("tcp://host:-1")
	bad("tcp://fd00::5:5557")
	bad("inproc://kv")
	bad("udp://host:5557")
	bad("ipc://" + strings.Repeat("x", 108))
}

func TestOffsetEndpoint(t *testing.T) {
	f := func(in string, rank int, want string) {
		t.Helper()
		got, err := OffsetEndpoint(in, rank)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q rank %d: %q, %v; want %q", in, rank, got, err, want)
		}
	}
	f("tcp://*:5557", 0, "tcp://*:5557")
	f("tcp://*:5557", 3, "tcp://*:5560")
	f("tcp://[fd00::5]:5557", 1, "tcp://[fd00::5]:5558")
	f("tcp://127.0.0.1:*", 1, "tcp://127.0.0.1:*")
	f("ipc:///tmp/kv", 0, "ipc:///tmp/kv")
	f("ipc:///tmp/kv", 1, "")
	f("tcp://h:65535", 1, "")
	f("tcp://h:5557", -1, "")
}

func TestCheckPorts(t *testing.T) {
	f := func(base, replay, dp int, ok bool) {
		t.Helper()
		if err := CheckPorts(base, replay, dp); (err == nil) != ok || err != nil && !errors.Is(err, ErrEndpoint) {
			t.Errorf("%d %d dp %d: %v", base, replay, dp, err)
		}
	}
	f(5557, 5558, 1, true)
	f(5557, 5558, 2, false)
	f(5558, 5557, 2, false)
	f(5557, 5557, 1, false)
	f(5557, 5565, 8, true)
	f(5557, 5564, 8, false)
	f(5557, 0, 64, true)
	f(65530, 0, 8, false)
	f(0, 0, 1, false)
	f(5557, 0, 0, false)
}
