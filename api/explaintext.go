package api

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// The sentences of an explanation. Codes are stable and explained in
// docs/api.md; sentences are for whoever reads them at night.

// where names block b and its tokens.
func (c *candidate) where(b int) string {
	bs := int(c.shape.BlockSize)
	return fmt.Sprintf("block %d (tokens %d to %d)", b, b*bs, (b+1)*bs-1)
}

// indexNote is the index's ending of a run on the device.
func indexNote(c *candidate, x *index.Explanation) Note {
	n := Note{Code: string(x.Ending)}
	where := c.where(x.Device)
	switch x.Ending {
	case index.EndNeverStored:
		n.Text = where + " was never stored by this stream, or removed so long ago that it is forgotten"
	case index.EndTrimmed:
		n.Text = where + " is not held: never stored, or dropped to keep the byte budget, which has taken blocks of this stream"
	case index.EndRemoved:
		n.Text = where + " was stored and then removed by the worker"
		if x.HasSeq {
			n.Text += fmt.Sprintf(", in batch %d", x.RemovedSeq)
		}
	case index.EndOtherTier:
		n.Text = where + " has left the device; a lower tier holds it"
	case index.EndPartOfGroups:
		n.Text = where + " is held by some of the worker's full-attention cache groups only, and vLLM needs all of them"
	case index.EndWindowOnly:
		n.Text = where + " is held by a sliding-window cache group only"
	case index.EndOrphan:
		n.Text = where + " was stored, but under a parent that no event announced: it counts once the parent does"
	case index.EndOtherShape:
		return otherShape(c)
	}
	if x.Others > 0 {
		n.Text += fmt.Sprintf("; %s of the worker set %s it", count1(x.Others, "other stream"), verb(x.Others, "holds", "hold"))
	}
	return n
}

func count1(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func verb(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// otherShape is for a stream without any block of the shape that was asked.
func otherShape(c *candidate) Note {
	own, ok := c.member.Stream().Shape()
	if x := c.member.Stream().Stats(); !ok || x.Stored == 0 {
		return Note{"nothing_stored", "the stream has stored no block yet"}
	}
	return Note{"other_block_size", fmt.Sprintf("the question is in blocks of %d tokens (window %s), the stream's blocks have %d (window %s)",
		c.shape.BlockSize, windowName(c.shape.Window), own.BlockSize, windowName(own.Window))}
}

// otherImage is for a block that an image of the prompt touches.
func otherImage(c *candidate, b int, r *normalize.Range) Note {
	return Note{"other_image", fmt.Sprintf("%s lies in the placeholder of %s (tokens %d to %d) and was never stored with this image; what is before it matches, so another image may be held in its place",
		c.where(b), r.Param(), r.Offset, r.End-1)}
}

// explainReason is a projection's reason in plain words.
func explainReason(r normalize.Reason) string {
	switch r {
	case normalize.NoImageTokenID:
		return "the worker's image token id is not known; give image_token_id or model_dir for it"
	case normalize.TowerConnectorLora:
		return "adapters reach this worker's vision tower, so that it names images by adapter"
	case normalize.ExtraKeysHidden:
		return "this worker's release does not publish extra keys"
	case normalize.TextOnlyAsked:
		return "the request asks for text only"
	case normalize.ImageTokenMismatch:
		return "the placeholder's tokens are not this worker's image token"
	case normalize.UndeclaredImageToken:
		return "an image token of this worker stands outside of every placeholder"
	case normalize.UnsupportedModality:
		return "the features have a modality that this worker is not configured for"
	}
	if r.Malformed() {
		return "the features are malformed (" + string(r) + ")"
	}
	return string(r)
}

// notes are collected in order.
type notes []Note

func (ns *notes) add(code, format string, args ...any) {
	*ns = append(*ns, Note{code, fmt.Sprintf(format, args...)})
}

// streamNotes are what the stream's own state says about its answer.
func streamNotes(c *candidate, st *fleet.Status) []Note {
	ns := notes{}
	ns.state(st)
	x := c.member.Stream().Stats()
	if x.Orphans > 0 {
		ns.add("orphans", "%d blocks are announced whose parent is unknown; they match nobody until it appears", x.Orphans)
	}
	if x.Trimmed > 0 {
		ns.add("trimmed", "%d blocks were dropped to keep the byte budget, the oldest and deepest first", x.Trimmed)
	}
	if x.ContentConflicts > 0 {
		ns.add("content_conflicts", "%d blocks were announced again under another handle; the newer one counts", x.ContentConflicts)
	}
	if c.row.UsableReason != index.UsableKnown {
		ns.add(string(c.row.UsableReason), "what vLLM would use is not known: the stream has cache groups that are not indexed, or whose blocks have no known place")
	}
	skipped := c.member.Skipped()
	ns.skipped(&skipped)
	return ns
}

func (ns *notes) state(st *fleet.Status) {
	switch st.State {
	case fleet.Connecting:
		ns.add("connecting", "no message and no replay answer has come yet")
	case fleet.Replaying:
		ns.add("replaying", "a gap is being filled; the answer is that of before")
	case fleet.Partial:
		ns.add("partial", "the start of the history is lost: what is held is true, more may exist")
	case fleet.Suspect:
		ns.add("suspect", "%d batches are lost and no replay has them: removals may be missing", st.Lost)
	case fleet.Disconnected:
		ns.add("disconnected", "the connection is down")
	case fleet.Restored:
		ns.add("restored", "from a snapshot, not yet confirmed by the worker")
	}
	if st.LastError != "" {
		ns.add("last_error", "the stream's last fault: %s", st.LastError)
	}
}

// skipTexts say what became of the events that do not count as they stand.
var skipTexts = [normalize.NumSkipReasons]string{
	normalize.SkipUnknownMedium:  "%d events speak of a medium that is no tier here; they are not indexed",
	normalize.SkipNotLocal:       "%d events speak of blocks that are not this worker's own; they are not indexed",
	normalize.SkipRepeatedHash:   "%d stores have one hash twice; they are not indexed",
	normalize.SkipOwnParent:      "%d stores have a block that is its own parent; they are not indexed",
	normalize.SkipZeroBlockSize:  "%d stores have no block size; they are not indexed",
	normalize.SkipOtherSpec:      "%d stores are of a cache group of a kind that is not indexed",
	normalize.SkipTokenCount:     "%d stores have tokens that are not their hashes' blocks; these match nobody",
	normalize.SkipLookaheadCount: "%d stores have lookahead tokens that do not fit their blocks; these match nobody",
	normalize.SkipExtraKeysCount: "%d stores have extra keys that do not fit their blocks; these match nobody",
}

func (ns *notes) skipped(s *normalize.SkipCounts) {
	for r, n := range s.ByReason {
		if n == 0 {
			continue
		}
		ns.add(normalize.SkipReason(r).String(), skipTexts[r], n)
		if r == int(normalize.SkipUnknownMedium) {
			(*ns)[len(*ns)-1].Text += mediaNames(s.Media)
		}
	}
}

func mediaNames(media []normalize.MediumCount) string {
	var names []string
	for _, m := range media {
		names = append(names, strconv.Quote(m.Name))
	}
	return " (" + strings.Join(names, ", ") + ")"
}
