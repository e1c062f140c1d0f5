package zmqwire

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/klauspost/compress/zstd"
	"github.com/vmihailenco/msgpack/v5"
)

const (
	captureFormat  = "kvcap"
	captureVersion = 1

	// maxRecord bounds what a reader holds in memory, in bytes. A subscriber
	// takes messages of 16 MiB at most.
	maxRecord = 64 << 20
	// maxHeader and maxCaptureStreams bound a header likewise.
	maxHeader         = 1 << 20
	maxCaptureStreams = 1 << 14
	// maxRecordFrames is over what a subscriber accepts of one message.
	maxRecordFrames = 16
	zstdMagic       = "\x28\xb5\x2f\xfd"
	// firstRead is what a reader asks for at first, in bytes.
	firstRead = 64 << 10
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
	// Stream is a key of the header's Streams; a reader does not check that.
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
	// Offset in the uncompressed stream: where the header or record begins
	// that cannot be read.
	Offset int64
	// Field that is wrong, and what was expected there.
	Field, Expected string
	// Err is what the decompression said, if it is that.
	Err error
}

func (e *CorruptError) Error() string {
	s := fmt.Sprintf("zmqwire: %v capture: at byte %d of the uncompressed stream: %s: expected %s",
		ErrMalformed, e.Offset, e.Field, e.Expected)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns ErrMalformed, and what the decompression said.
func (e *CorruptError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrMalformed}
	}
	return []error{ErrMalformed, e.Err}
}

// misfit says what of a value is wrong; the reader knows where it stands.
type misfit struct{ field, expected string }

func (e *misfit) Error() string { return e.field + ": expected " + e.expected }

// errShort says that the bytes at hand end within a value.
var errShort = errors.New("the bytes end within a value")

// wrong returns the error of a value that a cursor could not read.
func (c *cursor) wrong(field, expected string) error {
	if c.short {
		return errShort
	}
	return &misfit{field, expected}
}

// CaptureReader reads a capture record by record. It is for one goroutine and
// holds one record in memory.
type CaptureReader struct {
	file   *fileReader
	src    io.Reader // the uncompressed stream
	header CaptureHeader
	names  map[string]string // of the streams, so that a record allocates none

	buf    []byte // read from src, from the last value given out on
	begin  int    // of the next value, in buf
	offset int64  // of buf[0] in the uncompressed stream
	srcErr error  // what src ended with
	err    error  // what Next ended with
}

// fileReader remembers what failed below the decompression.
type fileReader struct {
	r   io.Reader
	err error
}

func (f *fileReader) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if err != nil && err != io.EOF {
		f.err = err
	}
	return n, err
}

// NewCaptureReader reads the header. Whether the capture is compressed is seen
// from its first bytes. Its errors are those of Next; it is no end of a capture
// to have no header.
func NewCaptureReader(r io.Reader) (*CaptureReader, error) {
	c := &CaptureReader{file: &fileReader{r: r}}
	file := bufio.NewReaderSize(c.file, firstRead)
	c.src = file
	// A file of less than four bytes is no zstd frame; reading it tells why.
	if magic, _ := file.Peek(len(zstdMagic)); string(magic) == zstdMagic {
		z, err := zstd.NewReader(file,
			zstd.WithDecoderConcurrency(1), // no goroutine, so nothing to close
			zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxRecord))
		if err != nil {
			return nil, fmt.Errorf("zmqwire: capture: %w", err)
		}
		c.src = z
	}
	err := c.next(maxHeader, "header", func(cur *cursor) (err error) {
		c.header, err = readHeader(cur)
		return err
	})
	if err == io.EOF {
		err = &TruncatedError{}
	}
	if err != nil {
		return nil, err
	}
	c.names = make(map[string]string, len(c.header.Streams))
	for name := range c.header.Streams {
		c.names[name] = name
	}
	return c, nil
}

// Header returns what the capture says of itself.
func (c *CaptureReader) Header() CaptureHeader { return c.header }

