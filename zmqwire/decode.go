package zmqwire

import "errors"

// A Decoder turns payloads into batches. The zero value is ready. It is for one
// goroutine; its buffers are reused, so decoding does not allocate in the
// steady state.
type Decoder struct {
	batch Batch
}

// Decode reads one payload. The batch is the Decoder's: it is valid until the
// next Decode and borrows from payload. The error, in whose chain is
// ErrMalformed, says that the batch itself cannot be read; an event that cannot
// be read costs itself only, and is counted in the batch.
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	return nil, errors.ErrUnsupported
}
