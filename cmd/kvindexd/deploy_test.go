package main

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvindexd/kvindexd/fleet"
)

// The dashboard asks for metrics that there are.
func TestDashboardMetrics(t *testing.T) {
	raw, err := os.ReadFile("../../deploy/grafana/kvindexd.json")
	if err != nil {
		t.Fatal(err)
	}
	if !json.Valid(raw) {
		t.Fatal("no JSON")
	}
	e, spec := testWorker(t)
	p := &simPrompt{Tokens: make([]uint32, 32)}
	if _, err := e.serve(p); err != nil {
		t.Fatal(err)
	}
	s := serveHere(t, "--worker", flagOf(spec))
	s.holds(p, 32)
	r, err := http.Get(s.address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	metrics, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	// A vector without a series yet has no line; its kind is told all the same
	// by the daemon's description.
	unseen := map[string]bool{"kvindexd_query_refused_total": true, "kvindexd_query_images_total": true, "kvindexd_stream_events_skipped_total": true}
	for _, name := range regexp.MustCompile(`kvindexd_[a-z_]+`).FindAllString(string(raw), -1) {
		if !strings.Contains(string(metrics), "\n"+name) && !unseen[name] {
			t.Errorf("the daemon has no metric %s", name)
		}
	}
}

// The manifest's environment is of flags that there are, its configuration one
// that the daemon takes.
func TestDeployFiles(t *testing.T) {
	flags := newServe().Flags()
	addLogFlags(flags)
	known := func(file, name string) {
		t.Helper()
		flag := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, "KVINDEXD_"), "_", "-"))
		if flags.Lookup(flag) == nil {
			t.Errorf("%s: %s stands for no flag of serve", file, name)
		}
	}
	for _, file := range []string{"kubernetes.yaml", "Dockerfile", "kvindexd.service"} {
		raw, err := os.ReadFile("../../deploy/" + file)
		if err != nil {
			t.Fatal(err)
		}
		names := regexp.MustCompile(`KVINDEXD_[A-Z_]+`).FindAllString(string(raw), -1)
		if len(names) == 0 {
			t.Errorf("%s: no environment", file)
		}
		for _, name := range names {
			known(file, name)
		}
	}
	f, err := os.Open("../../deploy/kubernetes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	configs := 0
	for d := yaml.NewDecoder(f); ; {
		var doc struct {
			Kind string
			Data map[string]string
		}
		err := d.Decode(&doc)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if text := doc.Data["workers.yaml"]; doc.Kind == "ConfigMap" && text != "" {
			configs++
			if _, err := fleet.ParseConfig("kubernetes.yaml", []byte(text), fleet.EndpointDefaults{}); err != nil {
				t.Error(err)
			}
		}
	}
	if configs != 1 {
		t.Errorf("%d configurations in the manifest", configs)
	}
}
