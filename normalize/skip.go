package normalize

import "strings"

// SkipReason is why an event, or its content, does not count as it stands.
type SkipReason uint8

const (
	// SkipUnknownMedium: left out, its medium is no tier.
	SkipUnknownMedium SkipReason = iota
	// SkipNotLocal: left out, its locality is not this worker.
	SkipNotLocal
	// SkipRepeatedHash: a store left out, one hash stands in it twice.
	SkipRepeatedHash
	// SkipOwnParent: a store left out, one of its hashes is its own parent.
	SkipOwnParent
	// SkipZeroBlockSize: a store left out, its tokens have no block size.
	SkipZeroBlockSize
	// SkipOtherSpec: a store passed on without content, its cache group is of
	// a kind that is not indexed.
	SkipOtherSpec
	// SkipTokenCount: a store passed on without content, its tokens are not
	// its hashes' blocks. Usual for sliding windows, not counted there.
	SkipTokenCount
	// SkipLookaheadCount: a store passed on without content, its lookahead
	// tokens are not so many a block.
	SkipLookaheadCount
	// SkipExtraKeysCount: a store passed on without content, its extra keys
	// are not one entry a block.
	SkipExtraKeysCount

	// NumSkipReasons is the number of reasons.
	NumSkipReasons = iota
)

// String returns the reason's name in metrics.
func (r SkipReason) String() string {
	names := [NumSkipReasons]string{
		"unknown_medium", "not_local", "repeated_hash", "own_parent", "zero_block_size",
		"other_spec", "token_count", "lookahead_count", "extra_keys_count",
	}
	if int(r) < len(names) {
		return names[r]
	}
	return "unknown"
}

// maxMediumNames bounds the unknown media that are counted by name; the rest
// is counted under otherMedia.
const (
	maxMediumNames = 16
	otherMedia     = "(other)"
)

// SkipCounts counts events by the reason for which they do not count as they
// stand. The zero value is ready to use.
type SkipCounts struct {
	ByReason [NumSkipReasons]uint64
	// Media are the unknown media by name, upper case, at most
	// maxMediumNames and "(other)". An entry may have a count of 0.
	Media []MediumCount
}

// MediumCount counts the events of one unknown medium.
type MediumCount struct {
	Name  string
	Count uint64
}

// Total is the number of events counted, for whatever reason.
func (c *SkipCounts) Total() uint64 {
	var n uint64
	for _, k := range c.ByReason {
		n += k
	}
	return n
}

// Add adds o to c.
func (c *SkipCounts) Add(o *SkipCounts) {
	for i, n := range o.ByReason {
		c.ByReason[i] += n
	}
	for _, m := range o.Media {
		if m.Count > 0 {
			c.addMedium(m.Name, m.Count)
		}
	}
}

// reset zeroes the counts and keeps the names, which are bounded.
func (c *SkipCounts) reset() {
	c.ByReason = [NumSkipReasons]uint64{}
	for i := range c.Media {
		c.Media[i].Count = 0
	}
}

// unknownMedium counts one event of a medium that is no tier.
func (c *SkipCounts) unknownMedium(medium []byte) {
	c.ByReason[SkipUnknownMedium]++
	var buf [maxMedium]byte
	name := appendUpper(buf[:0], medium[:min(len(medium), maxMedium)])
	for i := range c.Media {
		if c.Media[i].Name == string(name) {
			c.Media[i].Count++
			return
		}
	}
	c.addMedium(strings.ToValidUTF8(string(name), "?"), 1)
}

func (c *SkipCounts) addMedium(name string, n uint64) {
	for i := range c.Media {
		if c.Media[i].Name == name {
			c.Media[i].Count += n
			return
		}
	}
	if len(c.Media) >= maxMediumNames && name != otherMedia {
		c.addMedium(otherMedia, n)
		return
	}
	c.Media = append(c.Media, MediumCount{name, n})
}
