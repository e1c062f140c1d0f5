// Package api answers questions over HTTP: who holds how much of this prompt,
// which workers there are, and whether the answers turned out true.
//
// Service is the core as plain Go calls; the handlers decode a body, ask the
// Service and encode its answer, and nothing else. Handlers return an *Error,
// and one place (serve) makes status, body, log line and metric of it. The
// drop-in routes for clients of other indexers are adaptors over the same
// Service.
//
// It promises that an answer is never longer than what the index holds, that a
// field which would isolate tenants is never ignored, that a body costs memory
// in proportion to what was received and never more than the configured limit,
// and that no salt or token reaches a log line, a metric, a dump or an error.
// Which blocks a prompt has is the business of package normalize, who holds
// them of package index, and who is a member of package fleet.
package api
