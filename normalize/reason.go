package normalize

// Reason says why a request's images cannot be answered exactly. The strings
// are stable: clients test for them.
type Reason string

// The reasons, in the order in which they are checked.
const (
	// What the features say: most of these no worker can make sense of.
	FeaturesNotObject       Reason = "features_not_object"
	MMHashesNotObject       Reason = "mm_hashes_not_object"
	MMPlaceholdersNotObject Reason = "mm_placeholders_not_object"
	UnsupportedModality     Reason = "unsupported_modality"
	UnpairedModality        Reason = "unpaired_modality"
	NotAnArray              Reason = "not_an_array"
	LengthMismatch          Reason = "length_mismatch"
	BadIdentifier           Reason = "bad_identifier"
	BadPlaceholder          Reason = "bad_placeholder"
	RangeOutOfBounds        Reason = "range_out_of_bounds"
	MixedSpanWithoutIsEmbed Reason = "mixed_span_without_is_embed"
	BadIsEmbed              Reason = "bad_is_embed"

	// The worker's side.
	NoImageTokenID     Reason = "no_image_token_id"
	TowerConnectorLora Reason = "tower_connector_lora"
	// ExtraKeysHidden: the worker's release does not publish extra keys, so
	// that neither images nor salts can be told apart there.
	ExtraKeysHidden Reason = "extra_keys_hidden"

	// The prompt's side, against what the worker knows.
	OutOfOrder                   Reason = "out_of_order"
	Overlapping                  Reason = "overlapping"
	AdjacentDifferentIdentifiers Reason = "adjacent_different_identifiers"
	NoEmbedTokens                Reason = "no_embed_tokens"
	MixedEmbedTokens             Reason = "mixed_embed_tokens"
	ImageTokenMismatch           Reason = "image_token_mismatch"
	UndeclaredImageToken         Reason = "undeclared_image_token"
	AmbiguousLayout              Reason = "ambiguous_layout"

	// TextOnlyAsked: the request has images and asked for its text only.
	TextOnlyAsked Reason = "text_only"
)

// Reasons returns every reason, in the order in which they are checked.
func Reasons() []Reason {
	return []Reason{
		FeaturesNotObject, MMHashesNotObject, MMPlaceholdersNotObject, UnsupportedModality,
		UnpairedModality, NotAnArray, LengthMismatch, BadIdentifier, BadPlaceholder,
		RangeOutOfBounds, MixedSpanWithoutIsEmbed, BadIsEmbed,
		NoImageTokenID, TowerConnectorLora, ExtraKeysHidden,
		OutOfOrder, Overlapping, AdjacentDifferentIdentifiers, NoEmbedTokens,
		MixedEmbedTokens, ImageTokenMismatch, UndeclaredImageToken, AmbiguousLayout,
		TextOnlyAsked,
	}
}

// Malformed says that the features break their own format, whatever worker is
// asked: an error of the request. An unsupported modality and a mixed span
// without a mask are not: vLLM accepts both, only their blocks cannot be
// identified.
func (r Reason) Malformed() bool {
	switch r {
	case FeaturesNotObject, MMHashesNotObject, MMPlaceholdersNotObject,
		UnpairedModality, NotAnArray, LengthMismatch, BadIdentifier,
		BadPlaceholder, RangeOutOfBounds, BadIsEmbed:
		return true
	}
	return false
}

// WorkerSide says that it is the worker that cannot answer exactly: another
// worker, or the same one configured better, may.
func (r Reason) WorkerSide() bool {
	switch r {
	case NoImageTokenID, TowerConnectorLora, ExtraKeysHidden:
		return true
	}
	return false
}
