package normalize

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestResolveTokenIDs(t *testing.T) {
	u := func(n uint32) *uint32 { return &n }
	no := ExplicitIDs{}
	f := func(config string, worker, model ExplicitIDs, want ResolvedIDs) {
		t.Helper()
		dir := ""
		if config != "" {
			dir = t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := ResolveTokenIDs(worker, model, dir); err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", config, got, err, want)
		}
	}
	both := func(image, video uint32) TokenIDs { return tokenIDs(&image, &video) }
	dir := func(image uint32, field string) ResolvedIDs {
		return ResolvedIDs{IDs: tokenIDs(&image, nil), ImageSource: FromModelDir, ImageField: field}
	}
	f("", no, no, ResolvedIDs{})
	f("{}", no, no, ResolvedIDs{})
	f("", ExplicitIDs{Image: u(5)}, ExplicitIDs{u(6), u(7)}, ResolvedIDs{IDs: both(5, 7), ImageSource: FromWorker, VideoSource: FromModel})
	f(`{"image_token_id": 8}`, no, ExplicitIDs{Image: u(6)}, ResolvedIDs{IDs: tokenIDs(u(6), nil), ImageSource: FromModel})
	f(`{"image_token_id": 8, "video_token_index": 0}`, ExplicitIDs{Image: u(6)}, no,
		ResolvedIDs{IDs: both(6, 0), ImageSource: FromWorker, VideoSource: FromModelDir, VideoField: "video_token_index"})
	f(`{"image_token_id": 4294967295}`, no, no, dir(1<<32-1, "image_token_id"))
	f(`{"image_token_index": 1, "image_token_id": null}`, no, no, dir(1, "image_token_index"))
	f(`{"img_context_token_id": 2}`, no, no, dir(2, "img_context_token_id"))
	f(`{"media_placeholder_token_id": 3}`, no, no, dir(3, "media_placeholder_token_id"))
	f(`{"text_config": {"image_token_id": 4}, "thinker_config": null}`, no, no, dir(4, "text_config.image_token_id"))
	f(`{"thinker_config": {"image_token_index": 5}}`, no, no, dir(5, "thinker_config.image_token_index"))
	f(`{"image_token_index": 6, "text_config": {"image_token_id": 7}}`, no, no, dir(6, "image_token_index"))
}

func TestResolveTokenIDsErrors(t *testing.T) {
	f := func(config string, worker ExplicitIDs, want ...string) {
		t.Helper()
		dir := t.TempDir()
		file := filepath.Join(dir, "config.json")
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ResolveTokenIDs(worker, ExplicitIDs{}, dir)
		if !errors.Is(err, ErrTokenIDs) {
			t.Fatalf("%s: error %v", config, err)
		}
		for _, w := range append(want, file) {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want %q in it", config, err, w)
			}
		}
	}
	for _, bad := range []string{"-1", "1.0", "1e3", `"5"`, "true", "4294967296", "[]", "{}"} {
		f(`{"text_config": {"image_token_id": `+bad+`}}`, ExplicitIDs{}, "text_config.image_token_id", bad)
		f(`{"video_token_index": `+bad+`}`, ExplicitIDs{}, "video_token_index", bad)
	}
	f(`{"image_token_id": 5, "video_token_id": 5}`, ExplicitIDs{}, "image_token_id", "video_token_id", "5")
	seven := uint32(7)
	f(`{"video_token_id": 7}`, ExplicitIDs{Image: &seven}, "worker image_token_id", "video_token_id")
	f(`{"text_config": 7}`, ExplicitIDs{}, "text_config", "not an object")
	f(`{`, ExplicitIDs{})
	f(`null`, ExplicitIDs{})
	f(`[]`, ExplicitIDs{})

	dir := t.TempDir()
	_, err := ResolveTokenIDs(ExplicitIDs{}, ExplicitIDs{}, dir)
	if !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, ErrTokenIDs) || !strings.Contains(err.Error(), filepath.Join(dir, "config.json")) {
		t.Errorf("no config.json: %v", err)
	}
	_, err = ResolveTokenIDs(ExplicitIDs{&seven, &seven}, ExplicitIDs{}, "")
	if !errors.Is(err, ErrTokenIDs) {
		t.Errorf("equal ids: %v", err)
	}
}
