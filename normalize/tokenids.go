package normalize

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
)

// ErrTokenIDs is in the chain of every error about placeholder token ids.
var ErrTokenIDs = errors.New("placeholder token ids")

// TokenIDError says which field of which file cannot be what it is. Unwrap
// gives ErrTokenIDs and the cause, such as fs.ErrNotExist.
type TokenIDError struct {
	// File is the path of the config.json; "" where the ids were given.
	File string
	// Field is the path of the field within the file, or the setting's name;
	// "" where the file as a whole cannot be read.
	Field string
	Err   error
}

// Error names the file, the field and what is wrong.
func (e *TokenIDError) Error() string {
	at := e.File
	if e.Field != "" {
		if at != "" {
			at += ": "
		}
		at += e.Field
	}
	return fmt.Sprintf("%v: %s: %v", ErrTokenIDs, at, e.Err)
}

func (e *TokenIDError) Unwrap() []error { return []error{ErrTokenIDs, e.Err} }

// ExplicitIDs are token ids that a configuration states; nil where it does not.
type ExplicitIDs struct{ Image, Video *uint32 }

// IDSource says where a token id comes from. The strings stand in the worker's
// view.
type IDSource string

// The sources, in the order in which they are asked.
const (
	FromWorker   IDSource = "worker"
	FromModel    IDSource = "model"
	FromModelDir IDSource = "model_dir"
	// FromNowhere: no source states it; the worker never answers exactly.
	FromNowhere IDSource = ""
)

// ResolvedIDs are a worker's token ids and where each comes from. Field is the
// path of the config.json field that stated an id, "" for other sources.
type ResolvedIDs struct {
	IDs                    TokenIDs
	ImageSource            IDSource
	VideoSource            IDSource
	ImageField, VideoField string
}

// The fields of a config.json that state a token id, and the objects in which
// they may stand too: names found in the configurations of models that vLLM
// serves. The first that is there counts.
var (
	imageFields = []string{"image_token_id", "image_token_index", "img_context_token_id", "media_placeholder_token_id"}
	videoFields = []string{"video_token_id", "video_token_index"}
	subConfigs  = []string{"text_config", "thinker_config"}
)

// ResolveTokenIDs finds a worker's placeholder token ids: given for the worker,
// given for its model, or read from the config.json of modelDir, which may be
// "". Each id is looked for by itself, so that a worker may state one of them.
// An id that no source states is no error: the worker then answers what it can.
// A model directory that is set must have a readable config.json, unless both
// ids are stated before it is asked.
func ResolveTokenIDs(worker, model ExplicitIDs, modelDir string) (ResolvedIDs, error) {
	var r ResolvedIDs
	r.take(worker, FromWorker)
	r.take(model, FromModel)
	file := ""
	if modelDir != "" && !(r.IDs.HasImage && r.IDs.HasVideo) {
		file = filepath.Join(modelDir, "config.json")
		c, err := readModelConfig(file)
		if err != nil {
			return ResolvedIDs{}, err
		}
		r.takeConfig(c)
	}
	if r.IDs.HasImage && r.IDs.HasVideo && r.IDs.Image == r.IDs.Video {
		return ResolvedIDs{}, r.equalIDs(file)
	}
	return r, nil
}

// equalIDs is the error of an image and a video id that are the same.
func (r *ResolvedIDs) equalIDs(file string) error {
	image, video := r.ImageField, r.VideoField
	if image == "" {
		image = string(r.ImageSource) + " image_token_id"
	}
	if video == "" {
		video = string(r.VideoSource) + " video_token_id"
	}
	return &TokenIDError{file, video, fmt.Errorf("%d is also %s: an image's and a video's token must differ", r.IDs.Video, image)}
}

// take fills in what is not known yet.
func (r *ResolvedIDs) take(e ExplicitIDs, from IDSource) {
	if e.Image != nil && !r.IDs.HasImage {
		r.IDs.Image, r.IDs.HasImage, r.ImageSource = *e.Image, true, from
	}
	if e.Video != nil && !r.IDs.HasVideo {
		r.IDs.Video, r.IDs.HasVideo, r.VideoSource = *e.Video, true, from
	}
}

func (r *ResolvedIDs) takeConfig(c modelConfig) {
	if c.image != nil && !r.IDs.HasImage {
		r.ImageField = c.imageField
	}
	if c.video != nil && !r.IDs.HasVideo {
		r.VideoField = c.videoField
	}
	r.take(ExplicitIDs{c.image, c.video}, FromModelDir)
}

// modelConfig is what a config.json states.
type modelConfig struct {
	file                   string
	image, video           *uint32
	imageField, videoField string
}

// maxModelConfig bounds a config.json, in bytes. The largest known are some
// hundred KiB.
const maxModelConfig = 16 << 20

func readModelConfig(file string) (modelConfig, error) {
	f, err := os.Open(file)
	if err != nil {
		return modelConfig{}, &TokenIDError{file, "", err}
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxModelConfig+1))
	if err == nil && len(raw) > maxModelConfig {
		err = fmt.Errorf("longer than %d bytes", maxModelConfig)
	}
	if err != nil {
		return modelConfig{}, &TokenIDError{file, "", err}
	}
	return parseModelConfig(file, raw)
}

// jsonObject is one level of a config.json.
type jsonObject map[string]json.RawMessage

func parseModelConfig(file string, raw []byte) (modelConfig, error) {
	var top jsonObject
	if err := json.Unmarshal(raw, &top); err != nil {
		return modelConfig{}, &TokenIDError{file, "", err}
	}
	if top == nil {
		return modelConfig{}, &TokenIDError{file, "", errors.New("null, expected an object")}
	}
	levels, prefixes := []jsonObject{top}, []string{""}
	for _, name := range subConfigs {
		if isNull(top[name]) {
			continue
		}
		var sub jsonObject
		if err := json.Unmarshal(top[name], &sub); err != nil {
			return modelConfig{}, &TokenIDError{file, name, errors.New("not an object")}
		}
		levels, prefixes = append(levels, sub), append(prefixes, name+".")
	}
	c := modelConfig{file: file}
	err := c.find(levels, prefixes)
	return c, err
}

// find takes each id from the first level that states it.
func (c *modelConfig) find(levels []jsonObject, prefixes []string) (err error) {
	for i, o := range levels {
		if c.image == nil {
			if c.image, c.imageField, err = o.tokenID(c.file, prefixes[i], imageFields); err != nil {
				return err
			}
		}
		if c.video == nil {
			if c.video, c.videoField, err = o.tokenID(c.file, prefixes[i], videoFields); err != nil {
				return err
			}
		}
	}
	return nil
}

func isNull(raw json.RawMessage) bool {
	return raw == nil || bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}

// tokenID reads the first of the fields that is there.
func (o jsonObject) tokenID(file, prefix string, fields []string) (*uint32, string, error) {
	for _, name := range fields {
		raw := o[name]
		if isNull(raw) {
			continue
		}
		n, err := strconv.ParseUint(string(raw), 10, 32)
		if err != nil {
			return nil, "", &TokenIDError{file, prefix + name, fmt.Errorf("got %.40s, expected an integer from 0 to %d", raw, uint32(1<<32-1))}
		}
		id := uint32(n)
		return &id, prefix + name, nil
	}
	return nil, "", nil
}