// Next reads the next record into r, whose frames are valid until the next
// call. At a clean end it returns io.EOF, at a capture that was cut short a
// *TruncatedError, and at anything that is not a record a *CorruptError; after
// an error it returns the same error again.
func (c *CaptureReader) Next(r *Record) error {
	if c.err == nil {
		c.err = c.next(maxRecord, "record", func(cur *cursor) error { return c.readRecord(cur, r) })
	}
	return c.err
}

// next gives read the bytes at hand, and more of them for as long as it returns
// errShort, and moves past what it read.
func (c *CaptureReader) next(limit int, what string, read func(*cursor) error) error {
	for {
		cur := cursor{b: c.buf[c.begin:]}
		err := read(&cur)
		var wrong *misfit
		switch {
		case err == nil:
			c.begin += cur.pos
			return nil
		case errors.As(err, &wrong):
			return &CorruptError{Offset: c.at(), Field: wrong.field, Expected: wrong.expected}
		case c.srcErr != nil:
			return c.ended()
		case len(cur.b) >= limit:
			return &CorruptError{Offset: c.at(), Field: what, Expected: fmt.Sprintf("at most %d bytes", limit)}
		}
		c.fill(limit)
	}
}

// at is the offset of the next value.
func (c *CaptureReader) at() int64 { return c.offset + int64(c.begin) }

// fill reads on, so that at most limit bytes are at hand.
func (c *CaptureReader) fill(limit int) {
	if c.begin > 0 {
		c.offset = c.at()
		c.buf = c.buf[:copy(c.buf, c.buf[c.begin:])]
		c.begin = 0
	}
	have := len(c.buf)
	if have == cap(c.buf) {
		c.buf = slices.Grow(c.buf, min(max(have, firstRead), limit-have))
	}
	n, err := c.src.Read(c.buf[have:min(cap(c.buf), limit)])
	c.buf, c.srcErr = c.buf[:have+n], err
}

// ended says what it means that no more bytes come.
func (c *CaptureReader) ended() error {
	switch {
	case c.file.err != nil:
		return fmt.Errorf("zmqwire: capture: at byte %d of the uncompressed stream: %w", c.at(), c.file.err)
	case c.srcErr == io.EOF && c.begin == len(c.buf):
		return io.EOF
	case c.srcErr == io.EOF, errors.Is(c.srcErr, io.ErrUnexpectedEOF):
		return &TruncatedError{Offset: c.at()}
	}
	return &CorruptError{Offset: c.at(), Field: "compression", Expected: "zstd", Err: c.srcErr}
}

// readRecord reads [t_ns, stream, kind, frames].
func (c *CaptureReader) readRecord(cur *cursor, r *Record) error {
	if n, ok := cur.arrayLen(); !ok || n != 4 {
		return cur.wrong("record", "an array of t_ns, stream, kind, frames")
	}
	t, ok := cur.unsigned(math.MaxUint64)
	if !ok {
		return cur.wrong("t_ns", "an unsigned integer")
	}
	stream, ok := cur.text()
	if !ok {
		return cur.wrong("stream", "a string")
	}
	kind, ok := cur.unsigned(uint64(Reply))
	if !ok {
		return cur.wrong("kind", "0 or 1")
	}
	n, ok := cur.arrayLen()
	if !ok || n > maxRecordFrames {
		return cur.wrong("frames", fmt.Sprintf("an array of at most %d", maxRecordFrames))
	}
	r.Frames = r.Frames[:0]
	for range n {
		if !cur.isBin() {
			return cur.wrong("frames", "bin")
		}
		frame, ok := cur.text()
		if !ok {
			return errShort
		}
		r.Frames = append(r.Frames, frame)
	}
	r.TimeNS, r.Kind = t, RecordKind(kind)
	r.Stream, ok = c.names[string(stream)]
	if !ok {
		r.Stream = string(stream)
	}
	return nil
}

// headerReader reads a header's values and keeps the first error. nil reads as
// absent.
type headerReader struct {
	*cursor
	err error
}

// each calls read for each key of a map until there is an error.
func (h *headerReader) each(name string, read func(key string)) {
	n, ok := h.mapLen()
	if !ok {
		h.fail(name, "a map")
	}
	for i := 0; i < n && h.err == nil; i++ {
		if key, ok := h.text(); ok {
			read(string(key))
		} else {
			h.fail(name, "a string as key")
		}
	}
}

