package fleet

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// WorkerView is one worker as an operator sees it.
type WorkerView struct {
	// Spec with defaults filled in and the model's adapters merged.
	Spec WorkerSpec
	// Source is "flags", "http", "dns" or a file's path; Where adds the line.
	Source, Where string
	Generation    uint64
	Since         time.Time
	// Admitted: it is a member of its worker set. Otherwise Differs says
	// why not, field by field.
	Admitted bool
	Differs  []string

	// ImageTokenID and VideoTokenID as resolved, nil where they are not;
	// ...From is "worker", "model", or the file and field.
	ImageTokenID, VideoTokenID         *uint32
	ImageTokenIDFrom, VideoTokenIDFrom string
	// ExactMM: requests with images can be answered exactly. MMReason is why
	// not; MMClaim tells what became of a claim: "", "believed" or
	// "claimed, refused: no_image_token_id".
	ExactMM  bool
	MMReason normalize.Reason
	MMClaim  string

	// Streams by rank; none while the worker is not admitted.
	Streams []StreamView
}

// StreamView is one stream of a worker.
type StreamView struct {
	Rank                     int
	Undeclared               bool
	Endpoint, ReplayEndpoint string
	Status                   Status
	Stats                    index.StreamStats
	Counts                   StreamCounts
}

// StreamCounts are a publisher's counts since the worker's life began.
type StreamCounts struct {
	Messages, Applied, Duplicates, Malformed uint64
	Gaps, Lost, Burnt                        uint64
	Replays, ReplayFailures, Replayed        uint64
	Restarts, Reconnects                     uint64
}

// Workers returns every worker of every source that is in force, sorted by id,
// then model, namespace and role.
func (f *Fleet) Workers() []WorkerView {
	f.mu.Lock()
	ws := make([]*worker, 0, len(f.workers))
	out := make([]WorkerView, 0, len(f.workers))
	for _, w := range f.workers {
		ws = append(ws, w)
	}
	slices.SortFunc(ws, func(a, b *worker) int { return compareKeys(a.key, b.key) })
	pubs := make([][]*publisher, len(ws))
	for i, w := range ws {
		out = append(out, w.describe())
		pubs[i] = w.pubs
	}
	f.mu.Unlock()
	for i := range out {
		out[i].Streams = streamViews(pubs[i])
	}
	return out
}

// Worker returns the views of one id: one per model that it serves.
func (f *Fleet) Worker(id string) ([]WorkerView, error) {
	all := f.Workers()
	all = slices.DeleteFunc(all, func(v WorkerView) bool { return v.Spec.ID != id })
	if len(all) == 0 {
		return nil, unknownWorker(id)
	}
	return all, nil
}

func compareKeys(a, b workerKey) int {
	return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.set.Model, b.set.Model),
		cmp.Compare(a.set.Namespace, b.set.Namespace), cmp.Compare(a.set.Role, b.set.Role), cmp.Compare(a.part, b.part))
}

// describe is the view without its streams: under the fleet's lock.
func (w *worker) describe() WorkerView {
	v := WorkerView{
		Spec: w.spec, Source: w.source, Where: w.where, Generation: w.generation, Since: w.since,
		Admitted: w.admitted(), Differs: w.differs,
		ImageTokenID: w.config.ImageTokenID, ImageTokenIDFrom: w.imageFrom,
		VideoTokenID: w.config.VideoTokenID, VideoTokenIDFrom: w.videoFrom,
		ExactMM: w.exact(), MMReason: w.mmReason(),
	}
	switch {
	case !w.spec.ExactMM:
	case v.ExactMM:
		v.MMClaim = "believed"
	default:
		v.MMClaim = "claimed, refused: " + string(v.MMReason)
	}
	return v
}

func streamViews(pubs []*publisher) []StreamView {
	var out []StreamView
	for _, p := range pubs {
		for _, m := range *p.members.Load() {
			out = append(out, StreamView{
				Rank: m.Rank, Undeclared: m.Undeclared, Endpoint: p.at.endpoint, ReplayEndpoint: p.at.replay,
				Status: m.Status(), Stats: m.stream.Stats(), Counts: p.counts(),
			})
		}
	}
	slices.SortFunc(out, func(a, b StreamView) int { return a.Rank - b.Rank })
	return out
}

func (p *publisher) counts() StreamCounts {
	c := p.n
	n := StreamCounts{
		Messages: c.messages.Load(), Applied: c.applied.Load(), Duplicates: c.duplicates.Load(),
		Gaps: c.gaps.Load(), Lost: c.lost.Load(), Burnt: c.burnt.Load(),
		Replays: c.replays.Load(), ReplayFailures: c.replayFailures.Load(), Replayed: c.replayed.Load(),
		Restarts: c.restarts.Load(), Malformed: c.malformedMessages.Load(),
	}
	if p.sub != nil {
		s := p.sub.Stats()
		n.Malformed += s.Malformed
		n.Reconnects = max(s.Connects, 1) - 1
	}
	return n
}

// Reset drops what is held for a worker and starts again from its replay. It
// fails with ErrUnknownWorker, and with ErrCapture where there is no replay.
func (f *Fleet) Reset(id string) error {
	if f.offline {
		return ErrCapture
	}
	f.mu.Lock()
	var pubs []*publisher
	found := false
	for k, w := range f.workers {
		if k.id == id {
			found = true
			pubs = append(pubs, w.pubs...)
		}
	}
	f.mu.Unlock()
	if !found {
		return unknownWorker(id)
	}
	for _, p := range pubs {
		p.reset()
	}
	return nil
}

// Readiness counts what a daemon's readiness depends on.
type Readiness struct {
	// Workers are admitted, Settled of them are followed: see Ready.
	Workers, Settled int
	// Waiting names the others' streams, "worker/rank: state", sorted.
	Waiting []string
}

// Ready tells how many workers are followed, with all their streams. A stream
// is followed from the end of its first replay on (where there is none to ask,
// from its connection on) until it is disconnected for longer than the grace:
// what it held then ages, and a replica that still hears it answers better. A
// gap that is being filled changes nothing.
func (f *Fleet) Ready() Readiness {
	var r Readiness
	for _, v := range f.Workers() {
		if !v.Admitted {
			continue
		}
		r.Workers++
		settled := true
		for i := range v.Streams {
			s := &v.Streams[i]
			if !s.followed() {
				settled = false
				r.Waiting = append(r.Waiting, streamName(v.Spec.ID, s.Rank)+": "+s.Status.State.String())
			}
		}
		if settled {
			r.Settled++
		}
	}
	slices.Sort(r.Waiting)
	return r
}

func (s *StreamView) followed() bool {
	switch s.Status.State {
	case Live, Partial, Suspect:
		return true
	case Replaying:
		return s.Status.Settled
	case Connecting:
		return s.Status.Connected && s.ReplayEndpoint == ""
	}
	return false
}
