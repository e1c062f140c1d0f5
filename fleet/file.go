package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settleDelay lets a burst of changes (write, rename, chmod) come to its end
// before the file is read.
const settleDelay = 50 * time.Millisecond

// fileSource is one watched configuration file.
type fileSource struct {
	fleet *Fleet
	state *sourceState
	path  string

	// mu guards what follows.
	mu   sync.Mutex
	raw  []byte
	read bool
	good map[string]fileEntry // the last good state of each entry, by kind and name
	dns  []DNSSpec
}

func (f *Fleet) addFile(path string) {
	f.files = append(f.files, &fileSource{fleet: f, state: f.addSource(path), path: path, good: map[string]fileEntry{}})
}

// services are the file's DNS entries.
func (s *fileSource) services() []DNSSpec {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dns
}

// load reads the file and states what it says. What cannot be read keeps what
// was. It reports whether anything was new.
func (s *fileSource) load() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	raw, err := readConfigFile(s.path)
	if err == nil && s.read && len(raw) == 0 {
		err = errors.New("empty: to have no workers write `workers: []`")
	}
	if err == nil && s.read && string(raw) == string(s.raw) {
		return false
	}
	var entries []fileEntry
	if err == nil {
		entries, err = parseFile(s.path, raw, s.fleet.endpointDefaults())
	}
	if err != nil {
		s.unreadable(err)
		return false
	}
	s.raw, s.read = raw, true
	s.take(entries)
	return true
}

func readConfigFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxConfig+1))
}

func (f *Fleet) endpointDefaults() EndpointDefaults {
	return EndpointDefaults{Model: f.o.EndpointsModel, EventPortBase: f.o.EventPortBase, ReplayPortBase: f.o.ReplayPortBase}
}

// unreadable keeps everything and says so, once per reason.
func (s *fileSource) unreadable(err error) {
	s.fleet.mu.Lock()
	defer s.fleet.mu.Unlock()
	p := Problem{Source: s.path, Where: s.path, Err: err}
	old := s.state.problems
	if len(old) > 0 && old[0].Where == s.path && old[0].Err.Error() == err.Error() {
		return
	}
	s.state.problems = append([]Problem{p}, old...)
	if len(old) > 0 && old[0].Where == s.path {
		s.state.problems = append([]Problem{p}, old[1:]...)
	}
	s.fleet.problems = append(s.fleet.problems, p)
	s.raw = nil // the same content counts as new once it can be read
	s.fleet.log.Error("configuration unreadable, everything stays", "file", s.path, "reason", err)
}

// take puts the file's entries in force, a bad one's last good state instead of
// it: under mu.
func (s *fileSource) take(entries []fileEntry) {
	var list []entry
	var models []ModelSpec
	var problems []Problem
	good := map[string]fileEntry{}
	s.dns = nil
	for _, e := range entries {
		key := e.key()
		if e.err != nil {
			problems = append(problems, Problem{Source: s.path, Where: fmt.Sprintf("%s:%d", s.path, e.line), Entry: e.id, Err: e.err})
			s.fleet.log.Error("configuration entry skipped", "file", s.path, "line", e.line, "entry", e.id, "reason", e.err)
			old, ok := s.good[key]
			if _, again := good[key]; !ok || again {
				continue
			}
			e = old
		}
		good[key] = e
		switch {
		case e.model != nil:
			models = append(models, *e.model)
		case e.worker != nil:
			list = append(list, entry{spec: *e.worker, source: s.path, where: fmt.Sprintf("%s:%d", s.path, e.line)})
		case e.dns != nil:
			s.dns = append(s.dns, *e.dns)
		}
	}
	s.good = good
	s.fleet.mu.Lock()
	s.state.entries, s.state.models, s.state.problems = list, models, problems
	s.fleet.mu.Unlock()
}

// key names an entry across reloads.
func (e *fileEntry) key() string {
	switch {
	case e.id == "":
		return ""
	case e.model != nil:
		return "model\x00" + e.id
	case e.dns != nil:
		return "dns\x00" + e.id
	case e.worker != nil:
		return "worker\x00" + e.id + "\x00" + e.worker.Model
	}
	return "worker\x00" + e.id
}

// watch reloads the file when it changes, until ctx ends. It watches the
// directories on the way to the file, so that a rename over it and the swap of
// a ConfigMap's link are seen, and looks at the file now and then in any case.
func (s *fileSource) watch(ctx context.Context) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		s.fleet.log.Warn("file watch unavailable, polling only", "file", s.path, "reason", err)
		s.poll(ctx)
		return
	}
	defer w.Close()
	watched := map[string]bool{}
	s.watchDirs(w, watched)
	poll := time.NewTicker(s.fleet.o.Timing.Poll)
	defer poll.Stop()
	settle := time.NewTimer(0) // what changed before the watch began
	defer settle.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case _, ok := <-w.Events:
			if !ok {
				return
			}
			settle.Reset(settleDelay)
		case err := <-w.Errors:
			if err != nil && !errors.Is(err, fsnotify.ErrEventOverflow) {
				s.fleet.log.Warn("file watch", "file", s.path, "reason", err)
			}
			settle.Reset(settleDelay)
		case <-poll.C:
			s.watchDirs(w, watched)
			if !s.unsettled() {
				s.reload(true)
			}
		case <-settle.C:
			s.watchDirs(w, watched)
			if s.unsettled() {
				settle.Reset(settleDelay)
				continue
			}
			s.reload(false)
		}
	}
}

// unsettled: the file was written to just now, and whoever does it may not be
// through.
func (s *fileSource) unsettled() bool {
	st, err := os.Stat(s.path)
	if err != nil {
		return false
	}
	age := time.Since(st.ModTime())
	return age >= 0 && age < settleDelay
}

// poll is watch without a watcher.
func (s *fileSource) poll(ctx context.Context) {
	t := time.NewTicker(s.fleet.o.Timing.Poll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			s.reload(true)
		}
	}
}

// reload puts a changed file in force. always: also what the file refers to
// (model directories) may have changed.
func (s *fileSource) reload(always bool) {
	changed := s.load()
	if changed {
		s.fleet.log.Info("configuration loaded", "file", s.path)
		s.fleet.dns.nudge()
	}
	if changed || always {
		s.fleet.reconcile()
	}
}

// watchDirs watches the file's directory and that of what it links to, and no
// other any more.
func (s *fileSource) watchDirs(w *fsnotify.Watcher, watched map[string]bool) {
	want := map[string]bool{filepath.Dir(s.path): true}
	if real, err := filepath.EvalSymlinks(s.path); err == nil {
		want[filepath.Dir(real)] = true
	}
	for d := range watched {
		if !want[d] {
			_ = w.Remove(d)
			delete(watched, d)
		}
	}
	for d := range want {
		if !watched[d] && w.Add(d) == nil {
			watched[d] = true
		}
	}
}
