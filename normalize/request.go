package normalize

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
)

// Mode is what a request wants of its images.
type Mode uint8

const (
	// Auto answers exactly where possible, else the text before the first
	// placeholder.
	Auto Mode = iota
	// Exact refuses workers that cannot answer exactly. Refusing is the
	// answerer's business: a projection says which workers those are.
	Exact
	// TextOnly always stops before the first placeholder.
	TextOnly
)

// String returns the mode as requests spell it.
func (m Mode) String() string {
	switch m {
	case Auto:
		return "auto"
	case Exact:
		return "exact"
	case TextOnly:
		return "text_only"
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

// ParseMode reads what String writes; the empty string is Auto.
func ParseMode(s string) (Mode, error) {
	switch s {
	case "", "auto":
		return Auto, nil
	case "exact":
		return Exact, nil
	case "text_only":
		return TextOnly, nil
	}
	return 0, fmt.Errorf("mm: got %q, want auto, exact or text_only", s)
}

// Prompt is a request: its expanded tokens and what else its blocks' identities
// depend on. Nothing here changes it.
type Prompt struct {
	Tokens    []uint32
	Features  *Features
	LoraName  string
	CacheSalt string
	Mode      Mode
}

// Range is where one image or video stands in the prompt, and its hash.
type Range struct {
	Offset, End int
	Hash        MMHash

	mask  []bool // nil: every token of the range is a placeholder token
	of    *modality
	index int // in its modality
}

// video says whether it is a video.
func (r *Range) video() bool { return r.of.name == modVideo }

// Param names the item in the request, as "features.mm_hashes.image[1]".
func (r *Range) Param() string { return r.of.paramOf(membHashes, r.index) }

// refuse returns a refusal that names the range's placeholder.
func (r *Range) refuse(why Reason) refusal { return refusal{why, r.of.paramOf(membSpans, r.index)} }

// embeds says whether the token at i, inside the range, is a placeholder token.
func (r *Range) embeds(i int) bool { return r.mask == nil || r.mask[i-r.Offset] }

// Projection is how much of a prompt a worker's blocks can be matched with.
type Projection struct {
	// Exact: every image is identified in every block it touches. True also
	// of a prompt without images.
	Exact bool
	// Reason says why it is not exact, "" if it is; Param names the field of
	// the request that the reason is about, "" if there is none.
	Reason Reason
	Param  string
	// Ranges are the images in prompt order, only of an exact projection.
	Ranges []Range
	// Limit is the end, in tokens, of what can be matched: len(Tokens) of an
	// exact projection, else the place of the first placeholder, or of the
	// first placeholder token that no image accounts for. 0 where the place
	// of some placeholder cannot be trusted. An exact projection can have a
	// shorter Limit too: the prompt declares no image and yet a placeholder
	// token stands at Limit.
	Limit int
}

// Project checks whether a worker seen as v, with blocks of shape s, can answer
// the prompt exactly, and how far it can answer otherwise.
func (p *Prompt) Project(v View, s Shape) Projection {
	ranges, why := p.identify(v, s)
	pr := Projection{
		Exact: why == refusal{}, Reason: why.reason, Param: why.param,
		Ranges: ranges, Limit: len(p.Tokens),
	}
	if !pr.Exact {
		pr.Limit = p.Features.firstOffset(len(p.Tokens))
	}
	if p.saltHidden(v) {
		pr.Limit = 0
	}
	if len(ranges) == 0 {
		pr.Limit = v.IDs.index(p.Tokens[:pr.Limit])
	}
	return pr
}

// saltHidden says whether the prompt has a salt that the worker's events hide.
func (p *Prompt) saltHidden(v View) bool { return p.CacheSalt != "" && v.ExtraKeys == None }

// identify returns the prompt's images where a worker can identify them all, or
// the first reason why it cannot.
func (p *Prompt) identify(v View, s Shape) ([]Range, refusal) {
	if p.Mode == TextOnly && !p.Features.Empty() {
		return nil, refusal{reason: TextOnlyAsked}
	}
	ranges, why := p.readRanges(v)
	if why != (refusal{}) {
		return nil, why
	}
	if why := p.checkWorker(v, len(ranges) > 0); why != (refusal{}) {
		return nil, why
	}
	if len(ranges) == 0 {
		return nil, refusal{}
	}
	why = cmp.Or(
		checkOrder(ranges),
		checkApart(ranges),
		p.checkEmbeds(ranges, v.IDs),
		p.checkDeclared(ranges, v.IDs),
		p.checkLayout(ranges, v.IDs, s),
	)
	if why != (refusal{}) {
		return nil, why
	}
	return ranges, refusal{}
}

// checkWorker checks what does not depend on where the images stand.
func (p *Prompt) checkWorker(v View, images bool) refusal {
	switch {
	case images && !v.IDs.HasImage:
		return refusal{reason: NoImageTokenID}
	case images && v.TowerConnectorLora && p.LoraName != "":
		return refusal{TowerConnectorLora, "lora_name"}
	case images && v.ExtraKeys == None:
		return refusal{ExtraKeysHidden, paramRoot}
	case p.saltHidden(v):
		return refusal{ExtraKeysHidden, "cache_salt"}
	}
	return refusal{}
}

// readRanges returns the prompt's images in prompt order, or the first reason
// why their description cannot be read. Within a modality the lists are in
// prompt order already; two modalities are merged.
func (p *Prompt) readRanges(v View) ([]Range, refusal) {
	f := p.Features
	if f == nil {
		return nil, refusal{}
	}
	if f.defect != (refusal{}) {
		return nil, f.defect
	}
	for i := range f.modalities {
		if m := &f.modalities[i]; m.name != modImage && (m.name != modVideo || !v.IDs.HasVideo) {
			return nil, refusal{UnsupportedModality, m.param(m.member)}
		}
	}
	ranges := make([]Range, 0, f.Images())
	kinds := 0
	for i := range f.modalities {
		m := &f.modalities[i]
		if m.defect != (refusal{}) {
			return nil, m.defect
		}
		if len(m.items) > 0 {
			kinds++
		}
		for j := range m.items {
			r, why := p.readItem(m, j)
			if why != (refusal{}) {
				return nil, why
			}
			ranges = append(ranges, r)
		}
	}
	if kinds > 1 {
		slices.SortStableFunc(ranges, byOffset)
	}
	return ranges, refusal{}
}

// readItem checks one image by itself against the prompt's tokens.
func (p *Prompt) readItem(m *modality, i int) (Range, refusal) {
	it := &m.items[i]
	r := Range{Offset: int(it.offset), Hash: it.hash, of: m, index: i}
	switch {
	case it.noHash:
		return r, refusal{BadIdentifier, m.paramOf(membHashes, i)}
	case it.isBad:
		return r, refusal{BadPlaceholder, m.paramOf(membSpans, i) + it.bad}
	case it.offset > int64(len(p.Tokens)) || it.length > int64(len(p.Tokens))-it.offset:
		return r, r.refuse(RangeOutOfBounds)
	case it.badMask || it.hasMask && int64(len(it.mask)) != it.length:
		return r, refusal{BadIsEmbed, m.paramOf(membSpans, i) + ".is_embed"}
	}
	r.End = int(it.offset + it.length)
	if it.hasMask {
		r.mask = it.mask
		return r, refusal{}
	}
	for _, t := range p.Tokens[r.Offset+1 : r.End] {
		if t != p.Tokens[r.Offset] {
			return r, r.refuse(MixedSpanWithoutIsEmbed)
		}
	}
	return r, refusal{}
}

func checkOrder(ranges []Range) refusal {
	for i := 1; i < len(ranges); i++ {
		if ranges[i-1].Offset > ranges[i].Offset {
			return ranges[i].refuse(OutOfOrder)
		}
	}
	return refusal{}
}

// checkApart checks that placeholders do not overlap, and that touching ones are
// one identifier's: nothing else would tell where one ends.
func checkApart(ranges []Range) refusal {
	for i := 1; i < len(ranges); i++ {
		a, b := &ranges[i-1], &ranges[i]
		switch {
		case a.End > b.Offset:
			return b.refuse(Overlapping)
		case a.End == b.Offset && a.Hash != b.Hash:
			return b.refuse(AdjacentDifferentIdentifiers)
		}
	}
	return refusal{}
}

// checkEmbeds checks that each modality's placeholder tokens are all one, and
// the worker's.
func (p *Prompt) checkEmbeds(ranges []Range, ids TokenIDs) refusal {
	images, why := p.checkEmbedsOf(ranges, false, ids.Image)
	if why != (refusal{}) {
		return why
	}
	videos, why := p.checkEmbedsOf(ranges, true, ids.Video)
	if why != (refusal{}) {
		return why
	}
	if !images && !videos {
		return refusal{NoEmbedTokens, paramRoot + "." + membSpans}
	}
	return refusal{}
}

// checkEmbedsOf is checkEmbeds for one modality; it also says whether that has
// any placeholder token.
func (p *Prompt) checkEmbedsOf(ranges []Range, video bool, id uint32) (found bool, why refusal) {
	var token uint32
	var first *Range
	for i := range ranges {
		r := &ranges[i]
		if r.video() != video {
			continue
		}
		for j := r.Offset; j < r.End; j++ {
			switch {
			case !r.embeds(j):
			case first == nil:
				token, first = p.Tokens[j], r
			case p.Tokens[j] != token:
				return true, r.refuse(MixedEmbedTokens)
			}
		}
	}
	if first != nil && token != id {
		return true, first.refuse(ImageTokenMismatch)
	}
	return first != nil, refusal{}
}

// checkDeclared checks that every placeholder token is some image's.
func (p *Prompt) checkDeclared(ranges []Range, ids TokenIDs) refusal {
	at := 0
	for i := ids.index(p.Tokens); i < len(p.Tokens); i += 1 + ids.index(p.Tokens[i+1:]) {
		for at < len(ranges) && ranges[at].End <= i {
			at++
		}
		if at == len(ranges) || i < ranges[at].Offset || !ranges[at].embeds(i) {
			return refusal{UndeclaredImageToken, tokenParam(i)}
		}
	}
	return refusal{}
}

func tokenParam(i int) string { return "token_ids[" + strconv.Itoa(i) + "]" }

// checkLayout checks, for every block of the shape whose images are padded run
// by run, that this gives every image the positions that the request declares.
// The last block need not be complete: it is part of the projected tokens. A
// native block has every item in its hash, and with a video token id a block is
// strict or native: there nothing can be ambiguous.
func (p *Prompt) checkLayout(ranges []Range, ids TokenIDs, s Shape) refusal {
	if ids.HasVideo || s.BlockSize == 0 {
		return refusal{}
	}
	var arena []uint32
	w := newWindows(ranges, s)
	for a := 0; a < len(p.Tokens); a += w.size {
		mm, touching := w.items(a)
		if len(mm) == 0 {
			continue
		}
		window := p.Tokens[a:min(a+w.window, len(p.Tokens))]
		words, grown, kind := normalizeBlock(arena[:0], window, mm, ids)
		arena = grown
		if kind != paddedBlock {
			continue
		}
		if i := firstStray(window, words, a, touching); i >= 0 {
			return refusal{AmbiguousLayout, tokenParam(a + i)}
		}
	}
	return refusal{}
}

// firstStray returns the first place of a block, which begins at token a, where
// its padded words are not what the images that touch it declare; -1 if none.
func firstStray(window, words []uint32, a int, touching []Range) int {
	for i, t := range window {
		for len(touching) > 0 && touching[0].End <= a+i {
			touching = touching[1:]
		}
		want := t
		if len(touching) > 0 && touching[0].Offset <= a+i && touching[0].embeds(a+i) {
			want = Pad(touching[0].Hash)
		}
		if words[i] != want {
			return i
		}
	}
	return -1
}
