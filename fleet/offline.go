package fleet

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// Replies says which batches of a capture come as replies, and until when: with
// it a gap waits exactly as long as the capture may still fill it.
type Replies struct {
	// last is the number of the last record that replies with a seq, by
	// stream and seq.
	last map[string]map[uint64]int
}

// ScanReplies reads a capture to its end. A capture that was cut short is used
// as far as it goes.
func ScanReplies(r *zmqwire.CaptureReader) (Replies, error) {
	out := Replies{last: map[string]map[uint64]int{}}
	var rec zmqwire.Record
	for n := 0; ; n++ {
		err := r.Next(&rec)
		var cut *zmqwire.TruncatedError
		if err == io.EOF || errors.As(err, &cut) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if rec.Kind != zmqwire.Reply {
			continue
		}
		m, end, err := zmqwire.ParseReply(rec.Frames)
		if err != nil || end {
			continue
		}
		s := out.last[rec.Stream]
		if s == nil {
			s = map[uint64]int{}
			out.last[rec.Stream] = s
		}
		s[m.Seq] = n
	}
}

// player feeds a capture to the streams of an offline fleet.
type player struct {
	fleet   *Fleet
	replies Replies
	streams map[string]*publisher
	// records counts those that were fed.
	records int
}

// Offline is a fleet whose streams are fed record by record, through the same
// path as live messages, instead of from sockets.
type Offline struct {
	*Fleet
	p player
}

// NewOffline makes the fleet of a capture: its streams, by its header. A gap
// that a later reply fills waits for it meanwhile; any other is given up at
// once. The zero Replies means that there are none.
func NewOffline(h zmqwire.CaptureHeader, replies Replies, o Options) (*Offline, error) {
	f := newFleet(o)
	f.offline = true
	off := &Offline{Fleet: f, p: player{fleet: f, replies: replies, streams: map[string]*publisher{}}}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range o.Models {
		f.models[m.Name] = m
	}
	names := make([]string, 0, len(h.Streams))
	for name := range h.Streams {
		names = append(names, name)
	}
	slices.Sort(names)
	if err := off.p.addStreams(h, names); err != nil {
		return nil, err
	}
	for _, s := range f.sets {
		f.admit(s)
	}
	f.redraw()
	off.p.bind()
	return off, nil
}

// addStreams makes one worker of the ranks that stand under one name with equal
// settings.
func (p *player) addStreams(h zmqwire.CaptureHeader, names []string) error {
	byWorker := map[string]*statement{}
	var order []*statement
	for _, name := range names {
		cs := h.Streams[name]
		s, err := p.statement(name, cs)
		if err != nil {
			return err
		}
		group := fmt.Sprint(s.key.id, s.key.set, s.view, s.blockSize, s.spec.EagleDrop)
		if o := byWorker[group]; o != nil {
			o.ranks = append(o.ranks, s.ranks...)
			continue
		}
		s.key.part = group
		byWorker[group] = s
		order = append(order, s)
	}
	for _, s := range order {
		p.fleet.add(s)
	}
	return nil
}

// statement is what the header says of one stream.
func (p *player) statement(name string, cs zmqwire.CaptureStream) (*statement, error) {
	spec := WorkerSpec{
		ID: cs.Worker, Model: cs.Model, Namespace: cs.Namespace, Role: cs.Role, Topic: cs.Topic,
		ExtraKeys: cs.ExtraKeys, EagleDrop: cs.EagleDrop, BlockSize: cs.BlockSize,
		ImageTokenID: cs.ImageTokenID, VideoTokenID: cs.VideoTokenID,
		Ranks: []RankSpec{{Rank: cs.DPRank, Endpoint: captureEndpoint}},
	}
	if cs.TowerConnectorLora {
		spec.TowerConnectorLora = &cs.TowerConnectorLora
	}
	var m *ModelSpec
	if known, ok := p.fleet.models[cs.Model]; ok {
		m = &known
	}
	s, err := p.fleet.state(&entry{spec: spec, source: "capture", where: "capture:" + name}, m)
	if err != nil {
		return nil, fmt.Errorf("capture: stream %q: %w", name, err)
	}
	s.ranks[0].endpoint = name
	return s, nil
}

// captureEndpoint stands in for an endpoint until the stream's name does.
const captureEndpoint = "ipc://capture"

// bind finds the publisher of each stream and tells it what will still come.
func (p *player) bind() {
	now := time.Now()
	for _, w := range p.fleet.workers {
		for _, pub := range w.pubs {
			name := pub.at.endpoint
			p.streams[name] = pub
			last := p.replies.last[name]
			pub.st.cfg.fillable = func(seq uint64) bool {
				n, ok := last[seq]
				return ok && n >= p.records
			}
			pub.st.up, pub.st.everUp = true, true
			pub.publish(now)
		}
	}
}

// Feed applies one record of the capture. It is for one goroutine; queries may
// run meanwhile. A record of a stream that the header does not have is an
// error; a message that cannot be read, or of another topic, is only counted.
func (o *Offline) Feed(rec *zmqwire.Record) error {
	pub := o.p.streams[rec.Stream]
	o.p.records++
	if pub == nil {
		return fmt.Errorf("capture: record of stream %q, which the header does not have (or which is not admitted)", rec.Stream)
	}
	now := time.Now()
	pub.mu.Lock()
	defer pub.mu.Unlock()
	pub.feed(now, rec)
	pub.st.recheck(now)
	pub.publish(now)
	return nil
}

// feed takes one record as its socket would have: under mu.
func (p *publisher) feed(now time.Time, rec *zmqwire.Record) {
	if rec.Kind == zmqwire.Reply {
		m, end, err := zmqwire.ParseReply(rec.Frames)
		switch {
		case err != nil:
			p.n.malformedMessages.Add(1)
		case !end:
			_ = p.st.replied(now, replayRequest{epoch: p.st.epoch}, m.Seq, m.Payload, 0)
		}
		return
	}
	m, err := zmqwire.ParseMessage(rec.Frames)
	switch topic := p.worker.life.spec.Topic; {
	case err != nil:
		p.n.malformedMessages.Add(1)
	case topic != "" && topic != string(m.Topic):
		p.n.foreignTopics.Add(1)
	default:
		p.n.messages.Add(1)
		p.status.heard.Store(int64(now.Sub(p.fleet.start)) + 1)
		p.st.live(now, m.Seq, m.Payload)
	}
}

// StreamPosition is where one stream of a capture stands.
type StreamPosition struct {
	Stream string
	Status Status
	Counts StreamCounts
	Stats  index.StreamStats
}

// Positions returns every stream of the capture, sorted by name.
func (o *Offline) Positions() []StreamPosition {
	out := make([]StreamPosition, 0, len(o.p.streams))
	for name, pub := range o.p.streams {
		out = append(out, StreamPosition{name, pub.currentStatus(), pub.counts(), pub.ranks[0].stream.Stats()})
	}
	slices.SortFunc(out, func(a, b StreamPosition) int {
		if a.Stream < b.Stream {
			return -1
		}
		return 1
	})
	return out
}
