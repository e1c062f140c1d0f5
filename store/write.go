package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/dgraph-io/badger/v4"
)

const (
	// ceilingFactor: past so many times the live bytes, after collection, the
	// directory is given up for a fresh one. Badger loses count of garbage
	// after damage to its DISCARD file; nothing else is known to get there.
	ceilingFactor = 4
	// gcRatio and maxGCRounds: a ratio of 0.5 can stall for ever after crashes,
	// 0.01 in a loop did not. Each round frees a value-log file.
	gcRatio     = 0.01
	maxGCRounds = 256
)

// Writer takes the chunks of one generation. It belongs to the goroutine that
// runs Write's produce, and is dead when that returns.
type Writer struct {
	ctx   context.Context
	s     *Store
	db    *badger.DB
	codec *codec
	man   manifest

	kind    ChunkKind // of what is pending
	pending []byte    // appended, not yet a chunk
	value   []byte    // the stored form of the chunk at hand
	err     error     // the first failure; everything after it fails alike
}

// Chunk writes data as one chunk of its own, at most MaxChunkBytes, after what
// was appended before. data is the caller's again when Chunk returns. Errors:
// the context's, ErrNoSpace, ErrTooLarge, Badger's; after one, produce should
// give up.
func (w *Writer) Chunk(kind ChunkKind, data []byte) error {
	if err := w.flush(); err != nil {
		return err
	}
	w.err = w.write(kind, data)
	return w.err
}

// Append adds a record to the chunk in progress and begins a new chunk when the
// kind changes or the chunk has reached TargetChunkBytes. A record is never
// split between chunks, and Load hands out whole chunks, so records must tell
// their own length.
func (w *Writer) Append(kind ChunkKind, record []byte) error {
	if w.err != nil {
		return w.err
	}
	if len(w.pending) > 0 && (kind != w.kind || len(w.pending)+len(record) > MaxChunkBytes) {
		if err := w.flush(); err != nil {
			return err
		}
	}
	w.kind = kind
	w.pending = append(w.pending, record...)
	if len(w.pending) < TargetChunkBytes {
		return nil
	}
	return w.flush()
}

// flush makes a chunk of what was appended.
func (w *Writer) flush() error {
	if w.err != nil || len(w.pending) == 0 {
		return w.err
	}
	w.err = w.write(w.kind, w.pending)
	w.pending = w.pending[:0]
	return w.err
}

func (w *Writer) write(kind ChunkKind, data []byte) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if len(data) > MaxChunkBytes {
		return fmt.Errorf("%w: chunk of %d bytes, at most %d", ErrTooLarge, len(data), MaxChunkBytes)
	}
	at := place{w.man.Generation, w.man.identity, w.man.Chunks}
	w.value = w.codec.appendChunk(w.value[:0], at, kind, data)
	if err := w.put(chunkKey(at.generation, at.number), w.value); err != nil {
		return fmt.Errorf("chunk %d of %d bytes: %w", at.number, len(w.value), err)
	}
	w.man.Chunks++
	w.man.RawBytes += uint64(len(data))
	w.man.StoredBytes += uint64(len(w.value))
	return nil
}

// put checks for space first: Badger copies the value into a memory map, where
// a full disk would end the process.
func (w *Writer) put(key, value []byte) error {
	if err := checkSpace(w.s.opt.Dir, w.s.opt.ReserveBytes+int64(len(value))); err != nil {
		return err
	}
	if err := put(w.db, key, value); err != nil {
		return badgerFailed{err}
	}
	return nil
}

// badgerFailed marks an error after which Badger is opened again before it is
// trusted with anything.
type badgerFailed struct{ error }

func (e badgerFailed) Unwrap() error { return e.error }

