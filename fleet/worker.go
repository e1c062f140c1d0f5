package fleet

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// workerKey is one worker for one model. Several models may be served under one
// id; part tells apart what a capture has under one name with other settings.
type workerKey struct {
	id   string
	set  SetKey
	part string
}

// statement is what a spec, its model's settings and the model directory come
// to: everything that decides what the worker's blocks are. Two lives of one
// worker may be one only if their statements are equal.
type statement struct {
	key   workerKey
	spec  WorkerSpec // defaults filled in, overrides applied, adapters merged
	ranks []rankEndpoint
	view  normalize.View
	// config is what the worker brings into its set's configuration.
	config               SetConfig
	imageFrom, videoFrom string
	blockSize            uint32
	where, source        string
	guarded              bool // dial only what the allow-list allows
}

// worker is one life of one worker in its set. Fields are guarded by the
// fleet's lock unless said otherwise; generation, life and set do not change.
type worker struct {
	statement // as stated now
	// life is the statement that the life began with. It does not change, so
	// publishers read it without the fleet's lock.
	life       *statement
	fleet      *Fleet
	set        *set
	generation uint64
	since      time.Time
	// differs is why the worker is not admitted; nil where it is.
	differs     []string
	toldDiffers string // as it was last logged

	// pubs are the ranks' publishers; the slice is replaced, never changed.
	pubs []*publisher
	runs map[*publisher]run
	// gone are the ends of ranks that this life no longer has, prev that of the
	// life before: whoever subscribes waits for them.
	gone []chan struct{}
	prev chan struct{}

	// ownerMu guards owners: which publisher feeds a rank.
	ownerMu sync.Mutex
	owners  map[int]*publisher
}

// state merges the model's settings into the worker's own.
func (f *Fleet) state(e *entry, m *ModelSpec) (*statement, error) {
	if err := e.spec.Validate(); err != nil {
		return nil, err
	}
	s := &statement{spec: e.spec.withDefaults(), where: e.where, source: e.source, guarded: e.guarded}
	ranks, err := s.spec.ranks()
	if err != nil {
		return nil, err
	}
	s.ranks = ranks
	if m == nil {
		m = &ModelSpec{Name: e.spec.Model}
	}
	if err := s.resolve(m); err != nil {
		return nil, fmt.Errorf("%w: worker %q: %w", ErrInvalid, s.spec.ID, err)
	}
	return s, nil
}

// resolve settles token ids, adapters and the rest against the model's.
func (s *statement) resolve(m *ModelSpec) error {
	w := &s.spec
	s.key = workerKey{id: w.ID, set: w.Key()}
	s.blockSize = w.BlockSize
	if s.blockSize == 0 {
		s.blockSize = m.BlockSize
	}
	s.config.TowerConnectorLora = w.TowerConnectorLora
	if s.config.TowerConnectorLora == nil {
		s.config.TowerConnectorLora = m.TowerConnectorLora
	}
	w.Loras = mergeLoras(m.Loras, w.Loras)
	if err := s.resolveTokens(m); err != nil {
		return err
	}
	mode, err := normalize.ParseExtraKeysMode(w.ExtraKeys)
	if err != nil {
		return err
	}
	s.view.ExtraKeys = mode
	if t := s.config.TowerConnectorLora; t != nil {
		s.view.TowerConnectorLora = *t
	}
	return nil
}

// resolveTokens finds the placeholder token ids: the worker's own, the model's,
// the model directory's, in this order.
func (s *statement) resolveTokens(m *ModelSpec) error {
	dir := s.spec.ModelDir
	if dir == "" {
		dir = m.ModelDir
	}
	r, err := normalize.ResolveTokenIDs(
		normalize.ExplicitIDs{Image: s.spec.ImageTokenID, Video: s.spec.VideoTokenID},
		normalize.ExplicitIDs{Image: m.ImageTokenID, Video: m.VideoTokenID}, dir)
	if err != nil {
		return err
	}
	c := &s.config
	s.view.IDs = r.IDs
	if r.IDs.HasImage {
		c.ImageTokenID, s.imageFrom = &r.IDs.Image, sourceName(r.ImageSource, dir, r.ImageField)
	}
	if r.IDs.HasVideo {
		c.VideoTokenID, s.videoFrom = &r.IDs.Video, sourceName(r.VideoSource, dir, r.VideoField)
	}
	c.Fingerprint, err = fingerprint(dir)
	return err
}

// mergeLoras is the model's adapters and the worker's own, by name.
func mergeLoras(model, own []LoraSpec) []LoraSpec {
	out := slices.Clone(model)
	for _, l := range own {
		i := slices.IndexFunc(out, func(o LoraSpec) bool { return o.Name == l.Name })
		if i < 0 {
			out = append(out, l)
			continue
		}
		out[i].Aliases = slices.Concat(out[i].Aliases, l.Aliases)
	}
	return out
}

