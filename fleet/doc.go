// Package fleet knows which workers there are, keeps a subscription to each of
// their publishers, and offers what they hold as immutable pictures.
//
// There is one desired state, drawn from several sources (a file, registration
// over HTTP, DNS, flags), and one reconciler that applies the differences in
// order per worker; a worker that fails holds up no other. Each publisher has a
// stream, the state machine that decides what a message's sequence number
// means: next, duplicate, gap, restart. Gaps are filled from the publisher's
// replay endpoint; what no replay fills is told in the stream's state, never
// papered over.
//
// A query takes one [Picture] of its worker set and keeps it to its end:
// membership, placeholder token ids, adapters and streams always come from the
// same moment. Pictures are replaced whole, so taking one costs an atomic load.
//
// Bytes are zmqwire's business, identities normalize's, residency index's.
package fleet
