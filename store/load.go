package store

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/dgraph-io/badger/v4"
)

// Load hands the standing generation's chunks to consume, in the order they
// were written. Every chunk's checksum and place is verified before consume
// sees the first. data is valid during the call.
//
// Errors: ErrEmpty; ErrVersion (nothing is touched); ErrDamaged, with what was
// wrong, after the directory was set aside, now or by Open; the context's; or
// consume's own, upon which the generation stays, unless it is an ErrDamaged
// too: a caller that finds the content unreadable says so and it is set aside
// all the same.
func (s *Store) Load(ctx context.Context, consume func(kind ChunkKind, data []byte) error) (Info, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.ensureOpen(); err != nil {
		return Info{}, err
	}
	man, err := s.standing()
	if err == nil {
		err = loadGeneration(ctx, s.db, man, consume)
	}
	if man != nil && errors.Is(err, ErrDamaged) {
		return Info{}, s.replaceDamaged(err)
	}
	// Badger has opened and been read without taking the process along.
	if err := s.path.endStart(); err != nil {
		return Info{}, err
	}
	if err != nil {
		return Info{}, err
	}
	if s.sweep {
		s.reclaim()
		s.refreshDisk()
	}
	return man.Info, nil
}

// standing returns the manifest to load, or why there is none.
func (s *Store) standing() (*manifest, error) {
	s.state.Lock()
	defer s.state.Unlock()
	switch {
	case s.state.man != nil:
		return s.state.man, nil
	case s.state.lost != nil:
		return nil, s.state.lost
	}
	return nil, ErrEmpty
}

// replaceDamaged sets the directory aside and opens an empty one. Returns the
// reason, or what went wrong on the way. Caller has mu.
func (s *Store) replaceDamaged(reason error) error {
	if err := s.closeDB(); err != nil {
		s.log.Debug("closing a damaged snapshot store", "err", err)
	}
	if err := s.setAside(reason); err != nil {
		return err
	}
	if err := s.openDB(); err != nil {
		return errors.Join(reason, err)
	}
	return reason
}

// loadGeneration verifies all chunks, then decodes and hands out all chunks.
// The first pass costs a hash over what the second reads anyway.
func loadGeneration(ctx context.Context, db *badger.DB, man *manifest, consume func(ChunkKind, []byte) error) error {
	if err := verifyGeneration(ctx, db, man); err != nil {
		return err
	}
	codec, err := newCodec()
	if err != nil {
		return err
	}
	defer codec.close()
	var ch chunk
	var data []byte
	decode := func(stored []byte, at place) error {
		if ch, err = parseChunk(stored, at); err != nil {
			return err
		}
		data, err = codec.decode(data, ch)
		return err
	}
	for n := range man.Chunks {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := readChunk(db, man, n, decode); err != nil {
			return err
		}
		if err := consume(ch.kind, data); err != nil {
			return err
		}
	}
	return nil
}

// verifyGeneration checks every chunk's checksum and place, and the manifest's
// totals.
func verifyGeneration(ctx context.Context, db *badger.DB, man *manifest) error {
	var raw, stored uint64
	add := func(value []byte, at place) error {
		ch, err := parseChunk(value, at)
		raw += uint64(ch.raw)
		stored += uint64(len(value))
		return err
	}
	for n := range man.Chunks {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := readChunk(db, man, n, add); err != nil {
			return err
		}
	}
	if raw != man.RawBytes || stored != man.StoredBytes {
		return fmt.Errorf("%w: generation %d holds %d bytes stored as %d, its manifest says %d and %d",
			ErrDamaged, man.Generation, raw, stored, man.RawBytes, man.StoredBytes)
	}
	return nil
}

// readChunk shows fn the stored form of chunk n where it lies in Badger's
// memory map, valid during the call. fn is ours: a caller's function would have
// its panics taken for damage. Errors: ErrDamaged, fn's.
func readChunk(db *badger.DB, man *manifest, n uint32, fn func(stored []byte, at place) error) error {
	at := place{man.Generation, man.identity, n}
	var fnErr error
	err := guardReads(func() error {
		return view(db, chunkKey(at.generation, n), func(stored []byte) error {
			fnErr = fn(stored, at)
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("%w: chunk %d of %d of generation %d does not read: %w",
			ErrDamaged, n, man.Chunks, at.generation, briefly(err))
	}
	return fnErr
}

// faultError is what the runtime panics with where a memory map has nothing
// behind it: a file cut short under us, or a sector that does not read.
type faultError interface {
	error
	Addr() uintptr
}

// guardReads turns a fault, or a panic of Badger's over what it reads, in this
// goroutine into an error.
func guardReads(read func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case faultError:
			err = fmt.Errorf("memory fault while reading: %w", r)
		default:
			err = fmt.Errorf("panic while reading: %v", r)
		}
	}()
	return read()
}