// Write makes a new generation of what produce gives to the Writer. When it
// returns without an error the generation is on disk and the only one. With an
// error the old generation stands as it was; a context that ends, an error of
// produce, or a full disk (ErrNoSpace) leave nothing that the next Write does
// not reclaim.
func (s *Store) Write(ctx context.Context, info Info, produce func(w *Writer) error) (Stats, error) {
	if err := info.check(); err != nil {
		return Stats{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.ensureOpen(); err != nil {
		return Stats{}, err
	}
	if err := ctx.Err(); err != nil {
		return Stats{}, err
	}
	if s.sweep {
		s.reclaim()
		if err := s.ensureOpen(); err != nil { // again, if that went wrong
			return Stats{}, err
		}
	}
	man, err := s.writeGeneration(ctx, info, produce)
	if err != nil {
		s.giveUp(err)
		return Stats{}, fmt.Errorf("snapshot not written, the previous one stands: %w", err)
	}
	return s.commit(man), nil
}

// written is a complete, synced generation and how long it took.
type written struct {
	manifest
	took time.Duration
}

// writeGeneration writes into the directory, or into a fresh one that then
// takes its place. Caller has mu.
func (s *Store) writeGeneration(ctx context.Context, info Info, produce func(w *Writer) error) (*written, error) {
	if s.bloated {
		return s.writeFresh(ctx, info, produce)
	}
	return s.writeInto(ctx, s.db, info, produce)
}

// writeInto: sentinel, chunks, sync, manifest, sync.
func (s *Store) writeInto(ctx context.Context, db *badger.DB, info Info, produce func(w *Writer) error) (*written, error) {
	codec, err := newCodec()
	if err != nil {
		return nil, err
	}
	defer codec.close()
	start := time.Now()
	if info.Created.IsZero() {
		info.Created = start
	}
	info.Chunks, info.RawBytes, info.StoredBytes = 0, 0, 0
	info.Generation = s.next
	s.next++
	s.sweep = true // until commit, or the next reclaim
	w := &Writer{ctx: ctx, s: s, db: db, codec: codec, man: manifest{Info: info, identity: rand.Uint64()}}
	if err := w.put(sentinelKey, binary.BigEndian.AppendUint64(nil, info.Generation)); err != nil {
		return nil, err
	}
	if err := produce(w); err != nil {
		return nil, err
	}
	if err := w.flush(); err != nil {
		return nil, err
	}
	if err := w.seal(); err != nil {
		return nil, err
	}
	return &written{w.man, time.Since(start)}, nil
}

// seal makes the generation count: everything before the manifest is on disk
// before it, and the manifest when seal returns.
func (w *Writer) seal() error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if err := w.db.Sync(); err != nil {
		return badgerFailed{briefly(err)}
	}
	if err := w.put(manifestKey, w.man.append(nil)); err != nil {
		return err
	}
	if err := w.db.Sync(); err != nil {
		return badgerFailed{briefly(err)}
	}
	return nil
}

// writeFresh writes the generation into a new Badger directory and swaps it
// in. It costs a directory more than the ordinary way, and keeps its promise:
// whatever the moment of a kill, the old or the new generation is whole.
func (s *Store) writeFresh(ctx context.Context, info Info, produce func(w *Writer) error) (*written, error) {
	db, err := openBadger(badgerOptions(s.path.next(), s.opt.ValueLogBytes, s.log))
	if err != nil {
		return nil, fmt.Errorf("fresh directory: %w", briefly(err))
	}
	man, err := s.writeInto(ctx, db, info, produce)
	if err == nil {
		err = checkSpace(s.opt.Dir, openReserveBytes)
	}
	err = errors.Join(err, briefly(db.Close()))
	if err != nil {
		return nil, errors.Join(err, s.path.finishSwap())
	}
	if err := s.closeDB(); err != nil {
		s.log.Warn("snapshot directory being replaced did not close well", "err", err)
	}
	if err := s.path.swap(); err != nil {
		return nil, fmt.Errorf("replace the snapshot directory: %w", errors.Join(err, s.path.finishSwap()))
	}
	s.bloated = false
	if s.db, err = openBadgerTwice(badgerOptions(s.path.db(), s.opt.ValueLogBytes, s.log)); err != nil {
		return nil, fmt.Errorf("open the replaced snapshot directory: %w", err)
	}
	s.log.Info("snapshot directory replaced by a fresh one to give space back", "dir", s.opt.Dir)
	return man, nil
}

// commit records the generation and gives the old one's space back. Nothing in
// here can lose the new generation, so nothing in here fails the Write.
func (s *Store) commit(w *written) Stats {
	if err := s.path.setHasSnapshot(w.Generation); err != nil {
		s.log.Warn("snapshot written, its number could not be recorded", "dir", s.opt.Dir, "err", err)
	}
	_ = s.path.endStart()
	s.setManifest(&w.manifest)
	start := time.Now()
	s.reclaim()
	reclaim := time.Since(start)
	disk := s.refreshDisk()
	s.bloated = disk > ceilingFactor*int64(w.StoredBytes)+2*s.opt.ValueLogBytes+diskUse(s.path.damaged())

	s.state.Lock()
	defer s.state.Unlock()
	s.state.stats.Duration, s.state.stats.Reclaim = w.took, reclaim
	return s.state.stats
}

// giveUp cleans up after a Write that failed.
func (s *Store) giveUp(err error) {
	var failed badgerFailed
	if errors.As(err, &failed) {
		s.sick = true // ensureOpen sees to it, and finds the leftovers
		return
	}
	if s.db != nil {
		s.reclaim()
		s.refreshDisk()
	}
}

// keepsForeign says that what stands is a generation of another format, which
// goes only when a new one is whole.
func (s *Store) keepsForeign() bool {
	s.state.Lock()
	defer s.state.Unlock()
	return errors.Is(s.state.lost, ErrVersion)
}

// reclaim drops every generation but the standing one, and collects what they
// leave in the value log. Failing costs space until the next try, nothing else.
func (s *Store) reclaim() {
	if s.keepsForeign() {
		return
	}
	if err := s.tryReclaim(); err != nil {
		s.log.Warn("space of old snapshots not given back, the next write tries again", "dir", s.opt.Dir, "err", err)
	}
}

func (s *Store) tryReclaim() error {
	if err := checkSpace(s.opt.Dir, openReserveBytes); err != nil {
		return err
	}
	live, keep := s.Info()
	gens, err := generations(s.db)
	if err != nil {
		return err
	}
	var drop [][]byte
	for _, g := range gens {
		if !keep || g != live.Generation {
			drop = append(drop, generationPrefix(g))
		}
	}
	if err := s.db.DropPrefix(drop...); err != nil {
		s.sick = true // it may have stopped half way, without a memory table
		return briefly(err)
	}
	s.sweep = false
	return s.collect(int64(live.StoredBytes))
}

// collect runs Badger's value-log collection until it finds nothing to do. A
// round may copy a file's live values before it frees the file.
func (s *Store) collect(live int64) error {
	copies := min(live, s.opt.ValueLogBytes) + maxStoredChunk
	for range maxGCRounds {
		if err := checkSpace(s.opt.Dir, openReserveBytes+copies); err != nil {
			return err
		}
		err := s.db.RunValueLogGC(gcRatio)
		if errors.Is(err, badger.ErrNoRewrite) {
			return nil
		}
		if err != nil {
			s.sick = true
			return briefly(err)
		}
	}
	return nil
}
