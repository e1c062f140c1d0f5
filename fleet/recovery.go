package fleet

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// ErrContent is wrapped by every error about lines that are damaged, incomplete
// or of another version.
var ErrContent = errors.New("unusable snapshot content")

// recovery is a snapshot or a dump that was read, until its streams have been
// asked for.
type recovery struct {
	from    string // for people
	created time.Time

	mu   sync.Mutex
	sets map[SetKey]*recoveredSet
	left int // streams that were not asked for

	last *recoveredSet // while lines are read
}

type recoveredSet struct {
	archive *index.Archive
	order   []*recoveredStream
	streams map[rankKey]*recoveredStream
}

type rankKey struct {
	worker string
	rank   int
}

type recoveredStream struct {
	number int
	view   normalize.View
	mark   Mark
	blocks int
}

func newRecovery(from string) *recovery {
	return &recovery{from: from, sets: map[SetKey]*recoveredSet{}}
}

func badContent(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrContent, fmt.Errorf(format, args...))
}

// line takes the next line, chunks among them.
func (r *recovery) line(l *line) error {
	switch {
	case l.Format != nil:
		return r.format(l.Format)
	case l.Set != nil:
		return r.set(l.Set)
	case l.Stream != nil:
		return r.stream(l.Stream)
	case l.Chunk != nil:
		return r.chunk(l.Chunk)
	}
	return nil // a kind that came later; what must be understood has a version
}

func (r *recovery) format(l *formatLine) error {
	if l.Name != linesFormat || l.Version != linesVersion {
		return badContent("%q version %d, this program reads %q version %d", l.Name, l.Version, linesFormat, linesVersion)
	}
	r.created = time.Unix(0, l.Created)
	return nil
}

func (r *recovery) set(l *setLine) error {
	key := SetKey{Namespace: l.Namespace, Model: l.Model, Role: l.Role}
	if r.sets[key] != nil {
		return badContent("worker set %v twice", key)
	}
	if err := r.closeSet(); err != nil {
		return err
	}
	r.last = &recoveredSet{archive: new(index.Archive), streams: map[rankKey]*recoveredStream{}}
	r.sets[key] = r.last
	return nil
}

func (r *recovery) stream(l *streamLine) error {
	if r.last == nil {
		return badContent("a stream before any worker set")
	}
	mk, err := l.mark()
	if err != nil {
		return badContent("stream %s/%d: %w", l.Worker, l.Rank, err)
	}
	view, err := l.View.view()
	if err != nil {
		return badContent("stream %s/%d: %w", l.Worker, l.Rank, err)
	}
	key := rankKey{l.Worker, l.Rank}
	if r.last.streams[key] != nil {
		return badContent("stream %s/%d twice", l.Worker, l.Rank)
	}
	st := &recoveredStream{number: len(r.last.order), view: view, mark: mk, blocks: l.Blocks}
	r.last.order = append(r.last.order, st)
	r.last.streams[key] = st
	r.left++
	return nil
}

func (r *recovery) chunk(b []byte) error {
	if r.last == nil {
		return badContent("a chunk before any worker set")
	}
	if err := r.last.archive.Add(b); err != nil {
		return badContent("%w", err)
	}
	if n := len(r.last.order); r.last.archive.Streams() > n {
		return badContent("chunks of stream %d, of which there is no line", n)
	}
	return nil
}

// closeSet checks that the last set's streams all came.
func (r *recovery) closeSet() error {
	if r.last == nil {
		return nil
	}
	if have, want := r.last.archive.Streams(), len(r.last.order); have != want {
		return badContent("%d of %d streams", have, want)
	}
	return nil
}

// blocks counts what all streams hold.
func (r *recovery) blocks() (n int) {
	for _, s := range r.sets {
		for _, st := range s.order {
			n += st.blocks
		}
	}
	return n
}

// restore puts a stream's part into an empty index stream. It can be had once.
func (r *recovery) restore(key SetKey, worker string, rank int, view normalize.View, into *index.Stream) (Mark, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sets[key]
	if s == nil {
		return Mark{}, false, nil
	}
	at := rankKey{worker, rank}
	st := s.streams[at]
	if st == nil {
		return Mark{}, false, nil
	}
	delete(s.streams, at)
	r.left--
	defer func() {
		s.archive.Drop(st.number)
		if len(s.streams) == 0 {
			delete(r.sets, key) // nobody needs its runs any more
		}
	}()
	if st.view != view {
		return Mark{}, false, fmt.Errorf("its blocks were identified by other settings: %+v, now %+v", st.view, view)
	}
	if err := s.archive.Import(st.number, into); err != nil {
		return Mark{}, false, err
	}
	return st.mark, true, nil
}

// pending is how many streams were not asked for yet.
func (r *recovery) pending() int {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.left
}
