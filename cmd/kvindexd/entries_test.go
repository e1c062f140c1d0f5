package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvindexd/kvindexd/fleet"
)

func TestWorkerFlag(t *testing.T) {
	id := uint32(151655)
	f := func(value string, want fleet.WorkerSpec) {
		t.Helper()
		got, err := parseWorkers([]string{value})
		if err != nil {
			t.Errorf("%s: %v", value, err)
			return
		}
		if diff := cmp.Diff([]fleet.WorkerSpec{want}, got); diff != "" {
			t.Errorf("%s: %s", value, diff)
		}
	}
	f("id=a,model=m,endpoint=tcp://10.0.0.5:5557", fleet.WorkerSpec{ID: "a", Model: "m", Endpoint: "tcp://10.0.0.5:5557"})
	f("id=7, model=true, endpoint=tcp://*:5557,topic=kv@a@m,dp_size=2",
		fleet.WorkerSpec{ID: "7", Model: "true", Endpoint: "tcp://*:5557", Topic: "kv@a@m", DPSize: 2})
	f("id=a,model=Qwen/Qwen2-VL,endpoint=tcp://[::1]:5557,image_token_id=151655,loras=x|y,eagle_drop=true",
		fleet.WorkerSpec{
			ID: "a", Model: "Qwen/Qwen2-VL", Endpoint: "tcp://[::1]:5557", ImageTokenID: &id, EagleDrop: true,
			Loras: []fleet.LoraSpec{{Name: "x"}, {Name: "y"}},
		})
}

func TestWorkerFlagRefused(t *testing.T) {
	f := func(value, want string) {
		t.Helper()
		_, err := parseWorkers([]string{value})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "--worker:") {
			t.Errorf("%s: %v, want %q in it", value, err, want)
		}
	}
	f("vllm-0", "key=value")
	f("", "key=value")
	f("id=a,model=m", "endpoint: missing")
	f("id=a,model=m,endpoint=10.0.0.5:5557", "endpoint")
	f("id=a,model=m,endpoint=tcp://h:1,image_token=5", `unknown key "image_token"`)
	f("id=a,model=m,endpoint=tcp://h:1,image_token_id=-5", "image_token_id")
	f("id=a,model=m,endpoint=tcp://h:5557,replay_endpoint=tcp://h:5558,dp_size=2", "5558")
	f("id=a,id=b,model=m,endpoint=tcp://h:1", "twice")
}

func TestDNSFlag(t *testing.T) {
	got, err := parseDNS([]string{"dns=vllm.ns.svc,port=5557,replay_port=5657,model=m,exact_mm=true"})
	if err != nil {
		t.Fatal(err)
	}
	want := []fleet.DNSSpec{{Name: "vllm.ns.svc", Port: 5557, ReplayPort: 5657, Worker: fleet.WorkerSpec{Model: "m", ExactMM: true}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
