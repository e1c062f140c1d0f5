package api

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

// schema is the part of JSON Schema that openapi.json uses.
type schema struct {
	doc map[string]any
}

func loadOpenAPI(t testing.TB) *schema {
	t.Helper()
	s := new(schema)
	if err := json.Unmarshal(openapi, &s.doc); err != nil {
		t.Fatal(err)
	}
	return s
}

func dig(v any, path ...string) any {
	for _, p := range path {
		m, _ := v.(map[string]any)
		v = m[p]
	}
	return v
}

// check says where v is not as rule wants it.
func (s *schema) check(rule, v any, at string) error {
	if ref, ok := dig(rule, "$ref").(string); ok {
		return s.check(dig(s.doc, strings.Split(strings.TrimPrefix(ref, "#/"), "/")...), v, at)
	}
	if one, ok := dig(rule, "oneOf").([]any); ok {
		var errs []string
		for _, r := range one {
			err := s.check(r, v, at)
			if err == nil {
				return nil
			}
			errs = append(errs, err.Error())
		}
		return fmt.Errorf("%s: none fits: %s", at, strings.Join(errs, " | "))
	}
	if t := dig(rule, "type"); t != nil && !isType(t, v) {
		return fmt.Errorf("%s: %T is not %v", at, v, t)
	}
	if enum, ok := dig(rule, "enum").([]any); ok && !slices.Contains(enum, v) {
		return fmt.Errorf("%s: %v is not of %v", at, v, enum)
	}
	switch v := v.(type) {
	case []any:
		for i, e := range v {
			if err := s.check(dig(rule, "items"), e, fmt.Sprintf("%s[%d]", at, i)); err != nil {
				return err
			}
		}
	case map[string]any:
		return s.checkObject(rule, v, at)
	}
	return nil
}

func (s *schema) checkObject(rule any, v map[string]any, at string) error {
	required, _ := dig(rule, "required").([]any)
	for _, name := range required {
		if _, ok := v[name.(string)]; !ok {
			return fmt.Errorf("%s: %v is missing", at, name)
		}
	}
	for name, e := range v {
		r := dig(rule, "properties", name)
		if r == nil {
			more := dig(rule, "additionalProperties")
			if more == false {
				return fmt.Errorf("%s: %s is not documented", at, name)
			}
			r, _ = more.(map[string]any)
		}
		if err := s.check(r, e, at+"."+name); err != nil {
			return err
		}
	}
	return nil
}

func isType(t, v any) bool {
	if many, ok := t.([]any); ok {
		return slices.ContainsFunc(many, func(t any) bool { return isType(t, v) })
	}
	switch v := v.(type) {
	case nil:
		return t == "null"
	case bool:
		return t == "boolean"
	case string:
		return t == "string"
	case float64:
		return t == "number" || t == "integer" && v == math.Trunc(v)
	case []any:
		return t == "array"
	}
	return t == "object"
}

// answer checks an answer of a route against the document.
func (s *schema) answer(method, path string, status int, body []byte) error {
	op := dig(s.doc, "paths", path, strings.ToLower(method))
	if op == nil {
		return fmt.Errorf("%s %s is not documented", method, path)
	}
	rule := dig(op, "responses", fmt.Sprint(status), "content", "application/json", "schema")
	if rule == nil {
		return fmt.Errorf("%s %s: status %d is not documented", method, path, status)
	}
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		return fmt.Errorf("%s %s: %w: %.200s", method, path, err, body)
	}
	return s.check(rule, v, method+" "+path)
}

func TestOpenAPIHasEveryRoute(t *testing.T) {
	off := textFleet(t, 1, promptOf(1, 32))
	srv, _ := newTestServer(t, off.Fleet, nil)
	s := loadOpenAPI(t)
	documented := map[string]bool{}
	for path, ops := range s.doc["paths"].(map[string]any) {
		for method := range ops.(map[string]any) {
			documented[strings.ToUpper(method)+" "+path] = true
		}
	}
	for _, rt := range srv.routes() {
		key := rt.method + " " + rt.name
		if !documented[key] {
			t.Errorf("%s is not in openapi.json", key)
		}
		op := dig(s.doc, "paths", rt.name, strings.ToLower(rt.method))
		if (dig(op, "requestBody") != nil) != rt.body {
			t.Errorf("%s: the document and the route differ about a body", key)
		}
		if _, open := dig(op, "security").([]any); open != (rt.access == public) {
			t.Errorf("%s: the document and the route differ about access", key)
		}
		delete(documented, key)
	}
	for key := range documented {
		t.Errorf("openapi.json has %s, no handler does", key)
	}
}

// Every field of a request that is read is documented, and no other.
func TestOpenAPIRequestFields(t *testing.T) {
	props := dig(loadOpenAPI(t).doc, "components", "schemas", "MatchRequest", "properties").(map[string]any)
	for f := fieldModel; f <= fieldRequestID; f <<= 1 {
		if props[f.name()] == nil {
			t.Errorf("%s is not documented", f.name())
		}
		delete(props, f.name())
	}
	for name := range props {
		t.Errorf("%s is documented and not read", name)
	}
	spec := dig(loadOpenAPI(t).doc, "components", "schemas", "WorkerSpec", "properties").(map[string]any)
	for _, name := range specFields {
		if spec[name] == nil {
			t.Errorf("WorkerSpec: %s is not documented", name)
		}
		delete(spec, name)
	}
	for name := range spec {
		t.Errorf("WorkerSpec: %s is documented and not read", name)
	}
}
