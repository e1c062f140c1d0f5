package zmqwire

import "errors"

// EncodeOptions say in which of vLLM's forms a batch is written. The zero value
// is that of vLLM 0.22 and 0.23: arrays, integer hashes.
type EncodeOptions struct {
	// Maps writes events as maps, as vLLM 0.24 and later do.
	Maps bool
	// BytesHashes writes engine hashes as 32 bytes, the handle last.
	BytesHashes bool
	// Slots is the length of a BlockStored array, tag included: 6 (vLLM 0.9),
	// 8 (0.15) or 12 (0.22). 0 is 12.
	Slots int
}

// AppendBatch appends the msgpack form of b to dst. It refuses what the asked
// form cannot carry, and an extra key whose Raw is not one msgpack value;
// ExtraText and ExtraMM make such keys.
func AppendBatch(dst []byte, b *Batch, o EncodeOptions) ([]byte, error) {
	return dst, errors.ErrUnsupported
}

// ExtraText returns an extra key that is a bare string: an adapter's name or a
// cache salt.
func ExtraText(s string) ExtraKey { return ExtraKey{} }

// ExtraMM returns the extra key of a multimodal item: its identifier, and where
// it begins, counted from the block's begin (so it can be negative).
func ExtraMM(identifier string, offset int64) ExtraKey { return ExtraKey{} }
