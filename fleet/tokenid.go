package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/zeebo/xxh3"
)

// maxModelConfig bounds a model directory's config.json.
const maxModelConfig = 8 << 20

// The names under which released model configurations keep their placeholder
// tokens, in the order in which they are looked for.
var (
	imageFields = []string{"image_token_id", "image_token_index", "img_context_token_id", "media_placeholder_token_id"}
	videoFields = []string{"video_token_id", "video_token_index"}
	subConfigs  = []string{"", "text_config", "thinker_config"}
)

// modelDir is what a model directory says.
type modelDir struct {
	image, video         *uint32
	imageFrom, videoFrom string
	// fingerprint is of the whole config.json.
	fingerprint string
}

// readModelDir reads dir/config.json. Its errors name the file and the field.
func readModelDir(dir string) (modelDir, error) {
	path := filepath.Join(dir, "config.json")
	f, err := os.Open(path)
	if err != nil {
		return modelDir{}, fmt.Errorf("model_dir: %w", err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxModelConfig+1))
	if err != nil {
		return modelDir{}, fmt.Errorf("model_dir: %w", err)
	}
	if len(raw) > maxModelConfig {
		return modelDir{}, fmt.Errorf("model_dir: %s: more than %d bytes", path, maxModelConfig)
	}
	return parseModelConfig(path, raw)
}

func parseModelConfig(path string, raw []byte) (modelDir, error) {
	var top map[string]json.RawMessage
	if err := json.Unmarshal(raw, &top); err != nil {
		return modelDir{}, fmt.Errorf("%w: %s: %w", ErrInvalid, path, err)
	}
	d := modelDir{fingerprint: fmt.Sprintf("%016x", xxh3.Hash(raw))}
	var err1, err2 error
	d.image, d.imageFrom, err1 = findToken(path, top, imageFields)
	d.video, d.videoFrom, err2 = findToken(path, top, videoFields)
	if err := errors.Join(err1, err2); err != nil {
		return modelDir{}, err
	}
	if d.image != nil && d.video != nil && *d.image == *d.video {
		return modelDir{}, fmt.Errorf("%w: %s and %s are both %d", ErrInvalid, d.imageFrom, d.videoFrom, *d.image)
	}
	return d, nil
}

// findToken looks for the first of fields that is given, at the top and in the
// sub-configurations.
func findToken(path string, top map[string]json.RawMessage, fields []string) (*uint32, string, error) {
	for _, sub := range subConfigs {
		m := top
		if sub != "" {
			m = nil
			if err := json.Unmarshal(top[sub], &m); err != nil {
				continue // absent, or no object: nothing is said there
			}
		}
		for _, field := range fields {
			raw, ok := m[field]
			if !ok || string(raw) == "null" {
				continue
			}
			from := path + ": " + field
			if sub != "" {
				from = path + ": " + sub + "." + field
			}
			n, err := strconv.ParseUint(string(raw), 10, 32)
			if err != nil {
				return nil, "", fmt.Errorf("%w: %s: %.40s is not a token id (expected 0..%d)", ErrInvalid, from, raw, uint32(1<<32-1))
			}
			v := uint32(n)
			return &v, from, nil
		}
	}
	return nil, "", nil
}
