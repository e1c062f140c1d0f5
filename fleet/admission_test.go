package fleet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvindexd/kvindexd/zmqwire"
)

// still is a fleet that subscribes to nobody.
func still(t *testing.T, o Options) *Fleet {
	t.Helper()
	o.Logger = quiet
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func put(t *testing.T, f *Fleet, specs ...WorkerSpec) {
	t.Helper()
	for _, s := range specs {
		if err := f.Put(s); err != nil {
			t.Fatal(err)
		}
	}
}

func remove(t *testing.T, f *Fleet, ids ...string) {
	t.Helper()
	for _, id := range ids {
		if err := f.Delete(id); err != nil {
			t.Fatal(err)
		}
	}
}

// local is a worker at an address of its own.
func local(n int, id string, change func(*WorkerSpec)) WorkerSpec {
	s := WorkerSpec{ID: id, Model: "m", Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", 1000+n)}
	if change != nil {
		change(&s)
	}
	return s
}

func image(id uint32) func(*WorkerSpec) {
	return func(s *WorkerSpec) { s.ImageTokenID = &id }
}

// members lists a fleet's sets: "namespace/model/role: members | rejected".
func members(f *Fleet) (out []string) {
	for _, p := range f.Sets() {
		var in, no []string
		for _, m := range p.Members {
			in = append(in, streamName(m.Worker, m.Rank))
		}
		for _, r := range p.Rejected {
			no = append(no, r.Worker+" ("+strings.Join(r.Fields, "; ")+")")
		}
		out = append(out, fmt.Sprintf("%s/%s/%s: %s | %s", p.Key.Namespace, p.Key.Model, p.Key.Role, strings.Join(in, " "), strings.Join(no, ", ")))
	}
	return out
}

func wantMembers(t *testing.T, f *Fleet, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, members(f)); diff != "" {
		t.Error(diff)
	}
}

func TestAdmission(t *testing.T) {
	f := still(t, Options{})
	put(t, f, local(1, "a", image(9)), local(2, "b", nil), local(3, "c", image(10)), local(4, "d", image(11)), local(5, "e", image(9)))
	wantMembers(t, f, "default/m/aggregated: a/0 b/0 e/0 | c (image_token_id: 10 here, 9 in the set), d (image_token_id: 11 here, 9 in the set)")
	v, err := f.Worker("c")
	if err != nil || v[0].Admitted || len(v[0].Differs) != 1 {
		t.Errorf("c: %+v, %v", v, err)
	}
	// The incumbents' configuration stays as long as one of them does, b's
	// silence does not keep it, and the oldest waiting one follows.
	remove(t, f, "a")
	wantMembers(t, f, "default/m/aggregated: b/0 e/0 | c (image_token_id: 10 here, 9 in the set), d (image_token_id: 11 here, 9 in the set)")
	remove(t, f, "e")
	wantMembers(t, f, "default/m/aggregated: b/0 c/0 | d (image_token_id: 11 here, 10 in the set)")
	// The other side changes.
	put(t, f, local(4, "d", image(10)))
	wantMembers(t, f, "default/m/aggregated: b/0 c/0 d/0 | ")
	remove(t, f, "b", "c", "d")
	wantMembers(t, f)
}

func TestWhatMustAgree(t *testing.T) {
	dirs := [2]string{t.TempDir(), t.TempDir()}
	for i, d := range dirs {
		write(t, filepath.Join(d, "config.json"), fmt.Sprintf(`{"image_token_id": 9, "version": %d}`, i))
	}
	f := func(field string, a, b func(*WorkerSpec)) {
		t.Helper()
		fl := still(t, Options{})
		put(t, fl, local(1, "a", a), local(2, "b", b))
		p := fl.Sets()[0]
		switch {
		case field == "" && len(p.Rejected) != 0:
			t.Errorf("rejected: %v", p.Rejected)
		case field != "" && (len(p.Rejected) != 1 || !strings.HasPrefix(p.Rejected[0].Fields[0], field)):
			t.Errorf("rejected: %v, want for %s", p.Rejected, field)
		}
	}
	yes, no, nine := true, false, uint32(9)
	tower := func(b *bool) func(*WorkerSpec) { return func(s *WorkerSpec) { s.TowerConnectorLora = b } }
	video := func(id uint32) func(*WorkerSpec) { return func(s *WorkerSpec) { s.VideoTokenID = &id } }
	dir := func(d string) func(*WorkerSpec) { return func(s *WorkerSpec) { s.ModelDir = d } }
	f("", nil, nil)
	f("", image(9), nil)
	f("", nil, image(9))
	f("image_token_id", image(9), image(8))
	f("", image(9), video(8))
	f("video_token_id", video(9), video(8))
	f("tower_connector_lora", tower(&yes), tower(&no))
	f("", tower(&yes), nil)
	f("model_dir fingerprint", dir(dirs[0]), dir(dirs[1]))
	f("", dir(dirs[0]), func(s *WorkerSpec) { s.ImageTokenID = &nine })
	f("", func(s *WorkerSpec) { s.BlockSize = 16 }, func(s *WorkerSpec) { s.BlockSize = 32 })
	f("", func(s *WorkerSpec) { s.ExtraKeys = "none" }, func(s *WorkerSpec) { s.EagleDrop = true })
}

// TestRollingUpgrade: two versions of one model side by side, by namespace.
func TestRollingUpgrade(t *testing.T) {
	f := still(t, Options{})
	in := func(ns string, id uint32) func(*WorkerSpec) {
		return func(s *WorkerSpec) { s.Namespace = ns; s.ImageTokenID = &id }
	}
	put(t, f, local(1, "old-0", in("v1", 9)), local(2, "old-1", in("v1", 9)), local(3, "new-0", in("v2", 10)))
	wantMembers(t, f, "v1/m/aggregated: old-0/0 old-1/0 | ", "v2/m/aggregated: new-0/0 | ")
	r, err := f.Resolve(Selector{Model: "m"})
	if err != nil || len(r.Pictures) != 2 {
		t.Errorf("both: %+v, %v", r, err)
	}
	r, err = f.Resolve(Selector{Model: "m", Namespace: "v2"})
	if err != nil || len(r.Pictures) != 1 || r.Pictures[0].Key.Namespace != "v2" {
		t.Errorf("v2: %+v, %v", r, err)
	}
	old := f.Sets()[0]
	remove(t, f, "old-0", "old-1")
	wantMembers(t, f, "v2/m/aggregated: new-0/0 | ")
	if len(old.Members) != 2 {
		t.Error("a picture that a query holds has changed")
	}
	// A worker that comes again is another life.
	gen := f.Sets()[0].Members[0].Generation
	remove(t, f, "new-0")
	put(t, f, local(3, "new-0", in("v2", 10)))
	if got := f.Sets()[0].Members[0].Generation; got != gen+1 {
		t.Errorf("generation %d, want %d", got, gen+1)
	}
}

func TestResolve(t *testing.T) {
	f := still(t, Options{
		Models: []ModelSpec{
			{Name: "base", Aliases: []string{"b", "both"}},
			{Name: "other", Aliases: []string{"both"}},
			{Name: "empty"},
		},
		Workers: []WorkerSpec{
			local(1, "w1", func(s *WorkerSpec) { s.Model, s.Loras = "base", []LoraSpec{{"sql-adapter", []string{"sql"}}} }),
			local(2, "w2", func(s *WorkerSpec) { s.Model, s.Role = "base", "prefill" }),
			local(3, "w3", func(s *WorkerSpec) { s.Model, s.Loras = "other", []LoraSpec{{"twice", nil}, {"own", nil}} }),
			local(4, "w4", func(s *WorkerSpec) { s.Model, s.Loras = "base", []LoraSpec{{"twice", nil}} }),
		},
	})
	ok := func(sel Selector, model, lora string, sets int) {
		t.Helper()
		r, err := f.Resolve(sel)
		if err != nil || r.Model != model || r.LoraName != lora || len(r.Pictures) != sets {
			t.Errorf("%+v: model %q lora %q, %d sets, %v; want %q %q %d", sel, r.Model, r.LoraName, len(r.Pictures), err, model, lora, sets)
		}
	}
	fails := func(sel Selector, want error) {
		t.Helper()
		if r, err := f.Resolve(sel); !errors.Is(err, want) {
			t.Errorf("%+v: %+v, %v, want %v", sel, r, err, want)
		}
	}
	ok(Selector{Model: "base"}, "base", "", 2)
	ok(Selector{Model: "b"}, "base", "", 2)
	ok(Selector{Model: "b", Role: "prefill"}, "base", "", 1)
	ok(Selector{Model: "empty"}, "empty", "", 0)
	ok(Selector{Model: "sql-adapter"}, "base", "sql-adapter", 1)
	ok(Selector{Model: "sql"}, "base", "sql-adapter", 1)
	ok(Selector{Model: "sql", LoraName: "sql-adapter"}, "base", "sql-adapter", 1)
	ok(Selector{Model: "base", LoraName: "sql"}, "base", "sql-adapter", 2)
	ok(Selector{Model: "base", LoraName: "loaded-by-itself"}, "base", "loaded-by-itself", 2)
	ok(Selector{Model: "other", LoraName: "twice"}, "other", "twice", 1)
	ok(Selector{Model: "own"}, "other", "own", 1)
	fails(Selector{Model: "nothing"}, ErrUnknownModel)
	fails(Selector{Model: "base", Namespace: "elsewhere"}, ErrUnknownModel)
	fails(Selector{Model: "sql", Role: "prefill"}, ErrUnknownModel)
	fails(Selector{}, ErrAmbiguousModel)
	fails(Selector{Model: "both"}, ErrAmbiguousModel)
	fails(Selector{Model: "twice"}, ErrAmbiguousModel)
	fails(Selector{Model: "sql", LoraName: "own"}, ErrLoraContradiction)

	one := still(t, Options{Workers: []WorkerSpec{local(1, "w", nil)}})
	if r, err := one.Resolve(Selector{}); err != nil || r.Model != "m" {
		t.Errorf("the only model: %+v, %v", r, err)
	}
	if _, err := still(t, Options{}).Resolve(Selector{}); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("no model at all: %v", err)
	}
}

