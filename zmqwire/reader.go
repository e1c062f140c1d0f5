package zmqwire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// The flags of a ZMTP frame; the other bits are reserved and zero.
const (
	flagMore    = 1 << 0
	flagLong    = 1 << 1
	flagCommand = 1 << 2
	flagsKnown  = flagMore | flagLong | flagCommand

	// maxFrameHeader is flags and an 8-byte length.
	maxFrameHeader = 9
	// maxCommand bounds a command's body: PING is the longest that we read.
	maxCommand = 4 << 10
)

const (
	// retainBuffer bounds what an idle or lightly used connection keeps
	// after a message that needed more.
	retainBuffer = 1 << 20
	// shrinkAfter is how many small messages in a row make a grown buffer
	// shrink again.
	shrinkAfter = 1024
)

// frameReader reads ZMTP frames from one buffer into which the connection is
// read directly: a message's frames are views into it and valid until the next
// call of next. The buffer grows by doubling as bytes arrive, never because a
// header announces them, so a peer pays for what it makes us hold. An error of
// src leaves the state as it is: after a timeout next can be called again.
//
// Not for concurrent use.
type frameReader struct {
	src io.Reader
	// command is called with each command's body, a view; its error ends next.
	command    func(body []byte) error
	maxMessage int
	maxFrames  int

	// buf[start:w] is unread; buf[start:pos] are the whole frames of the
	// message that is being read.
	buf           []byte
	start, pos, w int
	base          int
	small         int // messages in a row that would have fitted base

	spans    []span // of the message's frames, relative to start
	frames   [][]byte
	size     int // of the message's frames
	commands int // bytes of commands between the message's frames
	whole    bool
}

type span struct{ from, to int }

func newFrameReader(src io.Reader, buffer, maxMessage, maxFrames int) *frameReader {
	return &frameReader{
		src:        src,
		maxMessage: maxMessage,
		maxFrames:  maxFrames,
		base:       buffer,
		buf:        make([]byte, buffer),
		spans:      make([]span, 0, maxFrames),
		frames:     make([][]byte, 0, maxFrames),
	}
}

// next returns the next message's frames. Commands on the way go to r.command.
func (r *frameReader) next() ([][]byte, error) {
	if r.whole {
		r.release()
	}
	for {
		need, err := r.frame()
		switch {
		case err != nil:
			return nil, err
		case r.whole:
			return r.views(), nil
		case need:
			if err := r.fill(); err != nil {
				return nil, err
			}
		}
	}
}

// frame takes the frame at pos if it is whole, and says otherwise that more
// bytes are needed.
func (r *frameReader) frame() (need bool, err error) {
	b := r.buf[r.pos:r.w]
	if len(b) < 2 {
		return true, nil
	}
	flags, header, size := b[0], 2, uint64(b[1])
	if flags&^flagsKnown != 0 {
		return false, faultf(ReasonMalformedFrame, "frame flags %#02x", flags)
	}
	if flags&flagLong != 0 {
		if len(b) < maxFrameHeader {
			return true, nil
		}
		header, size = maxFrameHeader, binary.BigEndian.Uint64(b[1:])
	}
	if flags&flagCommand != 0 {
		return r.takeCommand(b, flags, header, size)
	}
	if size > uint64(r.maxMessage-r.size) {
		return false, faultf(ReasonOversizedFrame, "frame of %d bytes after %d bytes of its message, at most %d are read", size, r.size, r.maxMessage)
	}
	if len(r.spans) == r.maxFrames {
		return false, faultf(ReasonTooManyFrames, "message of more than %d frames", r.maxFrames)
	}
	if uint64(len(b)-header) < size {
		return true, nil
	}
	from := r.pos - r.start + header
	r.spans = append(r.spans, span{from, from + int(size)})
	r.size += int(size)
	r.pos += header + int(size)
	r.whole = flags&flagMore == 0
	return false, nil
}

