package api

import (
	"bytes"
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestTrimmedRows: a stream that the byte budget took blocks from says so in
// every row, by JSON and by msgpack; without a budget nothing is said.
func TestTrimmedRows(t *testing.T) {
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{"w0/0": {Worker: "w0", Model: "m", BlockSize: 16}}}
	budget := index.NewBudget(512 << 10)
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet(), Index: index.Options{Budget: budget}})
	if err != nil {
		t.Fatal(err)
	}
	newest := promptOf(9000, 64)
	for i := range 200 {
		feedEvents(t, off, "w0/0", uint64(i), storeOf(promptOf(uint64(i), 256*16), 16, uint64(i)<<32))
	}
	feedEvents(t, off, "w0/0", 200, storeOf(newest, 16, 1<<60))
	if budget.Used() > budget.Most()*5/4 {
		t.Errorf("the index keeps %d bytes of %d", budget.Used(), budget.Most())
	}
	_, srv := newTestServer(t, off.Fleet, nil)
	a := newAsker(t, srv.URL)
	a.want("POST", "/v1/match", string(jsonBody(newest, "")), 200, `"trimmed":`)
	if _, b := a.do("POST", "/v1/match", string(jsonBody(newest, "")), "Accept", "application/msgpack"); !bytes.Contains(b, []byte("trimmed")) {
		t.Errorf("msgpack does not say trimmed: %q", b)
	}
	_, free := newTestServer(t, textFleet(t, 1, newest).Fleet, nil)
	if _, b := newAsker(t, free.URL).do("POST", "/v1/match", string(jsonBody(newest, ""))); bytes.Contains(b, []byte("trimmed")) {
		t.Errorf("nothing was trimmed: %s", b)
	}
}