// sameLife: nothing that decides about blocks or subscriptions differs, but for
// ranks that came or went beside one that stays.
func (s *statement) sameLife(o *statement) bool {
	stays := func(r rankEndpoint) bool { return slices.Contains(o.ranks, r) }
	return s.key == o.key && s.view == o.view && s.blockSize == o.blockSize && s.guarded == o.guarded &&
		slices.ContainsFunc(s.ranks, stays) && s.spec.Topic == o.spec.Topic && s.spec.EagleDrop == o.spec.EagleDrop &&
		equalPtr(s.spec.RankIndex, o.spec.RankIndex) && reflect.DeepEqual(s.config, o.config)
}

func equalPtr[T comparable](a, b *T) bool {
	return a == b || a != nil && b != nil && *a == *b
}

// exact: image requests can be answered exactly.
func (s *statement) exact() bool {
	return s.view.IDs.HasImage && s.view.ExtraKeys != normalize.None
}

// mmReason is why the worker cannot answer exactly; "" where it can.
func (s *statement) mmReason() normalize.Reason {
	switch {
	case s.exact():
		return ""
	case !s.view.IDs.HasImage:
		return normalize.NoImageTokenID
	}
	return normalize.ExtraKeysHidden
}

// differences lists the fields that both state and that differ.
func (c SetConfig) differences(o SetConfig) []string {
	var d []string
	id := func(name string, a, b *uint32) {
		if a != nil && b != nil && *a != *b {
			d = append(d, fmt.Sprintf("%s: %d here, %d in the set", name, *a, *b))
		}
	}
	id("image_token_id", c.ImageTokenID, o.ImageTokenID)
	id("video_token_id", c.VideoTokenID, o.VideoTokenID)
	if a, b := c.TowerConnectorLora, o.TowerConnectorLora; a != nil && b != nil && *a != *b {
		d = append(d, fmt.Sprintf("tower_connector_lora: %t here, %t in the set", *a, *b))
	}
	if c.Fingerprint != "" && o.Fingerprint != "" && c.Fingerprint != o.Fingerprint {
		d = append(d, fmt.Sprintf("model_dir fingerprint: %s here, %s in the set", c.Fingerprint, o.Fingerprint))
	}
	return d
}

// with adds what o states and c does not.
func (c SetConfig) with(o SetConfig) SetConfig {
	if c.ImageTokenID == nil {
		c.ImageTokenID = o.ImageTokenID
	}
	if c.VideoTokenID == nil {
		c.VideoTokenID = o.VideoTokenID
	}
	if c.TowerConnectorLora == nil {
		c.TowerConnectorLora = o.TowerConnectorLora
	}
	if c.Fingerprint == "" {
		c.Fingerprint = o.Fingerprint
	}
	return c
}

// admitted: the worker is part of its set.
func (w *worker) admitted() bool { return w.pubs != nil }

// claim makes p the feeder of a rank, unless another publisher is.
func (w *worker) claim(rank int, p *publisher) bool {
	w.ownerMu.Lock()
	defer w.ownerMu.Unlock()
	if o := w.owners[rank]; o != nil {
		return o == p
	}
	w.owners[rank] = p
	return true
}

// control is the check of each dial, nil for what an operator wrote down.
func (w *worker) control(endpoint string) func(network, address string) error {
	if !w.life.guarded {
		return nil
	}
	return w.fleet.o.Allow.Control(endpoint)
}

// release takes everything from p that it feeds.
func (w *worker) release(p *publisher) {
	w.ownerMu.Lock()
	defer w.ownerMu.Unlock()
	maps.DeleteFunc(w.owners, func(_ int, o *publisher) bool { return o == p })
}

// open makes the publishers. They subscribe once the fleet runs.
func (w *worker) open(now time.Time) error {
	w.owners, w.runs = map[int]*publisher{}, map[*publisher]run{}
	pubs, err := w.openRanks(w.ranks, now)
	if err == nil {
		w.pubs = pubs
	}
	return err
}

// openRanks makes the publishers of these ranks, all or none.
func (w *worker) openRanks(ranks []rankEndpoint, now time.Time) (pubs []*publisher, err error) {
	defer func() {
		if err == nil {
			return
		}
		for _, p := range pubs {
			w.release(p)
			p.close()
		}
	}()
	pubs = make([]*publisher, 0, len(ranks))
	for _, at := range ranks {
		p := newPublisher(w, at, now)
		pubs = append(pubs, p)
		if !w.claim(at.rank, p) {
			return pubs, fmt.Errorf("%w: worker %q: another rank's batches name rank %d", ErrConflict, w.spec.ID, at.rank)
		}
		if w.fleet.offline {
			continue
		}
		if p.sub, err = zmqwire.NewSubscriber(p.subscription()); err != nil {
			return pubs, err
		}
	}
	return pubs, nil
}