func (h *headerReader) fail(name, expected string) {
	if h.err == nil {
		h.err = h.wrong(name, expected)
	}
}

func (h *headerReader) string(name string) string {
	if h.null() {
		return ""
	}
	s, ok := h.text()
	if !ok {
		h.fail(name, "a string")
	}
	return string(s)
}

func (h *headerReader) uint(name string, limit uint64) uint64 {
	if h.null() {
		return 0
	}
	v, ok := h.unsigned(limit)
	if !ok {
		h.fail(name, fmt.Sprintf("an integer from 0 to %d", limit))
	}
	return v
}

func (h *headerReader) tokenID(name string) *uint32 {
	if h.null() {
		return nil
	}
	id := uint32(h.uint(name, math.MaxUint32))
	return &id
}

func (h *headerReader) bool(name string) bool {
	if h.null() {
		return false
	}
	v, ok := h.boolean()
	if !ok {
		h.fail(name, "true or false")
	}
	return v
}

func (h *headerReader) ignore(name string) {
	if !h.skip() {
		h.fail(name, "a value")
	}
}

func readHeader(cur *cursor) (CaptureHeader, error) {
	r := headerReader{cursor: cur}
	h := CaptureHeader{Streams: map[string]CaptureStream{}}
	var format string
	var version uint64
	r.each("header", func(key string) {
		switch key {
		case "format":
			format = r.string(key)
		case "version":
			version = r.uint(key, math.MaxUint64)
		case "created_ns":
			h.CreatedNS = r.uint(key, math.MaxUint64)
		case "note":
			h.Note = r.string(key)
		case "streams":
			h.Streams = r.streams()
		default:
			r.ignore(key)
		}
	})
	switch {
	case r.err != nil:
		return CaptureHeader{}, r.err
	case format != captureFormat:
		return CaptureHeader{}, &misfit{"format", captureFormat}
	case version != captureVersion:
		return CaptureHeader{}, &misfit{"version", fmt.Sprint(captureVersion)}
	}
	return h, nil
}

func (h *headerReader) streams() map[string]CaptureStream {
	streams := make(map[string]CaptureStream)
	h.each("streams", func(name string) {
		if len(streams) == maxCaptureStreams {
			h.err = &misfit{"streams", fmt.Sprintf("at most %d", maxCaptureStreams)}
			return
		}
		streams[name] = h.stream(name)
	})
	return streams
}

func (h *headerReader) stream(name string) (s CaptureStream) {
	h.each(name, func(key string) {
		field := name + ": " + key
		switch key {
		case "worker":
			s.Worker = h.string(field)
		case "dp_rank":
			s.DPRank = int(h.uint(field, math.MaxInt32))
		case "model":
			s.Model = h.string(field)
		case "namespace":
			s.Namespace = h.string(field)
		case "role":
			s.Role = h.string(field)
		case "topic":
			s.Topic = h.string(field)
		case "extra_keys":
			s.ExtraKeys = h.string(field)
		case "block_size":
			s.BlockSize = uint32(h.uint(field, math.MaxUint32))
		case "image_token_id":
			s.ImageTokenID = h.tokenID(field)
		case "video_token_id":
			s.VideoTokenID = h.tokenID(field)
		case "tower_connector_lora":
			s.TowerConnectorLora = h.bool(field)
		case "eagle_drop":
			s.EagleDrop = h.bool(field)
		default:
			h.ignore(field)
		}
	})
	return s
}

// CaptureWriter writes a capture. It is for one goroutine.
type CaptureWriter struct {
	out io.Writer
	zip *zstd.Encoder // nil: not compressed
	enc *msgpack.Encoder
	buf appender // the value that is being written
}

