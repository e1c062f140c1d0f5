package api

import (
	"errors"
	"io"
	"mime"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

// budget bounds the memory of all bodies that are being read or answered, so
// that many slow uploads cannot add up to more than the machine has.
type budget struct {
	max  int64
	used atomic.Int64
}

// take reserves n bytes, or nothing.
func (b *budget) take(n int64) bool {
	if b.used.Add(n) > b.max {
		b.used.Add(-n)
		return false
	}
	return true
}

func (b *budget) give(n int64) { b.used.Add(-n) }

const (
	// firstRead is reserved for a body before its first byte: an announced
	// length is only believed as far as bytes come.
	firstRead = 128 << 10
	// keepBuffer is the largest buffer that is kept for the next request.
	keepBuffer = 1 << 20
	// memoryPerByte is what decoding reserves beside each byte of the body:
	// an id of one digit and a comma becomes four bytes.
	memoryPerByte = 3
)

// readBody reads the request's body into c.body.
func (c *call) readBody(limit int64) *Error {
	r := c.r
	if enc := r.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		return failf(http.StatusUnsupportedMediaType, ReasonContentEncoding, "send the body without Content-Encoding")
	}
	if err := c.mediaType(); err != nil {
		return err
	}
	if r.ContentLength > limit {
		return tooLarge(limit)
	}
	if err := c.growBody(max(min(r.ContentLength+1, firstRead), 512), limit); err != nil {
		return err
	}
	for {
		n, err := r.Body.Read(c.body[len(c.body):cap(c.body)])
		c.body = c.body[:len(c.body)+n]
		if int64(len(c.body)) > limit {
			return tooLarge(limit)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return bodyError(err)
		}
		if len(c.body) == cap(c.body) {
			want := min(2*int64(cap(c.body)), max(r.ContentLength, 0)+1)
			if r.ContentLength < 0 {
				want = 2 * int64(cap(c.body))
			}
			if err := c.growBody(max(want, int64(cap(c.body))+512), limit); err != nil {
				return err
			}
		}
	}
}

// growBody makes the buffer hold n bytes, at most one more than the limit, and
// reserves them.
func (c *call) growBody(n, limit int64) *Error {
	n = max(min(n, limit+1), int64(len(c.body))+1)
	if more := max(n, int64(cap(c.body)))*memoryPerByte - c.reserved; more > 0 {
		if !c.srv.bodies.take(more) {
			e := failf(http.StatusTooManyRequests, ReasonOverloaded, "too many large bodies at once; try again")
			e.RetryAfter = time.Second
			return e
		}
		c.reserved += more
	}
	if int64(cap(c.body)) < n {
		b := make([]byte, len(c.body), n)
		copy(b, c.body)
		c.body = b
	}
	return nil
}

func tooLarge(limit int64) *Error {
	return failf(http.StatusRequestEntityTooLarge, ReasonBodyTooLarge, "the body is larger than %d bytes", limit)
}

func bodyError(err error) *Error {
	var timeout net.Error
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
		return failf(http.StatusRequestTimeout, ReasonBodyTimeout, "the body did not come in time")
	}
	return failf(http.StatusBadRequest, ReasonMalformedBody, "the body could not be read to its end")
}

// mediaType decides between JSON and msgpack by Content-Type. None is JSON.
func (c *call) mediaType() *Error {
	t := c.r.Header.Get("Content-Type")
	switch t {
	case "application/json", "":
		return nil
	case "application/msgpack":
		c.msgpackIn = true
		return nil
	}
	base, params, err := mime.ParseMediaType(t)
	if charset := params["charset"]; err == nil && (charset == "" || charset == "utf-8" || charset == "UTF-8") {
		switch base {
		case "application/json":
			return nil
		case "application/msgpack", "application/x-msgpack", "application/vnd.msgpack":
			c.msgpackIn = true
			return nil
		}
	}
	return failf(http.StatusUnsupportedMediaType, ReasonMediaType, "send Content-Type application/json or application/msgpack")
}
