// Package zmqwire turns what a vLLM worker's KV-event publisher puts on the
// wire into events, and back.
//
// It owns bytes and sockets and nothing else: frames, batches and events of the
// msgpack encoding, the ZMTP connection (subscriber, replay client, publisher),
// and capture files. It promises that no input panics, allocates more than a
// small multiple of its own size, or recurses without bound, and that one bad
// event costs itself only. What an event means (which tier a medium is, which
// content a block has, who holds it) is left to the packages after it:
// normalize, then index.
//
// The facts are vLLM's own sources and events recorded from vLLM's own
// publisher; docs/wire.md repeats what this package relies on.
package zmqwire
