package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

type indexSet = *index.Set

// Options of a Fleet. Every source is optional.
type Options struct {
	Logger *slog.Logger
	Timing Timing

	// Models and Workers are what flags say.
	Models  []ModelSpec
	Workers []WorkerSpec
	// DNS are headless services beside those of the file.
	DNS []DNSSpec
	// ConfigFile is watched; "" for none. It may also be, or hold, the list of
	// endpoints of an llm-d router.
	ConfigFile string
	// EndpointsFile is a second such file; "" for none.
	EndpointsFile string
	// EndpointsModel is the model of an llm-d endpoint that has no label for
	// it; EventPortBase + rankIndex is its event port (5557) and
	// ReplayPortBase + rankIndex its replay port, 0 for none.
	EndpointsModel string
	EventPortBase  int
	ReplayPortBase int
	// StateDir keeps what was registered over HTTP; "" keeps it in memory.
	StateDir string
	// Allow bounds what a registration may make the daemon dial; nil is
	// private and loopback addresses.
	Allow *AllowList

	// Index are the options of every worker set's index.
	Index index.Options
	// MaxReplays bounds the replays that run at once, 8.
	MaxReplays int

	// Restore, where set, puts a snapshot's entries of one stream into an
	// empty index stream and returns the mark that belongs to them. It is
	// called at most once per stream, before the stream's first message, and
	// never for a worker's later lives.
	Restore func(key SetKey, worker string, rank int, view normalize.View, into *index.Stream) (Mark, bool)

	// Resolver looks names up; nil is the system's. The names in endpoints are
	// looked up by it if it is a *net.Resolver.
	Resolver Resolver
}

// Fleet is the workers that are wanted, those that are there, and what they
// hold. Its methods may be called concurrently.
type Fleet struct {
	o       Options
	log     *slog.Logger
	start   time.Time
	offline bool
	slots   slots
	budget  byteBudget
	wg      sync.WaitGroup

	// reconciling makes reconcile one at a time; it is taken before mu and
	// held while files are read.
	reconciling sync.Mutex

	// mu guards what follows. A publisher's lock may be held when it is taken,
	// never the other way round.
	mu          sync.Mutex
	ctx         context.Context // of Run, nil before
	sources     []*sourceState
	workers     map[workerKey]*worker
	sets        map[SetKey]*set
	pictures    map[SetKey]*Picture
	models      map[string]ModelSpec
	generations map[workerKey]uint64
	closing     map[workerKey]chan struct{}
	problems    []Problem

	names atomic.Pointer[directory]

	http  *httpSource
	files []*fileSource
	dns   *dnsSource
}

// Problem is an entry of a source that is not in force.
type Problem struct {
	// Source is "flags", "http", "dns" or a file's path; Where adds the line.
	Source, Where string
	// Entry is the worker's id or the model's name, where there is one.
	Entry string
	Err   error
}

// entry is one worker as a source states it.
type entry struct {
	spec          WorkerSpec
	source, where string
	guarded       bool
}

// sourceState is the newest statement of one source. Sources stand in the order
// of precedence.
type sourceState struct {
	name     string
	entries  []entry
	models   []ModelSpec
	problems []Problem
}

// New reads all sources once. It fails only for what an operator must mend
// before anything can run: flags that are wrong, a state directory that cannot
// be used. Errors in files are Problems.
func New(o Options) (*Fleet, error) {
	f := newFleet(o)
	if err := f.addFlags(); err != nil {
		return nil, err
	}
	for _, path := range []string{o.ConfigFile, o.EndpointsFile} {
		if path != "" {
			f.addFile(path)
		}
	}
	if err := f.addHTTP(); err != nil {
		return nil, err
	}
	f.addDNS()
	for _, s := range f.files {
		s.load()
	}
	f.reconcile()
	return f, nil
}

func newFleet(o Options) *Fleet {
	o.Timing = o.Timing.withDefaults()
	if o.MaxReplays <= 0 {
		o.MaxReplays = 8
	}
	if o.EventPortBase == 0 {
		o.EventPortBase = 5557
	}
	f := &Fleet{
		o: o, log: o.Logger, start: time.Now(), slots: newSlots(o.MaxReplays),
		workers: map[workerKey]*worker{}, sets: map[SetKey]*set{}, pictures: map[SetKey]*Picture{},
		models: map[string]ModelSpec{}, generations: map[workerKey]uint64{}, closing: map[workerKey]chan struct{}{},
	}
	f.budget.max = maxPendingTotal
	if f.log == nil {
		f.log = slog.Default()
	}
	f.names.Store(&directory{})
	return f
}

