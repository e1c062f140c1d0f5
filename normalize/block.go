package normalize

import "slices"

// blockKind says how the identity of one block came about.
type blockKind uint8

const (
	// rawBlock: no placeholder and no item, the tokens as they are.
	rawBlock blockKind = iota
	// unidentifiedBlock: a placeholder token and nothing that says whose.
	unidentifiedBlock
	// paddedBlock: every placeholder token gave way to its item's pad.
	paddedBlock
	// nativeBlock: the tokens as they are, then every item's hash, ascending.
	nativeBlock
)

func (k blockKind) String() string {
	return [...]string{"raw", "unidentified", "padded", "native"}[k]
}

// normalizeBlock is the identity of one block before its seed, the same for an
// event's block and a request's: the words that are hashed. window holds the
// block's tokens and whatever else its shape covers, mm the hashes of the items
// that touch it, in prompt order. Words that differ from the window are appended
// to arena, which is returned; otherwise words is the window itself. mm may be
// reordered.
//
// A native block's hashes are 8 bytes little endian each, that is two more
// words, so that one slice of words is always the whole content.
func normalizeBlock(arena, window []uint32, mm []MMHash, ids TokenIDs) (words, grown []uint32, k blockKind) {
	if len(mm) == 0 {
		if ids.in(window) {
			return window, arena, unidentifiedBlock
		}
		return window, arena, rawBlock
	}
	at := len(arena)
	arena = append(arena, window...)
	words = arena[at:]
	switch {
	case ids.HasVideo:
		if padStrict(words, mm, ids) {
			return words, arena, paddedBlock
		}
	case ids.HasImage:
		// An item whose range only begins or ends here may have no run of its
		// own. With fewer runs than items it would leave no trace, and two
		// prompts with different images would share the block.
		if n := countRuns(words, ids.Image); n > 0 && n >= len(mm) {
			padRuns(words, mm, ids.Image)
			return words, arena, paddedBlock
		}
	}
	slices.Sort(mm)
	for _, h := range mm {
		arena = append(arena, uint32(h), uint32(h>>32))
	}
	return arena[at:], arena, nativeBlock
}

// in says whether one of the placeholder ids stands in tokens.
func (ids TokenIDs) in(tokens []uint32) bool {
	return ids.index(tokens) < len(tokens)
}

// index returns the place of the first placeholder token in tokens, len(tokens)
// if there is none.
func (ids TokenIDs) index(tokens []uint32) int {
	image, video := ids.Image, ids.Video
	switch {
	case ids.HasImage && !ids.HasVideo:
		video = image
	case ids.HasVideo && !ids.HasImage:
		image = video
	case !ids.HasImage && !ids.HasVideo:
		return len(tokens)
	}
	for i, t := range tokens {
		if t == image || t == video {
			return i
		}
	}
	return len(tokens)
}

// countRuns counts the maximal sequences of the image token.
func countRuns(tokens []uint32, image uint32) int {
	runs, in := 0, false
	for _, t := range tokens {
		if t == image && !in {
			runs++
		}
		in = t == image
	}
	return runs
}

// padRuns gives run n of the image token the pad of item n, and runs past the
// last item that item's.
func padRuns(tokens []uint32, mm []MMHash, image uint32) {
	run, in := -1, false
	var pad uint32
	for i, t := range tokens {
		if t != image {
			in = false
			continue
		}
		if !in {
			run, in = run+1, true
			pad = Pad(mm[min(run, len(mm)-1)])
		}
		tokens[i] = pad
	}
}

// padStrict pads where the groups of runs are as many as the items: each image
// run is a group, and so are all video runs without an image run between them.
// Otherwise it returns false and has changed nothing.
func padStrict(tokens []uint32, mm []MMHash, ids TokenIDs) bool {
	if ids.HasImage && ids.Image == ids.Video {
		return false
	}
	if n := eachGroup(tokens, ids, func(int, int) {}); n == 0 || n != len(mm) {
		return false
	}
	eachGroup(tokens, ids, func(i, group int) { tokens[i] = Pad(mm[group]) })
	return true
}

// eachGroup calls visit with the place and the group of every placeholder token
// and returns the number of groups. visit may change the token it is given.
func eachGroup(tokens []uint32, ids TokenIDs, visit func(i, group int)) int {
	const none, image, video = 0, 1, 2
	groups, last, prev := 0, none, none // kind of the last group, of the token before
	for i, t := range tokens {
		kind := none
		switch {
		case ids.HasImage && t == ids.Image:
			kind = image
		case t == ids.Video:
			kind = video
		}
		if kind == image && prev != image || kind == video && last != video {
			groups++
			last = kind
		}
		prev = kind
		if kind != none {
			visit(i, groups-1)
		}
	}
	return groups
}