// reshape ends the ranks that are no longer stated and begins those that are
// new; the others go on as they are. It is false, and nothing has changed, where
// that takes a new life.
func (w *worker) reshape(ranks []rankEndpoint, now time.Time) bool {
	if !w.admitted() || slices.Equal(w.ranks, ranks) {
		return true
	}
	var fresh []rankEndpoint
	for _, at := range ranks {
		if !slices.ContainsFunc(w.pubs, func(p *publisher) bool { return p.at.rank == at.rank }) {
			fresh = append(fresh, at)
		}
	}
	var stay, leave []*publisher
	for _, p := range w.pubs {
		switch at := slices.IndexFunc(ranks, func(r rankEndpoint) bool { return r.rank == p.at.rank }); {
		case at < 0:
			leave = append(leave, p)
		case ranks[at] != p.at:
			return false // another publisher in its place
		default:
			stay = append(stay, p)
		}
	}
	opened, err := w.openRanks(fresh, now)
	if err != nil {
		return false
	}
	for _, p := range leave {
		w.drop(p)
	}
	w.pubs = append(stay, opened...)
	if w.fleet.ctx != nil {
		for _, p := range opened {
			w.run(p)
		}
	}
	return true
}

func (p *publisher) subscription() zmqwire.SubscriberConfig {
	return zmqwire.SubscriberConfig{
		Endpoint: p.at.endpoint, Bind: p.at.bind, Topic: p.worker.life.spec.Topic,
		BackoffMin: p.fleet.o.Timing.Reconnect, BackoffMax: p.fleet.o.Timing.MaxReconnect,
		Buffer: subscriberBuffer, Control: p.worker.control(p.at.endpoint), Resolver: p.fleet.dialResolver(), Logger: p.log,
	}
}

// subscriberBuffer is what one of many subscriptions reads through.
const subscriberBuffer = 32 << 10

// run is a publisher's subscription: how to end it, and when it has.
type run struct {
	stop  context.CancelFunc
	ended chan struct{}
}

// start subscribes: under the fleet's lock, once the fleet runs.
func (w *worker) start() {
	for _, p := range w.pubs {
		w.run(p)
	}
}

// run subscribes p, once those before it have let go of the endpoints.
func (w *worker) run(p *publisher) {
	ctx, stop := context.WithCancel(w.fleet.ctx)
	r := run{stop, make(chan struct{})}
	w.runs[p] = r
	before := slices.Clone(w.gone)
	if w.prev != nil {
		before = append(before, w.prev)
	}
	w.fleet.wg.Go(func() {
		defer close(r.ended)
		for _, ended := range before {
			<-ended
		}
		p.run(ctx)
		p.close()
	})
}

// drop ends p, which leaves the worker's ranks. It waits for nothing.
func (w *worker) drop(p *publisher) {
	w.release(p)
	r, running := w.runs[p]
	if !running {
		p.close()
		return
	}
	delete(w.runs, p)
	r.stop()
	w.gone = append(slices.DeleteFunc(w.gone, closed), r.ended)
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// stop ends the worker's life. It waits for nothing.
func (w *worker) stop() {
	for _, p := range w.pubs {
		w.drop(p)
	}
}

// set is one worker set: its tree and its workers, in the order in which they
// came. Guarded by the fleet's lock; the picture is read without it.
type set struct {
	key     SetKey
	index   indexSet
	workers []*worker
	config  SetConfig
}

// admit lets in who agrees with the incumbents, oldest first. It returns the
// workers that are new among the members.
func (s *set) admit() (in []*worker) {
	s.config = SetConfig{}
	for _, w := range s.workers {
		if w.admitted() {
			s.config = s.config.with(w.config)
		}
	}
	for _, w := range s.workers {
		if w.admitted() {
			continue
		}
		if w.differs = w.config.differences(s.config); len(w.differs) == 0 {
			w.differs = nil
			s.config = s.config.with(w.config)
			in = append(in, w)
		}
	}
	return in
}

// picture draws the set as it is now.
func (s *set) picture(aliases []string) *Picture {
	p := &Picture{Key: s.key, Index: s.index, Adapters: map[string]string{}, Aliases: aliases, Config: s.config}
	for _, w := range s.workers {
		if !w.admitted() {
			p.Rejected = append(p.Rejected, Rejection{w.spec.ID, w.differs, w.since})
			continue
		}
		for _, pub := range w.pubs {
			p.Members = append(p.Members, *pub.members.Load()...)
		}
		for _, l := range w.spec.Loras {
			p.Adapters[l.Name] = l.Name
		}
	}
	s.loraAliases(p.Adapters)
	slices.SortFunc(p.Members, func(a, b *Member) int {
		if c := strings.Compare(a.Worker, b.Worker); c != 0 {
			return c
		}
		return a.Rank - b.Rank
	})
	for _, m := range p.Members {
		p.Streams = append(p.Streams, m.stream)
		v := slices.Index(p.Views, m.View)
		if v < 0 {
			v = len(p.Views)
			p.Views = append(p.Views, m.View)
		}
		p.ViewOf = append(p.ViewOf, v)
	}
	p.Roster = s.index.NewRoster(p.Streams, p.ViewOf)
	return p
}

// loraAliases adds the adapters' other names; no name takes an adapter's own.
func (s *set) loraAliases(names map[string]string) {
	for _, w := range s.workers {
		if !w.admitted() {
			continue
		}
		for _, l := range w.spec.Loras {
			for _, a := range l.Aliases {
				if _, taken := names[a]; !taken {
					names[a] = l.Name
				}
			}
		}
	}
}
