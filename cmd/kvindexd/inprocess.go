package main

import (
	"bytes"
	"io"
	"net/http"

	"github.com/kvindexd/kvindexd/api"
	"github.com/kvindexd/kvindexd/api/client"
)

// inProcess is a client of a server that listens nowhere: requests go through
// its handlers as if they had come over HTTP.
func inProcess(s *api.Server) (*client.Client, error) {
	return client.New("http://in-process", client.WithHTTPClient(&http.Client{Transport: handlerTransport{s.Handler()}}))
}

// handlerTransport answers requests by a handler.
type handlerTransport struct{ h http.Handler }

// RoundTrip runs the handler to its end and returns what it wrote.
func (t handlerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil {
		r.Body = http.NoBody
	}
	w := &answer{header: http.Header{}, status: http.StatusOK}
	t.h.ServeHTTP(w, r)
	return &http.Response{
		StatusCode: w.status, Status: http.StatusText(w.status), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: w.header, Body: io.NopCloser(&w.body), ContentLength: int64(w.body.Len()), Request: r,
	}, nil
}

// answer keeps what a handler writes.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

// Header is the answer's header.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader keeps the status.
func (a *answer) WriteHeader(status int) { a.status = status }

// Write keeps the body.
func (a *answer) Write(p []byte) (int, error) { return a.body.Write(p) }