// TestAdaptersLiveWithTheirBase: one stays while one member serves it, and goes
// alone.
func TestAdaptersLiveWithTheirBase(t *testing.T) {
	f := still(t, Options{})
	lora := func(s *WorkerSpec) { s.Loras = []LoraSpec{{Name: "l"}} }
	put(t, f, local(1, "a", lora), local(2, "b", lora), local(3, "c", nil))
	resolves := func(want bool) {
		t.Helper()
		r, err := f.Resolve(Selector{Model: "l"})
		if (err == nil) != want {
			t.Errorf("%+v, %v", r, err)
		}
	}
	resolves(true)
	remove(t, f, "a")
	resolves(true)
	put(t, f, local(2, "b", nil))
	resolves(false)
	if _, err := f.Resolve(Selector{Model: "m"}); err != nil {
		t.Error(err)
	}
	if g := f.Workers()[0].Generation; g != 1 {
		t.Errorf("an adapter's end began generation %d of its worker", g)
	}
}

func TestExactIsBelievedOnlyWithATokenID(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "config.json"), `{"text_config": {"image_token_index": 77}}`)
	claim := func(more func(*WorkerSpec)) func(*WorkerSpec) {
		return func(s *WorkerSpec) {
			s.ExactMM = true
			if more != nil {
				more(s)
			}
		}
	}
	f := still(t, Options{Models: []ModelSpec{{Name: "known", ModelDir: dir}}, Workers: []WorkerSpec{
		local(1, "a", claim(nil)),
		local(2, "b", claim(image(9))),
		local(3, "c", func(s *WorkerSpec) { s.Model = "known" }),
		local(4, "d", claim(func(s *WorkerSpec) { s.ExtraKeys = "none"; image(9)(s) })),
		local(5, "e", nil),
	}})
	var got []string
	for _, v := range f.Workers() {
		got = append(got, fmt.Sprintf("%s %t %q %q %q", v.Spec.ID, v.ExactMM, v.MMReason, v.MMClaim, strings.TrimPrefix(v.ImageTokenIDFrom, dir)))
	}
	want := []string{
		`a false "no_image_token_id" "claimed, refused: no_image_token_id" ""`,
		`b true "" "believed" "worker"`,
		`c true "" "" "/config.json: text_config.image_token_index"`,
		`d false "extra_keys_hidden" "claimed, refused: extra_keys_hidden" "worker"`,
		`e false "no_image_token_id" "" ""`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestBrokenModelDirKeepsTheLife: what was resolved stays in force until it can
// be resolved again.
func TestBrokenModelDirKeepsTheLife(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "config.json")
	write(t, config, `{"image_token_id": 9}`)
	f := still(t, Options{Workers: []WorkerSpec{local(1, "a", func(s *WorkerSpec) { s.ModelDir = dir })}})
	write(t, config, `{"image_token_id": "nine"}`)
	f.reconcile()
	v := f.Workers()[0]
	if p := f.Problems(); len(p) != 1 || !strings.Contains(p[0].Err.Error(), "image_token_id") || v.Generation != 1 || !v.ExactMM {
		t.Errorf("problems %v, worker %+v", p, v)
	}
	if err := os.Remove(config); err != nil {
		t.Fatal(err)
	}
	write(t, config, `{"image_token_id": 10}`)
	f.reconcile()
	if v := f.Workers()[0]; v.Generation != 2 || *v.ImageTokenID != 10 || len(f.Problems()) != 0 {
		t.Errorf("worker %+v, problems %v", v, f.Problems())
	}
}