// addFlags takes the workers and models of the command line, all or nothing.
func (f *Fleet) addFlags() error {
	s := f.addSource("flags")
	var errs []error
	for i := range f.o.Models {
		errs = append(errs, f.o.Models[i].Validate())
	}
	for i := range f.o.Workers {
		errs = append(errs, f.o.Workers[i].Validate())
		s.entries = append(s.entries, entry{spec: f.o.Workers[i], source: "flags", where: "flags"})
	}
	for i := range f.o.DNS {
		errs = append(errs, f.o.DNS[i].Validate())
	}
	s.models = f.o.Models
	return errors.Join(errs...)
}

func (f *Fleet) addSource(name string) *sourceState {
	s := &sourceState{name: name}
	f.sources = append(f.sources, s)
	return s
}

// update replaces what a source states and reconciles.
func (f *Fleet) update(s *sourceState, entries []entry, models []ModelSpec, problems []Problem) {
	f.mu.Lock()
	s.entries, s.models, s.problems = entries, models, problems
	f.mu.Unlock()
	f.reconcile()
}

// Run watches the sources and subscribes to the workers until ctx ends, and
// returns when everything it started has ended. It is called once.
func (f *Fleet) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f.mu.Lock()
	if f.ctx != nil || f.offline {
		f.mu.Unlock()
		return errors.New("fleet: BUG: Run called twice, or on a capture's fleet")
	}
	f.ctx = ctx
	for _, w := range f.workers {
		if w.admitted() {
			w.start()
		}
	}
	f.mu.Unlock()
	for _, s := range f.files {
		f.wg.Go(func() { s.watch(ctx) })
	}
	f.wg.Go(func() { f.dns.run(ctx) })
	<-ctx.Done()
	f.reconciling.Lock() // nothing is started after this
	defer f.reconciling.Unlock()
	f.wg.Wait()
	return context.Cause(ctx)
}

// reconcile brings the fleet to what the sources state.
func (f *Fleet) reconcile() {
	f.reconciling.Lock()
	defer f.reconciling.Unlock()
	f.mu.Lock()
	if f.ctx != nil && f.ctx.Err() != nil {
		f.mu.Unlock()
		return
	}
	entries, models, problems := f.stated()
	f.mu.Unlock()

	want, more := f.statements(entries, models)

	f.mu.Lock()
	defer f.mu.Unlock()
	f.problems = append(problems, more...)
	f.models = models
	f.apply(want)
	f.redraw()
}

// stated merges the sources, in order of precedence: under mu.
func (f *Fleet) stated() (entries []entry, models map[string]ModelSpec, problems []Problem) {
	models = map[string]ModelSpec{}
	for _, s := range f.sources {
		entries = append(entries, s.entries...)
		problems = append(problems, s.problems...)
		for _, m := range s.models {
			if _, ok := models[m.Name]; !ok {
				models[m.Name] = m
			}
		}
	}
	return entries, models, problems
}

// statements settles every entry, and refuses a second subscription to one
// publisher. An entry that is bad now keeps the life that it has.
func (f *Fleet) statements(entries []entry, models map[string]ModelSpec) ([]*statement, []Problem) {
	c := claims{byKey: map[workerKey]*statement{}, byPublisher: map[string]*statement{}}
	var problems []Problem
	for i := range entries {
		e := &entries[i]
		var m *ModelSpec
		if spec, ok := models[e.spec.Model]; ok {
			m = &spec
		}
		s, err := f.state(e, m)
		if err == nil {
			err = c.add(s)
		}
		if err == nil {
			continue
		}
		problems = append(problems, Problem{Source: e.source, Where: e.where, Entry: e.spec.ID, Err: err})
		if old := f.life(e); old != nil {
			_ = c.add(old)
		}
	}
	return c.list, problems
}

// life is the statement in force of the worker that e speaks of.
func (f *Fleet) life(e *entry) *statement {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, w := range f.workers {
		if k.id == e.spec.ID && k.set.Model == e.spec.Model && w.source == e.source {
			s := w.statement
			return &s
		}
	}
	return nil
}

// claims are the statements so far and what they occupy.
type claims struct {
	list        []*statement
	byKey       map[workerKey]*statement
	byPublisher map[string]*statement
}

// add takes a statement, or says whom it collides with.
func (c *claims) add(s *statement) error {
	if o, ok := c.byKey[s.key]; ok {
		return fmt.Errorf("%w: worker %q (%s) is stated already at %s", ErrConflict, s.spec.ID, s.where, o.where)
	}
	own := map[string]int{}
	for _, r := range s.ranks {
		k := publisherKey(r)
		if o, ok := c.byPublisher[k]; ok {
			return fmt.Errorf("%w: worker %q (%s) rank %d and worker %q (%s) would subscribe to one publisher, %s",
				ErrConflict, s.spec.ID, s.where, r.rank, o.spec.ID, o.where, r.endpoint)
		}
		if o, ok := own[k]; ok && k != "" {
			return fmt.Errorf("%w: worker %q (%s) ranks %d and %d would subscribe to one publisher, %s",
				ErrConflict, s.spec.ID, s.where, o, r.rank, r.endpoint)
		}
		own[k] = r.rank
	}
	c.byKey[s.key] = s
	for _, r := range s.ranks {
		if k := publisherKey(r); k != "" {
			c.byPublisher[k] = s
		}
	}
	c.list = append(c.list, s)
	return nil
}

