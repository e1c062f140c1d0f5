package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// What the fleet holds travels as lines: as JSON lines in a dump, as chunks in a
// snapshot. A set's line is followed by its streams', each by the index chunks
// of its part. docs/snapshots.md tells them in full.

// linesVersion is of everything that these lines and index chunks are.
const linesVersion = index.ChunkVersion

// linesFormat names them.
const linesFormat = "kvindexd-index"

// line is one of them; one field is set.
type line struct {
	Format *formatLine `json:"format,omitempty"`
	Set    *setLine    `json:"set,omitempty"`
	Stream *streamLine `json:"stream,omitempty"`
	Chunk  []byte      `json:"chunk,omitempty"`
	End    *endLine    `json:"end,omitempty"`
}

// formatLine comes first in a dump.
type formatLine struct {
	Name    string `json:"name"`
	Version int    `json:"version"`
	// Created is when the dump began, in nanoseconds since the Unix epoch.
	Created int64 `json:"created_ns"`
}

type setLine struct {
	Namespace string `json:"namespace"`
	Model     string `json:"model"`
	Role      string `json:"role"`
}

// streamLine is a stream's identity and position.
type streamLine struct {
	Worker string `json:"worker"`
	// Rank of the subscription.
	Rank int    `json:"rank"`
	Seq  uint64 `json:"seq"`
	// Digest of batch Seq, 16 hex digits.
	Digest string   `json:"digest"`
	State  string   `json:"state"`
	Lost   uint64   `json:"lost"`
	View   viewLine `json:"view"`
	// Blocks that the stream knows; Orphans were left out.
	Blocks  int `json:"blocks"`
	Orphans int `json:"orphans,omitempty"`
}

// viewLine decides what the blocks are: a stream comes back only under an equal
// one.
type viewLine struct {
	ImageTokenID       *uint32 `json:"image_token_id,omitempty"`
	VideoTokenID       *uint32 `json:"video_token_id,omitempty"`
	TowerConnectorLora bool    `json:"tower_connector_lora,omitempty"`
	ExtraKeys          string  `json:"extra_keys"`
}

// endLine comes last in a dump: one without it was cut short.
type endLine struct {
	Sets    int `json:"sets"`
	Streams int `json:"streams"`
}

func viewLineOf(v normalize.View) viewLine {
	l := viewLine{TowerConnectorLora: v.TowerConnectorLora, ExtraKeys: v.ExtraKeys.String()}
	if v.IDs.HasImage {
		l.ImageTokenID = &v.IDs.Image
	}
	if v.IDs.HasVideo {
		l.VideoTokenID = &v.IDs.Video
	}
	return l
}

// view is the reverse of viewLineOf.
func (l *viewLine) view() (normalize.View, error) {
	mode, err := normalize.ParseExtraKeysMode(l.ExtraKeys)
	v := normalize.View{TowerConnectorLora: l.TowerConnectorLora, ExtraKeys: mode}
	if l.ImageTokenID != nil {
		v.IDs.Image, v.IDs.HasImage = *l.ImageTokenID, true
	}
	if l.VideoTokenID != nil {
		v.IDs.Video, v.IDs.HasVideo = *l.VideoTokenID, true
	}
	return v, err
}

func streamLineOf(m *Member, mk Mark, t index.Taken) *streamLine {
	if t.Orphans > 0 && mk.State == Live {
		mk.State = Partial // without them it knows less than its publisher said
	}
	return &streamLine{
		Worker: m.Worker, Rank: m.pub.at.rank, Seq: mk.Seq, Digest: fmt.Sprintf("%016x", mk.Digest),
		State: mk.State.String(), Lost: mk.Lost, View: viewLineOf(m.View), Blocks: t.Memberships, Orphans: t.Orphans,
	}
}

// mark is the position that the line tells.
func (l *streamLine) mark() (Mark, error) {
	m := Mark{Seq: l.Seq, HasSeq: true, Lost: l.Lost}
	if l.Orphans > 0 {
		m.Why = fmt.Sprintf("%d blocks that waited for their parents are not in the snapshot", l.Orphans)
	}
	var err error
	if m.Digest, err = strconv.ParseUint(l.Digest, 16, 64); err != nil {
		return m, fmt.Errorf("digest %q: %w", l.Digest, err)
	}
	for s := range numStates {
		if s.String() == l.State {
			m.State = s
			return m, nil
		}
	}
	return m, fmt.Errorf("state %q is none", l.State)
}

// lineWriter is where lines go.
type lineWriter interface {
	// line takes anything but chunks.
	line(l *line) error
	// chunk takes index chunks; b is valid during the call.
	chunk(b []byte) error
}

// copied is what copyOut wrote.
type copied struct {
	Sets, Streams, Blocks int
	// Skipped streams have no position of their own yet, or several ranks.
	Skipped int
	// Freeze is the longest that a stream's messages waited.
	Freeze time.Duration
}

// copyOut writes the sets' content. Each stream is as it was at one moment,
// which its line names; different streams at different ones. progress is told
// how many streams are done.
func copyOut(ctx context.Context, sets []*Picture, w lineWriter, progress func(done int)) (copied, error) {
	var c copied
	for _, p := range sets {
		if err := w.line(&line{Set: &setLine{p.Key.Namespace, p.Key.Model, p.Key.Role}}); err != nil {
			return c, err
		}
		c.Sets++
		if err := c.set(ctx, p, w, progress); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (c *copied) set(ctx context.Context, p *Picture, w lineWriter, progress func(int)) error {
	e := p.Index.Export()
	defer e.Close()
	for _, m := range p.Members {
		if err := ctx.Err(); err != nil {
			return err
		}
		mk, t, ok := c.take(m, e)
		progress(c.Streams + c.Skipped)
		if !ok {
			c.Skipped++
			continue
		}
		if err := w.line(&line{Stream: streamLineOf(m, mk, t)}); err != nil {
			return err
		}
		if err := e.Chunks(w.chunk); err != nil {
			return err
		}
		c.Streams++
		c.Blocks += t.Memberships
	}
	return nil
}

// take copies one stream while its publisher is held back.
func (c *copied) take(m *Member, e *index.Export) (mk Mark, t index.Taken, ok bool) {
	e.Prepare(m.stream)
	m.Freeze(func(now Mark) {
		if mk = now; !mk.HasSeq {
			return
		}
		start := time.Now()
		t, ok = e.Take(m.stream)
		c.Freeze = max(c.Freeze, time.Since(start))
	})
	return mk, t, ok
}

// Dump writes what is held, as JSON lines, for a replica that joins: all worker
// sets, or those that want says. No salt is in it, only hashes.
func (f *Fleet) Dump(ctx context.Context, w io.Writer, want func(SetKey) bool) error {
	var sets []*Picture
	for _, p := range f.Sets() {
		if want == nil || want(p.Key) {
			sets = append(sets, p)
		}
	}
	lines := jsonLines{json.NewEncoder(w)}
	if err := lines.line(&line{Format: &formatLine{linesFormat, linesVersion, time.Now().UnixNano()}}); err != nil {
		return err
	}
	c, err := copyOut(ctx, sets, lines, func(int) {})
	if err != nil {
		return err
	}
	return lines.line(&line{End: &endLine{c.Sets, c.Streams}})
}

type jsonLines struct{ enc *json.Encoder }

func (j jsonLines) line(l *line) error   { return j.enc.Encode(l) }
func (j jsonLines) chunk(b []byte) error { return j.enc.Encode(&line{Chunk: b}) }
