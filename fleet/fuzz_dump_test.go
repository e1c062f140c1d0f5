package fleet

import (
	"bytes"
	"testing"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// FuzzReadDump: whatever a peer sends is an error, or streams that can be put
// into an index.
func FuzzReadDump(f *testing.F) {
	off, err := NewOffline(zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{"s": {Worker: "w", Model: "m", BlockSize: 4}}},
		Replies{}, Options{Logger: quiet})
	if err != nil {
		f.Fatal(err)
	}
	payload, err := zmqwire.AppendBatch(nil, &zmqwire.Batch{Events: []zmqwire.Event{{
		Kind: zmqwire.BlockStored, Hashes: []zmqwire.EngineHash{1, 2}, Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8}, BlockSize: 4, Group: zmqwire.NoGroup,
	}}}, zmqwire.EncodeOptions{})
	if err != nil {
		f.Fatal(err)
	}
	feed(f, off, "s", 0, payload)
	var dump bytes.Buffer
	if err := off.Dump(f.Context(), &dump, nil); err != nil {
		f.Fatal(err)
	}
	f.Add(dump.Bytes())
	f.Add([]byte(`{"format":{"name":"kvindexd-index","version":1}}` + "\n" + `{"end":{}}` + "\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readDump("", bytes.NewReader(b), func() {})
		if err != nil {
			return
		}
		for key, s := range r.sets {
			for at := range s.streams {
				into := index.New(index.Options{}).NewStream(index.StreamConfig{})
				_, _, _ = r.restore(key, at.worker, at.rank, normalize.View{}, into)
			}
		}
	})
}
