package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/kvindexd/kvindexd/fleet"
)

// snapshotAnswer is what POST /v1/snapshot has written.
type snapshotAnswer struct {
	fleet.Written
	TookMS          float64 `json:"took_ms"`
	LongestFreezeMS float64 `json:"longest_freeze_ms"`
}

// handleSnapshot answers POST /v1/snapshot once the snapshot is on disk.
func handleSnapshot(c *call) *Error {
	s := c.srv.Snapshots
	if s == nil {
		return failf(http.StatusConflict, ReasonNoSnapshots, "the daemon keeps no snapshots; start it with --state-dir")
	}
	// A client that goes away does not stop what others rely on.
	w, err := s.Write(context.WithoutCancel(c.r.Context()), c.srv.Fleet)
	switch {
	case errors.Is(err, fleet.ErrNoStore):
		return failf(http.StatusConflict, ReasonNoSnapshots, "the daemon keeps no snapshots; start it with --state-dir")
	case errors.Is(err, fleet.ErrSnapshotRunning):
		return failf(http.StatusConflict, ReasonSnapshotRunning, "a snapshot is being written already")
	case errors.Is(err, fleet.ErrNothingToKeep):
		return failf(http.StatusConflict, ReasonNothingToKeep, "no worker has been heard from yet, and the last snapshot is better than an empty one")
	case err != nil:
		return failf(http.StatusInternalServerError, ReasonSnapshotFailed, "%v", err)
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return c.reply(http.StatusOK, snapshotAnswer{w, ms(w.Took), ms(w.Freeze)})
}

// maxDumps bounds the dumps that are written at once: each keeps a copy of one
// stream.
const maxDumps = 2

// dumping takes one of the few places that there are for dumps.
func (s *Server) dumping() (done func(), err *Error) {
	select {
	case s.dumps <- struct{}{}:
		return func() { <-s.dumps }, nil
	default:
		err = failf(http.StatusTooManyRequests, ReasonOverloaded, "%d dumps are being written already; try again", maxDumps)
		err.RetryAfter = time.Second
		return nil, err
	}
}

// handleDump answers GET /v1/dump with JSON lines: all worker sets, or those of
// a model, namespace or role. A dump that does not end with its end line is not
// whole.
func handleDump(c *call) *Error {
	done, err := c.srv.dumping()
	if err != nil {
		return err
	}
	defer done()
	sets, err := c.dumped()
	if err != nil {
		return err
	}
	c.streamed = true
	c.w.Header().Set("Content-Type", "application/x-ndjson")
	w := &patient{w: c.w, control: http.NewResponseController(c.w), patience: c.srv.WriteTimeout}
	if err := c.srv.Fleet.Dump(c.r.Context(), w, sets); err != nil {
		panic(http.ErrAbortHandler) // the reader went away, or must see that this is not all
	}
	return nil
}

// dumped reads which worker sets are wanted; nil: all.
func (c *call) dumped() (func(fleet.SetKey) bool, *Error) {
	q := c.r.URL.Query()
	for name := range q {
		switch name {
		case "model", "namespace", "role":
		default:
			return nil, badField(name, "is no parameter of a dump; there are model, namespace and role")
		}
	}
	if len(q) == 0 {
		return nil, nil
	}
	fits := func(name, v string) bool { return !q.Has(name) || q.Get(name) == v }
	return func(k fleet.SetKey) bool {
		return fits("model", k.Model) && fits("namespace", k.Namespace) && fits("role", k.Role)
	}, nil
}

// patient gives a reader its time anew with every line.
type patient struct {
	w        io.Writer
	control  *http.ResponseController
	patience time.Duration
}

func (p *patient) Write(b []byte) (int, error) {
	if err := p.control.SetWriteDeadline(time.Now().Add(p.patience)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	return p.w.Write(b)
}
