package normalize

import "fmt"

// View is what is known of a worker and decides its blocks' identities. It is
// comparable: workers of equal views answer a prompt by the same hashes.
type View struct {
	IDs TokenIDs
	// TowerConnectorLora: adapters reach the worker's vision tower or
	// connector, so that it scopes an image's identifier by the adapter.
	TowerConnectorLora bool
	ExtraKeys          ExtraKeysMode
}

// ExtraKeysMode is what a worker's release puts into an event's extra keys.
type ExtraKeysMode uint8

const (
	// Native: multimodal items are pairs (vLLM 0.19 and later).
	Native ExtraKeysMode = iota
	// BareMM: multimodal items are bare 64-digit hex strings (before 0.19).
	BareMM
	// None: there are no extra keys. Images and salts are invisible in the
	// events, so a request with either is never matched, a block that holds a
	// known placeholder token is unidentified, and whatever an extra key says
	// nevertheless is opaque. What remains is a limit that no reader of such
	// events can lift: a salted block of plain text looks like an unsalted one,
	// and without token ids an image's block looks like text. Set it only where
	// prompts carry neither, or at least resolve the token ids.
	None
)

// String returns the mode as configurations spell it.
func (m ExtraKeysMode) String() string {
	switch m {
	case Native:
		return "native"
	case BareMM:
		return "bare_mm"
	case None:
		return "none"
	}
	return fmt.Sprintf("ExtraKeysMode(%d)", uint8(m))
}

// ParseExtraKeysMode reads what String writes; the empty string is Native.
func ParseExtraKeysMode(s string) (ExtraKeysMode, error) {
	switch s {
	case "", "native":
		return Native, nil
	case "bare_mm":
		return BareMM, nil
	case "none":
		return None, nil
	}
	return 0, fmt.Errorf("extra_keys: got %q, want native, bare_mm or none", s)
}