// takeCommand handles a command frame. One between the frames of a message
// (libzmq's heartbeat may stand there) stays in the buffer until the message
// is released.
func (r *frameReader) takeCommand(b []byte, flags byte, header int, size uint64) (need bool, err error) {
	if flags&flagMore != 0 {
		return false, faultf(ReasonMalformedFrame, "command frame with more to come")
	}
	if size > maxCommand {
		return false, faultf(ReasonOversizedFrame, "command of %d bytes, at most %d are read", size, maxCommand)
	}
	n := header + int(size)
	if len(b) < n {
		return true, nil
	}
	r.pos += n
	if len(r.spans) == 0 {
		r.start = r.pos
	} else if r.commands += n; r.commands > retainBuffer {
		return false, faultf(ReasonCommandFlood, "%d bytes of commands within one message", r.commands)
	}
	return false, r.command(b[header:n])
}

func (r *frameReader) views() [][]byte {
	r.frames = r.frames[:0]
	b := r.buf[r.start:r.pos]
	for _, s := range r.spans {
		r.frames = append(r.frames, b[s.from:s.to:s.to])
	}
	return r.frames
}

// release forgets the message that next returned.
func (r *frameReader) release() {
	if r.pos-r.start <= r.base/2 {
		r.small++
	} else {
		r.small = 0
	}
	r.start = r.pos
	r.spans = r.spans[:0]
	r.size, r.commands, r.whole = 0, 0, false
}

// fill makes room and reads once.
func (r *frameReader) fill() error {
	unread := r.w - r.start
	switch {
	case r.shrinks(unread):
		r.moveTo(make([]byte, r.base))
	case unread == 0 || r.w == len(r.buf) && r.start > 0:
		r.moveTo(r.buf)
	}
	if r.w == len(r.buf) {
		r.moveTo(make([]byte, 2*len(r.buf)))
	}
	for range 100 {
		n, err := r.src.Read(r.buf[r.w:])
		if n < 0 || n > len(r.buf)-r.w {
			return fmt.Errorf("BUG: read of %d bytes into %d", n, len(r.buf)-r.w)
		}
		r.w += n
		if n > 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}

// moveTo copies the unread bytes to the front of buf, which becomes the buffer.
func (r *frameReader) moveTo(buf []byte) {
	r.w = copy(buf, r.buf[r.start:r.w])
	r.pos -= r.start
	r.start = 0
	r.buf = buf
}

// shrinks reports whether a grown buffer has served its purpose.
func (r *frameReader) shrinks(unread int) bool {
	if len(r.buf) == r.base || unread > r.base/2 {
		return false
	}
	return len(r.buf) > retainBuffer || r.small >= shrinkAfter
}

// trim gives a grown buffer back when the connection has nothing to say.
func (r *frameReader) trim() {
	if unread := r.w - r.start; !r.whole && unread <= r.base/2 && len(r.buf) > r.base {
		r.moveTo(make([]byte, r.base))
	}
}

// appendFrame appends one frame of a message, or a command's.
func appendFrame(dst []byte, flags byte, body []byte) []byte {
	dst = appendFrameHeader(dst, flags, len(body))
	return append(dst, body...)
}

func appendFrameHeader(dst []byte, flags byte, size int) []byte {
	if size < 256 {
		return append(dst, flags, byte(size))
	}
	dst = append(dst, flags|flagLong)
	return binary.BigEndian.AppendUint64(dst, uint64(size))
}

// appendCommand appends a command frame: its name and its data.
func appendCommand(dst []byte, name string, data []byte) []byte {
	dst = appendFrameHeader(dst, flagCommand, 1+len(name)+len(data))
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	return append(dst, data...)
}

// splitCommand is appendCommand's inverse for a command's body; ok is false
// where the name's length is none.
func splitCommand(body []byte) (name, data []byte, ok bool) {
	if len(body) == 0 || int(body[0]) > len(body)-1 {
		return nil, nil, false
	}
	n := 1 + int(body[0])
	return body[1:n], body[n:], true
}
