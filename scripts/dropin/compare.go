package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// A field is one place of an answer: status, kind (of the body), or a path in
// the body such as body.scores.7.0.
type field struct {
	path         string
	dynamo, ours string // "" where it is absent
}

func (f field) String() string {
	show := func(s string) string {
		if s == "" {
			return "absent"
		}
		return s
	}
	return fmt.Sprintf("%s: dynamo %s, kvindexd %s", f.path, show(f.dynamo), show(f.ours))
}

// differences returns the fields in which two answers differ, by path.
func differences(dynamo, ours answer) []field {
	theirs, mine := fieldsOf(dynamo), fieldsOf(ours)
	var out []field
	for path, v := range theirs {
		if mine[path] != v {
			out = append(out, field{path, v, mine[path]})
		}
	}
	for path, v := range mine {
		if _, ok := theirs[path]; !ok {
			out = append(out, field{path, "", v})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].path < out[j].path })
	return out
}

// additions are fields of ours that Dynamo's answers do not have. A client that
// does not know them does not see them, so they are left out here; what
// kvindexd's answer must be is checked with them.
var additions = []struct{ name, why string }{
	{"rank_matches", "every rank's tokens by tier, as Mooncake's conductor gives them"},
	{"tenant_id", "of an instance: tenants are separate here"},
}

func added(name string) bool {
	for _, a := range additions {
		if a.name == name {
			return true
		}
	}
	return false
}

func fieldsOf(a answer) map[string]string {
	out := map[string]string{"status": strconv.Itoa(a.status), "kind": a.kind}
	if a.kind == "json" {
		flatten(out, "body", a.body)
	}
	return out
}

// texts are fields written for people: that there is a text is compared, what
// it says is not.
var texts = []string{"error", "last_error"}

// flatten writes the leaves of v, and empty containers, into out. Lists whose
// order means nothing are sorted: instances by their id, others by their text.
func flatten(out map[string]string, path string, v any) {
	switch v := v.(type) {
	case map[string]any:
		if len(v) == 0 {
			out[path] = "{}"
		}
		for k, e := range v {
			if added(k) {
				continue
			}
			if _, ok := e.(string); ok && slices.Contains(texts, k) {
				out[path+"."+k] = "a text"
				continue
			}
			flatten(out, path+"."+k, e)
		}
	case []any:
		if len(v) == 0 {
			out[path] = "[]"
		}
		for i, e := range sorted(v) {
			flatten(out, path+"."+elementName(i, e), e)
		}
	default:
		out[path] = compact(v)
	}
}

func elementName(i int, e any) string {
	if m, ok := e.(map[string]any); ok && m["instance_id"] != nil {
		return fmt.Sprint(m["instance_id"])
	}
	return strconv.Itoa(i)
}

func sorted(v []any) []any {
	v = slices.Clone(v)
	sort.SliceStable(v, func(i, j int) bool { return compact(v[i]) < compact(v[j]) })
	return v
}

// compact is v as JSON; map keys are sorted.
func compact(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// within says whether path is prefix or stands under it; * in prefix is any one
// name.
func within(path, prefix string) bool {
	names, want := strings.Split(path, "."), strings.Split(prefix, ".")
	if len(names) < len(want) {
		return false
	}
	for i, w := range want {
		if w != "*" && w != names[i] {
			return false
		}
	}
	return true
}
