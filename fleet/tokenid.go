package fleet

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/zeebo/xxh3"

	"github.com/kvindexd/kvindexd/normalize"
)

// maxModelConfig bounds a model directory's config.json.
const maxModelConfig = 8 << 20

// fingerprint is of a model directory's config.json, "" where there is none.
func fingerprint(dir string) (string, error) {
	if dir == "" {
		return "", nil
	}
	f, err := os.Open(filepath.Join(dir, "config.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := xxh3.New()
	if n, err := io.Copy(h, io.LimitReader(f, maxModelConfig+1)); err != nil || n > maxModelConfig {
		return "", errors.Join(err, fmt.Errorf("%w: %s: more than %d bytes", ErrInvalid, f.Name(), maxModelConfig))
	}
	return fmt.Sprintf("%016x", h.Sum64()), nil
}

// sourceName is where a token id comes from, as the worker's view says it.
func sourceName(src normalize.IDSource, dir, field string) string {
	if field == "" {
		return string(src)
	}
	return filepath.Join(dir, "config.json") + ": " + field
}
