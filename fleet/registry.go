package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
)

// httpSource are the workers that were registered over HTTP. They are kept in
// one small file, replaced whole, so that a kill leaves the old or the new one.
type httpSource struct {
	fleet *Fleet
	state *sourceState
	path  string // "" keeps them in memory

	// mu makes one change at a time, its file included.
	mu    sync.Mutex
	specs []WorkerSpec
}

// registryFile is what the state directory keeps.
const registryFile = "workers.json"

// registry is the file's content.
type registry struct {
	Version int          `json:"version"`
	Workers []WorkerSpec `json:"workers"`
}

func unknownWorker(id string) error { return fmt.Errorf("%w: %q", ErrUnknownWorker, id) }

func streamName(worker string, rank int) string { return worker + "/" + strconv.Itoa(rank) }

func (f *Fleet) addHTTP() error {
	h := &httpSource{fleet: f, state: f.addSource("http")}
	f.http = h
	if f.o.StateDir == "" {
		return nil
	}
	if err := os.MkdirAll(f.o.StateDir, 0o700); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	h.path = filepath.Join(f.o.StateDir, registryFile)
	specs, err := readRegistry(h.path)
	if err != nil {
		f.log.Error("registrations lost", "file", h.path, "reason", err)
		if err := os.Rename(h.path, h.path+".bad"); err != nil {
			return fmt.Errorf("state directory: %w", err)
		}
	}
	h.specs = specs
	h.state.entries = h.entries(specs)
	return nil
}

func readRegistry(path string) ([]WorkerSpec, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r registry
	if err := json.Unmarshal(raw, &r); err != nil {
		return nil, err
	}
	if r.Version != 1 {
		return nil, fmt.Errorf("version %d, expected 1", r.Version)
	}
	return r.Workers, nil
}

func (h *httpSource) entries(specs []WorkerSpec) []entry {
	out := make([]entry, len(specs))
	for i, s := range specs {
		out[i] = entry{spec: s, source: "http", where: "http", guarded: true}
	}
	return out
}

// Put states the worker of an id, in place of everything that was registered
// under it. The same spec again changes nothing. It fails with ErrInvalid,
// ErrDenied, ErrConflict or ErrCapture, and then nothing has changed.
func (f *Fleet) Put(spec WorkerSpec) error {
	return f.change(spec, func(specs []WorkerSpec) []WorkerSpec {
		at := slices.IndexFunc(specs, func(o WorkerSpec) bool { return o.ID == spec.ID })
		if at < 0 {
			return append(specs, spec)
		}
		specs[at] = spec
		kept := 0
		return slices.DeleteFunc(specs, func(o WorkerSpec) bool {
			if o.ID == spec.ID {
				kept++
				return kept > 1
			}
			return false
		})
	})
}

// Register is Put for one of several models of an id: it leaves the others.
func (f *Fleet) Register(spec WorkerSpec) error {
	return f.change(spec, func(specs []WorkerSpec) []WorkerSpec {
		at := slices.IndexFunc(specs, func(o WorkerSpec) bool { return o.ID == spec.ID && o.Key() == spec.Key() })
		if at < 0 {
			return append(specs, spec)
		}
		specs[at] = spec
		return specs
	})
}

// Registered returns what was registered over HTTP under an id, as it was given.
func (f *Fleet) Registered(id string) []WorkerSpec {
	if f.offline {
		return nil
	}
	f.http.mu.Lock()
	defer f.http.mu.Unlock()
	var out []WorkerSpec
	for _, s := range f.http.specs {
		if s.ID == id {
			out = append(out, s)
		}
	}
	return out
}

// Delete removes everything that was registered under an id. It fails with
// ErrUnknownWorker where nobody has it, with ErrConflict where it is another
// source's.
func (f *Fleet) Delete(id string) error {
	return f.withdraw(id, func(s WorkerSpec) bool { return s.ID == id })
}

// Unregister removes one model of an id and leaves the others.
func (f *Fleet) Unregister(id string, key SetKey) error {
	return f.withdraw(id, func(s WorkerSpec) bool { return s.ID == id && s.Key() == key })
}

// change checks spec and puts edit's result in force.
func (f *Fleet) change(spec WorkerSpec, edit func([]WorkerSpec) []WorkerSpec) error {
	if f.offline {
		return ErrCapture
	}
	if err := spec.Validate(); err != nil {
		return err
	}
	h := f.http
	ranks, err := spec.ranks()
	if err != nil {
		return fmt.Errorf("%w: worker %q: %w", ErrInvalid, spec.ID, err)
	}
	for _, r := range ranks {
		if err := errors.Join(h.check(r.endpoint), h.check(r.replay)); err != nil {
			return fmt.Errorf("worker %q: %w", spec.ID, err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	next := edit(slices.Clone(h.specs))
	if err := h.collides(spec, next); err != nil {
		return err
	}
	return h.commit(next)
}

func (h *httpSource) check(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	return h.fleet.o.Allow.Check(endpoint)
}

// collides tries the new registrations among everything that is stated: spec
// must come into force, and nothing that is in force may fall out of it.
func (h *httpSource) collides(spec WorkerSpec, next []WorkerSpec) error {
	f := h.fleet
	f.reconciling.Lock()
	defer f.reconciling.Unlock()
	before := h.problems(h.entries(h.specs))
	for _, p := range h.problems(h.entries(next)) {
		own := p.Source == "http" && p.Entry == spec.ID
		if own || !slices.ContainsFunc(before, p.sameEntry) {
			return p.Err
		}
	}
	return nil
}

// problems are what would stand in the way if these were the registrations:
// under reconciling.
func (h *httpSource) problems(entries []entry) []Problem {
	f := h.fleet
	f.mu.Lock()
	saved := h.state.entries
	h.state.entries = entries
	all, models, _ := f.stated()
	h.state.entries = saved
	f.mu.Unlock()
	_, problems := f.statements(all, models)
	return problems
}

func (p Problem) sameEntry(o Problem) bool {
	return p.Source == o.Source && p.Where == o.Where && p.Entry == o.Entry
}

// commit writes the file, then puts it in force: under h.mu.
func (h *httpSource) commit(next []WorkerSpec) error {
	if h.path != "" {
		raw, err := json.MarshalIndent(registry{1, next}, "", " ")
		if err != nil {
			return err
		}
		if err := replaceFile(h.path, append(raw, '\n')); err != nil {
			return fmt.Errorf("keep registrations: %w", err)
		}
	}
	h.specs = next
	h.fleet.update(h.state, h.entries(next), nil, nil)
	return nil
}

func (f *Fleet) withdraw(id string, match func(WorkerSpec) bool) error {
	if f.offline {
		return ErrCapture
	}
	h := f.http
	h.mu.Lock()
	defer h.mu.Unlock()
	next := slices.DeleteFunc(slices.Clone(h.specs), match)
	if len(next) == len(h.specs) {
		return h.notOurs(id)
	}
	return h.commit(next)
}

// notOurs tells whose worker it is that HTTP cannot remove.
func (h *httpSource) notOurs(id string) error {
	f := h.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, w := range f.workers {
		if k.id == id {
			return fmt.Errorf("%w: worker %q is stated at %s and can be removed only there", ErrConflict, id, w.where)
		}
	}
	return unknownWorker(id)
}

// replaceFile puts raw in the place of path at once or not at all.
func replaceFile(path string, raw []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(raw)
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
