package api

import (
	_ "embed"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

//go:embed dashboard.html
var dashboard []byte

//go:embed openapi.json
var openapi []byte

type healthAnswer struct {
	Status  string `json:"status"`
	Version string `json:"version,omitempty"`
}

// handleHealth answers GET /healthz: the process serves.
func handleHealth(c *call) *Error {
	return c.reply(http.StatusOK, healthAnswer{"ok", c.srv.Version})
}

// readyAnswer says what is missing. Names of workers are only for who may read.
type readyAnswer struct {
	Ready      bool     `json:"ready"`
	Workers    int      `json:"workers"`
	Settled    int      `json:"settled"`
	MinWorkers int      `json:"min_workers"`
	Missing    []string `json:"missing"`
	Waiting    []string `json:"waiting,omitempty"`
}

// handleReady answers GET /readyz. Readiness gates nothing but this answer:
// the other routes answer from the start with what is known.
func handleReady(c *call) *Error {
	r := c.srv.Fleet.Ready()
	a := readyAnswer{Workers: r.Workers, Settled: r.Settled, MinWorkers: c.srv.MinWorkers, Missing: []string{}}
	if r.Settled < c.srv.MinWorkers {
		a.Missing = append(a.Missing, fmt.Sprintf("%d of at least %d workers are followed (%d are configured and admitted)", r.Settled, c.srv.MinWorkers, r.Workers))
	}
	if c.srv.draining.Load() {
		a.Missing = append(a.Missing, "the daemon is stopping")
	}
	if c.srv.authorize(read, c.r) == nil {
		a.Waiting = r.Waiting
	}
	a.Ready = len(a.Missing) == 0
	if !a.Ready {
		return c.reply(http.StatusServiceUnavailable, a)
	}
	return c.reply(http.StatusOK, a)
}

// handleMetrics answers GET /metrics.
func (s *Server) handleMetrics() func(*call) *Error {
	h := promhttp.HandlerFor(s.Registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
	return func(c *call) *Error {
		c.streamed = true
		h.ServeHTTP(c.w, c.r)
		return nil
	}
}

// handleDashboard answers GET /. The page has no data of its own: it asks the
// other routes, with the reader's token.
func handleDashboard(c *call) *Error {
	c.contentType = "text/html; charset=utf-8"
	h := c.w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	c.out.b = append(c.out.b[:0], dashboard...)
	return nil
}

// handleOpenAPI answers GET /openapi.json.
func handleOpenAPI(c *call) *Error {
	c.contentType = "application/json"
	c.out.b = append(c.out.b[:0], openapi...)
	return nil
}
