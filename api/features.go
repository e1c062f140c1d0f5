package api

import "github.com/kvindexd/kvindexd/normalize"

// features reads the value as vLLM's features. What is wrong with them is not
// an error of the body: it decides how the request can be answered.
func (s *scanner) features() (*normalize.Features, *Error) {
	raw, err := s.raw()
	if err != nil {
		return nil, err
	}
	return parseFeatures(raw)
}

// parseFeatures reads features from JSON text whose grammar was checked.
func parseFeatures(raw []byte) (*normalize.Features, *Error) {
	return normalize.ParseFeaturesJSON(raw), nil
}