// TestMetrics: everything can be gathered, and labels are what was configured.
func TestMetrics(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, zmqwire.PublisherConfig{})
	f := running(t, Options{Workers: []WorkerSpec{e.spec("w")}})
	e.store(0, 1)
	e.remove(0)
	e.send([]byte{0xc1})
	eventually(t, func() string {
		if st := statusOf(f, "w/0"); st.State != Suspect || st.Seq != 3 {
			return fmt.Sprintf("%+v", st)
		}
		return ""
	})
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(f); err != nil {
		t.Fatal(err)
	}
	fams, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, fam := range fams {
		for _, m := range fam.Metric {
			name := fam.GetName()
			for _, l := range m.Label {
				if !slices.Contains(streamLabels, l.GetName()) {
					name += "," + l.GetValue()
				}
			}
			values[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	for name, want := range map[string]float64{
		"kvindexd_stream_state,suspect":               1,
		"kvindexd_stream_last_seq":                    3,
		"kvindexd_stream_messages_total,applied":      4,
		"kvindexd_stream_messages_total,unreadable":   1,
		"kvindexd_stream_events_total,BlockStored":    2,
		"kvindexd_stream_events_total,BlockRemoved":   1,
		"kvindexd_stream_batches_lost_total":          1,
		"kvindexd_stream_resident_blocks,device":      1,
		"kvindexd_stream_transitions_total,suspect":   1,
		"kvindexd_stream_connections_total,connected": 1,
		"kvindexd_set_members":                        1,
		"kvindexd_set_rejected":                       0,
		"kvindexd_set_block_size,4":                   1,
		"kvindexd_config_problems":                    0,
	} {
		if got, ok := values[name]; !ok || got != want {
			t.Errorf("%s = %v (there: %t), want %v", name, got, ok, want)
		}
	}
}
