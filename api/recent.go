package api

import (
	"slices"
	"sync"
)

// recent remembers what the last answered requests were told, by request id, so
// that an outcome can say whether another worker held more. It forgets the
// oldest.
type recent struct {
	mu    sync.Mutex
	slots []told
	at    map[string]int // place in slots
	next  int
}

// recentAnswers and recentRows bound recent to 5 MB.
const (
	recentAnswers = 4096
	recentRows    = 32
)

// told is one answer: the request's id and what the best streams were said to
// hold, the best first. Who is not among a full number of them holds no more
// than the last.
type told struct {
	id   string
	rows []toldRow
}

type toldRow struct {
	worker string
	rank   int
	tokens int
}

func newRecent() *recent {
	return &recent{slots: make([]told, 0, recentAnswers), at: make(map[string]int)}
}

// add remembers the best candidates under id.
func (r *recent) add(id string, best []candidate) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, known := r.at[id]
	switch {
	case known:
	case len(r.slots) < recentAnswers:
		i = len(r.slots)
		r.slots = append(r.slots, told{})
	default:
		i = r.next
		r.next = (r.next + 1) % recentAnswers
		delete(r.at, r.slots[i].id)
	}
	s := &r.slots[i]
	s.id, s.rows = id, s.rows[:0]
	for j := range best[:min(len(best), recentRows)] {
		c := &best[j]
		s.rows = append(s.rows, toldRow{c.member.Worker, c.member.Rank, c.score()})
	}
	r.at[id] = i
}

// of returns what the request was told, nil if it is not remembered.
func (r *recent) of(id string) []toldRow {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i, ok := r.at[id]; ok {
		return slices.Clone(r.slots[i].rows)
	}
	return nil
}
