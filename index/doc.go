// Package index knows which worker holds which prefix.
//
// A Set holds the trees of one worker set; a Stream is one publisher's part in
// it. Streams apply normalised batches, queries ask for chains of sequence
// hashes, and each stream's answer is the unbroken run of blocks it holds from
// the prompt's start, by tier, and what vLLM would use of it.
//
// What it promises: a stream is never credited with a block that it did not
// hold at some moment during the query; when no batch is being applied the
// answer is that of a plain map per stream; a removal or clear touches its own
// stream and tier only; memory follows what is held. One goroutine at a time
// may write to a stream; queries may run beside all of them.
//
// Identities come from package normalize. Sequence numbers, gaps and who is
// alive are package fleet's. docs/index.md draws the structure.
package index