// apply ends the lives that are no longer wanted and begins those that are:
// under mu.
func (f *Fleet) apply(want []*statement) {
	keep := map[workerKey]bool{}
	for _, s := range want {
		if w := f.workers[s.key]; w != nil && w.sameLife(s) && w.reshape(s.ranks, time.Now()) {
			keep[s.key] = true
			w.touch(s)
		}
	}
	for k, w := range f.workers {
		if !keep[k] {
			f.remove(w)
		}
	}
	for _, s := range want {
		if !keep[s.key] {
			f.add(s)
		}
	}
	for _, s := range f.sets {
		f.admit(s)
	}
}

// touch takes over what may change within a life.
func (w *worker) touch(s *statement) {
	if w.spec.OnGap != s.spec.OnGap {
		go func(pubs []*publisher, clear bool) {
			for _, p := range pubs {
				p.setOnGap(clear)
			}
		}(w.pubs, s.spec.OnGap == OnGapClear)
	}
	w.statement = *s
}

func (f *Fleet) add(s *statement) {
	f.generations[s.key]++
	w := &worker{statement: *s, life: s, fleet: f, generation: f.generations[s.key], since: time.Now(), prev: f.closing[s.key]}
	st := f.sets[s.key.set]
	if st == nil {
		st = &set{key: s.key.set, index: index.New(f.o.Index)}
		f.sets[s.key.set] = st
	}
	w.set = st
	st.workers = append(st.workers, w)
	f.workers[s.key] = w
	f.log.Info("worker added", "worker", s.spec.ID, "model", s.spec.Model, "namespace", s.spec.Namespace,
		"role", s.spec.Role, "from", s.where, "generation", w.generation, "ranks", len(s.ranks))
}

func (f *Fleet) remove(w *worker) {
	delete(f.workers, w.key)
	w.set.workers = slices.DeleteFunc(w.set.workers, func(o *worker) bool { return o == w })
	if len(w.set.workers) == 0 {
		delete(f.sets, w.key.set)
	}
	w.stop()
	f.awaitEnd(w)
	f.log.Info("worker removed", "worker", w.spec.ID, "model", w.spec.Model, "generation", w.generation)
}

// awaitEnd lets the worker's next life wait for the end of this one.
func (f *Fleet) awaitEnd(w *worker) {
	if len(w.gone) == 0 {
		return
	}
	gone, done := w.gone, make(chan struct{})
	f.closing[w.key] = done
	f.wg.Go(func() {
		for _, ended := range gone {
			<-ended
		}
		close(done)
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.closing[w.key] == done {
			delete(f.closing, w.key)
		}
	})
}

// admit opens the set to who may come in: under mu.
func (f *Fleet) admit(s *set) {
	for _, w := range s.admit() {
		if err := w.open(time.Now()); err != nil {
			f.problems = append(f.problems, Problem{Source: w.source, Where: w.where, Entry: w.spec.ID, Err: err})
			w.differs = []string{err.Error()}
			continue
		}
		f.log.Info("worker admitted", "worker", w.spec.ID, "model", w.spec.Model, "generation", w.generation)
		if f.ctx != nil {
			w.start()
		}
	}
	for _, w := range s.workers {
		if !w.admitted() && w.toldDiffers != fmt.Sprint(w.differs) {
			w.toldDiffers = fmt.Sprint(w.differs)
			f.log.Warn("worker rejected", "worker", w.spec.ID, "model", w.spec.Model, "differs", w.differs)
		}
	}
}

// refresh draws one set again, because a rank appeared.
func (f *Fleet) refresh(key SetKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.sets[key]
	if s == nil {
		return
	}
	f.pictures[key] = s.picture(f.models[key.Model].Aliases)
	f.names.Store(f.directory())
}

// redraw draws every set again: under mu.
func (f *Fleet) redraw() {
	f.pictures = make(map[SetKey]*Picture, len(f.sets))
	for k, s := range f.sets {
		f.pictures[k] = s.picture(f.models[k.Model].Aliases)
	}
	f.names.Store(f.directory())
}

// Problems lists the entries that are not in force, and why.
func (f *Fleet) Problems() []Problem {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.problems)
}
