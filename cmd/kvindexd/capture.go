package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// captureFile is a capture that can be read more than once: what replays it
// must know beforehand which gaps it fills itself.
type captureFile struct {
	name string
	// content of a capture that came by stdin, nil for a file.
	content []byte
}

// openCapture takes a file's name, or - for stdin.
func openCapture(cmd *cobra.Command, name string) (*captureFile, error) {
	if name != "-" {
		return &captureFile{name: name}, nil
	}
	content, err := io.ReadAll(cmd.InOrStdin())
	if err != nil {
		return nil, fmt.Errorf("capture from stdin: %w", err)
	}
	return &captureFile{name: "(stdin)", content: content}, nil
}

// read hands the capture to use, from its beginning.
func (c *captureFile) read(use func(*zmqwire.CaptureReader) error) error {
	var in io.Reader = bytes.NewReader(c.content)
	if c.content == nil {
		f, err := os.Open(c.name)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	r, err := zmqwire.NewCaptureReader(in)
	if err == nil {
		err = use(r)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	return nil
}

// replies says which gaps the capture fills itself.
func (c *captureFile) replies() (replies fleet.Replies, err error) {
	err = c.read(func(r *zmqwire.CaptureReader) (err error) {
		replies, err = fleet.ScanReplies(r)
		return err
	})
	return replies, err
}

// each calls do with every record, whose frames are valid during the call. A
// capture that was cut short is used as far as it goes, with a word to warn.
func each(r *zmqwire.CaptureReader, warn func(format string, args ...any), do func(*zmqwire.Record) error) error {
	var rec zmqwire.Record
	for {
		err := r.Next(&rec)
		var cut *zmqwire.TruncatedError
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.As(err, &cut):
			warn("the capture was cut short: used up to byte %d of its uncompressed content, the end of its last whole record", cut.Offset)
			return nil
		case err != nil:
			return err
		}
		if err := do(&rec); err != nil {
			return err
		}
	}
}
