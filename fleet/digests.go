package fleet

import (
	"cmp"
	"slices"
)

// digests are XXH3_64 of the payloads of batches that were applied, by seq: of
// the newest few, and of those that may still come again.
type digests struct {
	recent [16]stamp
	// ahead is what replays brought since the connection began and its live
	// messages have not reached yet: those are on their way. Ascending.
	ahead []stamp
}

// stamp is the digest of one batch.
type stamp struct {
	seq, digest uint64
	ok          bool
}

func (st stamp) compare(seq uint64) int { return cmp.Compare(st.seq, seq) }

// maxAhead bounds digests.ahead: more than three of vLLM's rings. A live message
// that lags behind a replay by more is taken for another process's.
const maxAhead = 1 << 15

// get returns the digest of a batch, where it is kept.
func (d *digests) get(seq uint64) (uint64, bool) {
	if st := d.recent[seq%uint64(len(d.recent))]; st.ok && st.seq == seq {
		return st.digest, true
	}
	if i, ok := slices.BinarySearchFunc(d.ahead, seq, stamp.compare); ok {
		return d.ahead[i].digest, true
	}
	return 0, false
}

// applied keeps the digest of the newest batch.
func (d *digests) applied(seq, digest uint64) {
	d.recent[seq%uint64(len(d.recent))] = stamp{seq, digest, true}
}

// replayed keeps it until the live messages have come as far. Its seq is above
// all others.
func (d *digests) replayed(seq, digest uint64) {
	d.ahead = append(d.ahead[max(0, len(d.ahead)+1-maxAhead):], stamp{seq, digest, true})
}

// reached says how far the live messages are.
func (d *digests) reached(seq uint64) {
	n := 0
	for n < len(d.ahead) && d.ahead[n].seq <= seq {
		n++
	}
	if d.ahead = d.ahead[n:]; len(d.ahead) == 0 {
		d.ahead = nil
	}
}

// settled: no live message is on its way.
func (d *digests) settled() { d.ahead = nil }
