package zmqwire

import (
	"errors"
	"fmt"
	"io"
)

// CaptureHeader is what a capture says of itself and of its streams.
type CaptureHeader struct {
	CreatedNS uint64
	// Streams by the name that the records give.
	Streams map[string]CaptureStream
	Note    string
}

// CaptureStream is one publisher, as the configuration of a fleet would have
// it. Zero values are absent in the file.
type CaptureStream struct {
	Worker                     string
	DPRank                     int
	Model                      string
	Namespace, Role            string
	Topic                      string
	ExtraKeys                  string
	BlockSize                  uint32
	ImageTokenID, VideoTokenID *uint32
	TowerConnectorLora         bool
	EagleDrop                  bool
}

// RecordKind says by which way a message came.
type RecordKind uint8

const (
	// Live messages came from the PUB socket.
	Live RecordKind = 0
	// Reply messages came from the replay socket, their end marker included.
	Reply RecordKind = 1
)

// Record is one message as it was received.
type Record struct {
	// TimeNS is when, in nanoseconds since the Unix epoch.
	TimeNS uint64
	// Stream is a key of the header's Streams.
	Stream string
	Kind   RecordKind
	Frames [][]byte
}

// TruncatedError says that a capture ends in the middle of a record. All before
// Offset was whole and may be used.
type TruncatedError struct {
	// Offset is where the record that was cut begins, in the uncompressed
	// stream.
	Offset int64
}

func (e *TruncatedError) Error() string {
	return fmt.Sprintf("zmqwire: capture cut short: the last whole record ends at byte %d of the uncompressed stream", e.Offset)
}

// CorruptError says that a capture holds something that no writer of captures
// writes. ErrMalformed is in its chain.
type CorruptError struct {
	// Offset of the value that cannot be read, in the uncompressed stream.
	Offset int64
	// Field that is wrong, and what was expected there.
	Field, Expected string
	// Err is what the decompression said, if it is that.
	Err error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("zmqwire: capture corrupt at byte %d of the uncompressed stream: %s: expected %s", e.Offset, e.Field, e.Expected)
}

// CaptureReader reads a capture record by record.
type CaptureReader struct{}

// NewCaptureReader reads the header. Whether the capture is compressed is seen
// from its first bytes.
func NewCaptureReader(r io.Reader) (*CaptureReader, error) { return nil, errors.ErrUnsupported }

// Header returns what the capture says of itself.
func (c *CaptureReader) Header() CaptureHeader { return CaptureHeader{} }

// Next reads the next record into r, whose frames are valid until the next
// call. At a clean end it returns io.EOF, at a capture that was cut short a
// *TruncatedError, and at anything that is not a record a *CorruptError; after
// an error it returns the same error again.
func (c *CaptureReader) Next(r *Record) error { return errors.ErrUnsupported }

// CaptureWriter writes a capture. It is for one goroutine.
type CaptureWriter struct{}

// NewCaptureWriter writes the header to w, zstd-compressed if compress is set.
func NewCaptureWriter(w io.Writer, h CaptureHeader, compress bool) (*CaptureWriter, error) {
	return nil, errors.ErrUnsupported
}

// Write appends one record.
func (c *CaptureWriter) Write(r Record) error { return errors.ErrUnsupported }

// Flush hands everything that was written to the underlying writer, so that a
// process that is killed leaves all of it readable.
func (c *CaptureWriter) Flush() error { return errors.ErrUnsupported }

// Close flushes and ends the capture. It does not close the underlying writer.
func (c *CaptureWriter) Close() error { return errors.ErrUnsupported }
