package api

import (
	"net/http"
	"slices"
)

// fields keeps track of a small body's fields: each once, and all that are
// required.
type fields struct {
	required []string
	// seen are the names that came, given those that were not null.
	seen, given []string
}

func newFields(required ...string) *fields { return &fields{required: required} }

// maxFields bounds what fields remembers.
const maxFields = 256

// errUnread is what a reader returns for a field that it does not know.
var errUnread = &Error{}

// read hands the value of one field to set, which returns errUnread where it
// does not know the name, and passes over what nobody knows. A null is as good
// as absent. known are isolation fields of the route.
func (f *fields) read(key []byte, v value, known []string, set func(name string) *Error) *Error {
	name := string(key)
	if slices.Contains(f.seen, name) {
		return duplicate(safe(name))
	}
	if len(f.seen) == maxFields {
		return failf(http.StatusBadRequest, ReasonMalformedBody, "more than %d fields", maxFields)
	}
	f.seen = append(f.seen, name)
	if v.null() {
		return nil
	}
	f.given = append(f.given, name)
	switch err := set(name); {
	case err == errUnread:
		return skipUnknown(key, v, known)
	case err != nil && err.Reason != ReasonMalformedBody:
		return err.within(name)
	default:
		return err
	}
}

// missing names the first required field that did not come.
func (f *fields) missing() *Error {
	for _, name := range f.required {
		if !slices.Contains(f.given, name) {
			e := failf(http.StatusBadRequest, ReasonMissingField, "this field is required")
			e.Param = name
			return e
		}
	}
	return nil
}
