// Package normalize gives blocks their identity: the same identity for what a
// worker's events announce and for what a request asks.
//
// A block is its tokens, the adapter, the cache salt and the images or videos
// behind its placeholder tokens. Local hashes name one block, sequence hashes
// the whole prefix that ends in it; both are the XXH3 scheme of the KV-event
// RFCs, so that a frontend which computes them itself can ask by hash. Where an
// identity is not fully known, the block matches nobody: an answer may be too
// short, never too long.
//
// Events come from package zmqwire; who holds which block is the business of
// package index.
package normalize