// NewCaptureWriter writes the header to w, zstd-compressed if compress is set.
func NewCaptureWriter(w io.Writer, h CaptureHeader, compress bool) (*CaptureWriter, error) {
	if len(h.Streams) > maxCaptureStreams {
		return nil, fmt.Errorf("zmqwire: capture: %d streams, expected at most %d", len(h.Streams), maxCaptureStreams)
	}
	c := &CaptureWriter{out: w}
	if compress {
		// Concurrency 1 has no goroutine, which an error would leave behind.
		zip, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		if err != nil {
			return nil, fmt.Errorf("zmqwire: capture: %w", err)
		}
		c.out, c.zip = zip, zip
	}
	c.enc = msgpack.NewEncoder(&c.buf)
	if err := c.put("header", maxHeader, func() error { return c.writeHeader(h) }); err != nil {
		return nil, err
	}
	return c, nil
}

// put encodes one value and hands it on in one piece. What no reader would take
// is not written.
func (c *CaptureWriter) put(what string, limit int, encode func() error) error {
	c.buf.b = c.buf.b[:0]
	err := encode()
	switch {
	case err != nil:
	case len(c.buf.b) > limit:
		err = fmt.Errorf("a %s of %d bytes, expected at most %d", what, len(c.buf.b), limit)
	default:
		_, err = c.out.Write(c.buf.b)
	}
	if err != nil {
		return fmt.Errorf("zmqwire: capture: %w", err)
	}
	return nil
}

func (c *CaptureWriter) writeHeader(h CaptureHeader) error {
	streams := make(map[string]any, len(h.Streams))
	for name, s := range h.Streams {
		streams[name] = s.fields()
	}
	c.enc.SetSortMapKeys(true)
	c.enc.UseCompactInts(true)
	return c.enc.Encode(map[string]any{
		"format": captureFormat, "version": captureVersion,
		"created_ns": h.CreatedNS, "streams": streams, "note": h.Note,
	})
}

// fields returns what the file says of a stream.
func (s CaptureStream) fields() map[string]any {
	fields := map[string]any{"worker": s.Worker, "dp_rank": s.DPRank, "model": s.Model}
	optional := map[string]any{
		"namespace": s.Namespace, "role": s.Role, "topic": s.Topic, "extra_keys": s.ExtraKeys,
		"block_size":           s.BlockSize,
		"tower_connector_lora": s.TowerConnectorLora, "eagle_drop": s.EagleDrop,
	}
	maps.DeleteFunc(optional, func(_ string, v any) bool { return v == "" || v == uint32(0) || v == false })
	maps.Copy(fields, optional)
	if s.ImageTokenID != nil {
		fields["image_token_id"] = *s.ImageTokenID
	}
	if s.VideoTokenID != nil {
		fields["video_token_id"] = *s.VideoTokenID
	}
	return fields
}

// Write appends one record.
func (c *CaptureWriter) Write(r Record) error {
	if len(r.Frames) > maxRecordFrames {
		return fmt.Errorf("zmqwire: capture: a record of %d frames, expected at most %d", len(r.Frames), maxRecordFrames)
	}
	return c.put("record", maxRecord, func() error {
		return errors.Join(
			c.enc.EncodeArrayLen(4),
			c.enc.EncodeUint(r.TimeNS),
			c.enc.EncodeString(r.Stream),
			c.enc.EncodeUint(uint64(r.Kind)),
			c.frames(r.Frames))
	})
}

func (c *CaptureWriter) frames(frames [][]byte) error {
	err := c.enc.EncodeArrayLen(len(frames))
	for _, frame := range frames {
		if frame == nil {
			frame = []byte{} // nil would be written as nil
		}
		err = errors.Join(err, c.enc.EncodeBytes(frame))
	}
	return err
}

// Flush hands everything that was written to the underlying writer, so that a
// process that is killed leaves all of it readable.
func (c *CaptureWriter) Flush() error {
	if c.zip == nil {
		return nil
	}
	if err := c.zip.Flush(); err != nil {
		return fmt.Errorf("zmqwire: capture: %w", err)
	}
	return nil
}

// Close flushes and ends the capture. It does not close the underlying writer.
func (c *CaptureWriter) Close() error {
	if c.zip == nil {
		return nil
	}
	if err := c.zip.Close(); err != nil {
		return fmt.Errorf("zmqwire: capture: %w", err)
	}
	return nil
}
