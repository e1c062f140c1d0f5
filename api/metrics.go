package api

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are those of questions and outcomes. Labels are routes, our own
// reasons and configured workers; never a prompt, a salt, an id or a name that
// a request made up.
type metrics struct {
	duration      *prometheus.HistogramVec
	responses     *prometheus.CounterVec
	errors        *prometheus.CounterVec
	promptBlocks  prometheus.Histogram
	matchedBlocks prometheus.Histogram
	zeroMatch     prometheus.Counter
	images        *prometheus.CounterVec
	refused       *prometheus.CounterVec
	inFlight      prometheus.Gauge
	bodyBytes     prometheus.Gauge

	predictionError prometheus.Histogram
	wrongWorker     prometheus.Counter
	outcomes        *prometheus.CounterVec
	selected        *prometheus.CounterVec
}

const metricPrefix = "kvindexd_"

func newMetrics() *metrics {
	blocks := append([]float64{0}, prometheus.ExponentialBuckets(1, 2, 15)...)
	return &metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: metricPrefix + "query_duration_seconds", Help: "Time from a request's headers to the end of its answer, by route.",
			Buckets: prometheus.ExponentialBuckets(20e-6, 2, 16),
		}, []string{"route"}),
		responses: counters("http_responses_total", "Answers by route and status.", "route", "code"),
		errors:    counters("http_errors_total", "Refused requests by route and reason.", "route", "reason"),
		promptBlocks: histogram("query_prompt_blocks", "Blocks of the prompts asked about.",
			blocks),
		matchedBlocks: histogram("query_matched_blocks", "Blocks of the prompt that the best answer holds.", blocks),
		zeroMatch:     counter("query_zero_match_total", "Questions that nobody holds anything of, while the worker set holds blocks."),
		images:        counters("query_images_total", "Questions with images, by how the images were taken and why.", "mode", "reason"),
		refused:       counters("query_refused_total", "Streams that could not answer exactly a question that insists on it, by reason.", "reason"),
		inFlight:      gauge("http_requests_in_flight", "Requests being answered."),
		bodyBytes:     gauge("http_body_bytes_reserved", "Memory reserved for request bodies."),
		predictionError: histogram("outcome_prediction_error_tokens", "Predicted minus real cached tokens.",
			[]float64{-8192, -2048, -512, -128, -32, -1, 0, 1, 32, 128, 512, 2048, 8192}),
		wrongWorker: counter("outcome_wrong_worker_total", "Outcomes whose worker held less than another did when the question was answered."),
		outcomes:    counters("outcomes_total", "Outcomes by how the prediction compares with what was cached.", "result"),
		selected:    counters("outcome_selected_total", "Outcomes by the worker that was chosen.", "worker"),
	}
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: metricPrefix + name, Help: help})
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricPrefix + name, Help: help}, labels)
}

func histogram(name, help string, buckets []float64) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{Name: metricPrefix + name, Help: help, Buckets: buckets})
}

func gauge(name, help string) prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts{Name: metricPrefix + name, Help: help})
}

// all are the collectors.
func (m *metrics) all() []prometheus.Collector {
	return []prometheus.Collector{
		m.duration, m.responses, m.errors, m.promptBlocks, m.matchedBlocks, m.zeroMatch, m.images, m.refused,
		m.inFlight, m.bodyBytes, m.predictionError, m.wrongWorker, m.outcomes, m.selected,
	}
}

// Describe and Collect make the service a prometheus.Collector.
func (s *Service) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range s.metrics.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (s *Service) Collect(ch chan<- prometheus.Metric) {
	for _, c := range s.metrics.all() {
		c.Collect(ch)
	}
}

// served records one answered request.
func (m *metrics) served(route string, status int, err *Error, took time.Duration) {
	m.duration.WithLabelValues(route).Observe(took.Seconds())
	m.responses.WithLabelValues(route, strconv.Itoa(status)).Inc()
	if err != nil {
		m.errors.WithLabelValues(route, string(err.Reason)).Inc()
	}
}

// matched records one match: what was asked and what came of it.
func (m *metrics) matched(q *query, a *MatchResponse, err *Error) {
	if err != nil {
		for _, f := range err.Refused {
			m.refused.WithLabelValues(string(f.Reason)).Inc()
		}
		return
	}
	for _, f := range a.Refused {
		m.refused.WithLabelValues(string(f.Reason)).Inc()
	}
	if a.MM.Images > 0 {
		m.images.WithLabelValues(a.MM.Mode, string(a.MM.Reason)).Inc()
	}
	m.promptBlocks.Observe(float64(q.promptBlocks()))
	best := q.bestBlocks
	m.matchedBlocks.Observe(float64(best))
	if best == 0 && q.promptBlocks() > 0 && q.holdsBlocks() {
		m.zeroMatch.Inc()
	}
}

// promptBlocks is the number of whole blocks of the prompt, of the first shape
// asked about.
func (q *query) promptBlocks() int {
	if len(q.shapes) == 0 || q.shapes[0].BlockSize == 0 {
		return 0
	}
	return q.tokens / int(q.shapes[0].BlockSize)
}

// holdsBlocks says whether any of the worker sets asked holds anything.
func (q *query) holdsBlocks() bool {
	for _, p := range q.resolved.Pictures {
		if p.Index.Stats().Blocks > 0 {
			return true
		}
	}
	return false
}
