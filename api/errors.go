package api

import (
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Reason is the stable code of an error: clients decide by it, docs/api.md
// explains each.
type Reason string

// The reasons of errors. Those of features (normalize.Reason) stand beside
// them where a request's images are at fault.
const (
	ReasonMalformedBody     Reason = "malformed_body"
	ReasonInvalidField      Reason = "invalid_field"
	ReasonDuplicateField    Reason = "duplicate_field"
	ReasonMissingField      Reason = "missing_field"
	ReasonConflictingFields Reason = "conflicting_fields"
	ReasonUnknownIsolation  Reason = "unknown_isolation_field"
	ReasonTooManyRequests   Reason = "too_many_requests_in_batch"
	ReasonBodyTooLarge      Reason = "body_too_large"
	ReasonBodyTimeout       Reason = "body_timeout"
	ReasonMediaType         Reason = "unsupported_media_type"
	ReasonContentEncoding   Reason = "unsupported_content_encoding"
	ReasonUnknownModel      Reason = "unknown_model"
	ReasonAmbiguousModel    Reason = "ambiguous_model"
	ReasonLoraContradiction Reason = "lora_contradicts_model"
	ReasonExactUnavailable  Reason = "exact_mm_unavailable"
	ReasonUnknownWorker     Reason = "unknown_worker"
	ReasonInvalidWorker     Reason = "invalid_worker"
	ReasonWorkerConflict    Reason = "worker_conflict"
	ReasonEndpointForbidden Reason = "endpoint_not_allowed"
	ReasonServesCapture     Reason = "serves_capture"
	ReasonNoSnapshots       Reason = "no_snapshots"
	ReasonSnapshotRunning   Reason = "snapshot_running"
	ReasonNothingToKeep     Reason = "nothing_to_keep"
	ReasonSnapshotFailed    Reason = "snapshot_failed"
	ReasonSaltWithHashes    Reason = "salt_with_hashes"
	ReasonUnauthenticated   Reason = "unauthenticated"
	ReasonForbidden         Reason = "forbidden"
	ReasonCrossOrigin       Reason = "cross_origin"
	ReasonNotFound          Reason = "not_found"
	ReasonMethod            Reason = "method_not_allowed"
	ReasonOverloaded        Reason = "overloaded"
	ReasonUnavailable       Reason = "unavailable"
	ReasonInternal          Reason = "internal"
)

// Reasons are all reasons of this package, for documentation and tests.
func Reasons() []Reason {
	return []Reason{
		ReasonMalformedBody, ReasonInvalidField, ReasonDuplicateField, ReasonMissingField,
		ReasonConflictingFields, ReasonUnknownIsolation, ReasonTooManyRequests, ReasonBodyTooLarge,
		ReasonBodyTimeout, ReasonMediaType, ReasonContentEncoding, ReasonUnknownModel,
		ReasonAmbiguousModel, ReasonLoraContradiction, ReasonExactUnavailable, ReasonUnknownWorker,
		ReasonInvalidWorker, ReasonWorkerConflict, ReasonEndpointForbidden, ReasonServesCapture,
		ReasonNoSnapshots, ReasonSnapshotRunning, ReasonNothingToKeep, ReasonSnapshotFailed,
		ReasonSaltWithHashes, ReasonUnauthenticated, ReasonForbidden, ReasonCrossOrigin,
		ReasonNotFound, ReasonMethod, ReasonOverloaded, ReasonUnavailable,
		ReasonInternal,
	}
}

// Error is what a request ends in when it has no answer. It is safe to show to
// the caller: no salt, token or prompt is in it.
type Error struct {
	// Status is the HTTP status.
	Status int
	Reason Reason
	// Message says what is wrong and what to do.
	Message string
	// Param is the field at fault, as a path into the body; may be empty.
	Param string
	// Refused are the streams that could not answer exactly (409 only).
	Refused []Refusal
	// RetryAfter, where set, becomes the header (429 and 503).
	RetryAfter time.Duration
}

// Error makes it an error of Go.
func (e *Error) Error() string {
	if e.Param == "" {
		return string(e.Reason) + ": " + e.Message
	}
	return string(e.Reason) + ": " + e.Param + ": " + e.Message
}

// kind is the "type" of the error's body, in the words of the OpenAI API.
func (e *Error) kind() string {
	switch {
	case e.Status == http.StatusUnauthorized:
		return "authentication_error"
	case e.Status == http.StatusForbidden:
		return "permission_error"
	case e.Status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.Status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

func failf(status int, reason Reason, format string, args ...any) *Error {
	return &Error{Status: status, Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// badField says that one field of a body has a value it must not have.
func badField(param, format string, args ...any) *Error {
	e := failf(http.StatusBadRequest, ReasonInvalidField, format, args...)
	e.Param = param
	return e
}

// badIndex is badField for one element of an array.
func badIndex(param string, i int, format string, args ...any) *Error {
	return badField(param+"["+strconv.Itoa(i)+"]", format, args...)
}

// scalar takes the index from an error about an element: there is no array.
func (e *Error) scalar() *Error {
	if e != nil && e.Param == "[0]" {
		e.Param = ""
	}
	return e
}

// within puts the name of the enclosing field in front of the error's.
func (e *Error) within(field string) *Error {
	switch {
	case e.Param == "":
		e.Param = field
	case e.Param[0] == '[':
		e.Param = field + e.Param
	default:
		e.Param = field + "." + e.Param
	}
	return e
}
