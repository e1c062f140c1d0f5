package api

import (
	"testing"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// TestExactWithoutBlocks: whether images are exact is a question of a worker's
// own block size, also while no block of that size stands anywhere: before its
// first one, and after a clear. Here an image in two rows and another after it
// share a block of 32 tokens, but none of 16.
func TestExactWithoutBlocks(t *testing.T) {
	img := uint32(9)
	h := zmqwire.CaptureHeader{Streams: map[string]zmqwire.CaptureStream{
		"w0/0": {Worker: "w0", Model: "m", BlockSize: 16, ImageTokenID: &img},
		"w1/0": {Worker: "w1", Model: "m", BlockSize: 32, ImageTokenID: &img},
	}}
	off, err := fleet.NewOffline(h, fleet.Replies{}, fleet.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	_, srv := newTestServer(t, off.Fleet, nil)
	a := newAsker(t, srv.URL)

	prompt := promptOf(1, 64)
	for i := range prompt {
		prompt[i] += 100
	}
	for _, i := range []int{4, 5, 7, 8, 20} {
		prompt[i] = img
	}
	body := string(jsonBody(prompt, `,"mm":"exact","features":{"mm_hashes":{"image":["a","b"]},"mm_placeholders":{"image":[`+
		`{"offset":4,"length":5,"is_embed":[true,true,false,true,true]},{"offset":20,"length":1}]}}`))
	const refused = `"refused":[{"worker":"w1","dp_rank":0,"namespace":"default","role":"aggregated","reason":"ambiguous_layout"`

	a.want("POST", "/v1/match", body, 200, refused) // nobody has a block
	feedEvents(t, off, "w0/0", 0, storeOf(promptOf(2, 64), 16, 100))
	a.want("POST", "/v1/match", body, 200, refused) // only blocks of 16 stand
	feedEvents(t, off, "w1/0", 0, storeOf(promptOf(2, 64), 32, 200))
	a.want("POST", "/v1/match", body, 200, refused)
	feedEvents(t, off, "w1/0", 1, zmqwire.Event{Kind: zmqwire.AllBlocksCleared})
	a.want("POST", "/v1/match", body, 200, refused)
}
