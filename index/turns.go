package index

import (
	"sync"
	"sync/atomic"
	"time"
)

// turns is the lock of a Set: many readers, or one writer, as sync.RWMutex is.
// But where writers queue, they follow each other for up to turnLength before
// the readers are let in. With a plain RWMutex every batch waited for all the
// readers that had queued behind the last one: on two cores, eight streams
// ingesting at full speed beside eight readers kept 5 % of what they reach
// alone, and keep half of it this way.
//
// The zero value is free.
type turns struct {
	rw sync.RWMutex // held for writing throughout a turn

	waiting atomic.Int32 // writers at w
	w       sync.Mutex   // held by the writer whose batch it is
	turn    bool         // a turn is on; guarded by w
	began   time.Time    // when it was first handed on; guarded by w
}

// turnLength bounds how long readers wait for writers, two batches aside. With 50
// µs the eight streams keep 39 to 48 % of their pace, with 100 µs 51 to 54 %.
const turnLength = 100 * time.Microsecond

func (l *turns) RLock()   { l.rw.RLock() }
func (l *turns) RUnlock() { l.rw.RUnlock() }

func (l *turns) Lock() {
	if !l.w.TryLock() {
		l.waiting.Add(1)
		l.w.Lock()
		l.waiting.Add(-1)
	}
	if !l.turn { // else another writer left it to us
		l.rw.Lock()
		l.turn, l.began = true, time.Time{}
	}
}

func (l *turns) Unlock() {
	if l.waiting.Load() == 0 || l.over() {
		l.turn = false
		l.rw.Unlock()
	}
	l.w.Unlock()
}

// over says whether the turn is not to be handed on. A writer that nobody waits
// for does not ask, and so does not look at the clock.
func (l *turns) over() bool {
	now := time.Now()
	if l.began.IsZero() {
		l.began = now
	}
	return now.Sub(l.began) > turnLength
}

// RLocker locks for reading.
func (l *turns) RLocker() sync.Locker { return l.rw.RLocker() }
