package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/kvindexd/kvindexd/api/client"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// question is one line of a file of questions with known answers.
type question struct {
	// After is how many records have been applied when it is asked.
	After   int                 `json:"after"`
	Request json.RawMessage     `json:"request"`
	Expect  map[string]expected `json:"expect"`
	// NotExact are the streams that cannot answer exactly, and why.
	NotExact map[string]string `json:"not_exact"`

	line  int
	model string
	mode  string
}

// expected is what one stream must answer, in tokens. A stream that is not
// named must hold nothing.
type expected struct {
	Device int  `json:"device"`
	Host   int  `json:"host"`
	Usable *int `json:"usable"`
}

// maxQuestion bounds one line of a file of questions.
const maxQuestion = 64 << 20

// readQuestions reads a file of questions.
func readQuestions(name string) ([]question, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []question
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, maxQuestion)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		q := question{line: n}
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		var r struct{ Model, MM string }
		if err := json.Unmarshal(q.Request, &r); err != nil {
			return nil, fmt.Errorf("%s:%d: request: %w", name, n, err)
		}
		q.model, q.mode = r.Model, r.MM
		out = append(out, q)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	slices.SortStableFunc(out, func(a, b question) int { return a.After - b.After })
	return out, nil
}

// checker compares a daemon's answers with known ones. It asks through the API,
// in process or over the network alike.
type checker struct {
	client  *client.Client
	streams map[string]zmqwire.CaptureStream
	// names of the streams by worker and rank as answers give them.
	names map[streamKey]string
	out   io.Writer

	tally checkTally
}

// checkTally is the result of a check. Every figure counts once per question
// and stream.
type checkTally struct {
	Questions int `json:"questions"`
	Answers   int `json:"answers"`
	Differ    int `json:"differ"`
	// TooLong answers, the ones that must never be, are among those that
	// differ.
	TooLong int `json:"too_long"`
}

func (t checkTally) String() string {
	return fmt.Sprintf("%d answers, %d differ, %d too long", t.Answers, t.Differ, t.TooLong)
}

type streamKey struct {
	worker    string
	rank      int
	model     string
	namespace string
	role      string
}

func newChecker(c *client.Client, streams map[string]zmqwire.CaptureStream, out io.Writer) *checker {
	k := &checker{client: c, streams: streams, names: map[streamKey]string{}, out: out}
	for name, s := range streams {
		k.names[keyOf(s)] = name
	}
	return k
}

func keyOf(s zmqwire.CaptureStream) streamKey {
	k := streamKey{worker: s.Worker, rank: s.DPRank, model: s.Model, namespace: s.Namespace, role: s.Role}
	if k.namespace == "" {
		k.namespace = "default"
	}
	if k.role == "" {
		k.role = "aggregated"
	}
	return k
}

// reply is what a daemon said of one stream.
type reply struct {
	row     *client.Row
	refused *client.Refusal
}

// ask puts one question and compares every stream's figures. An error means
// that there is no answer to compare.
func (k *checker) ask(ctx context.Context, q *question) error {
	a, err := k.client.MatchRaw(ctx, withZeroRows(q.Request))
	var refusal *client.Error
	if errors.As(err, &refusal) && refusal.Status == http.StatusConflict && len(refusal.Refused) > 0 {
		a, err = &client.MatchResponse{Model: q.model, Refused: refusal.Refused}, nil
	}
	if err != nil {
		return fmt.Errorf("question of line %d: %w", q.line, err)
	}
	replies := k.replies(a)
	k.tally.Questions++
	for _, name := range k.asked(q) {
		k.tally.Answers++
		faults, long := compare(q, name, replies[name])
		if len(faults) == 0 {
			continue
		}
		k.tally.Differ++
		if long {
			k.tally.TooLong++
		}
		k.tell(ctx, q, name, replies[name], faults, long)
	}
	return nil
}

// withZeroRows asks for the streams without a match too: they are to be
// compared as well.
func withZeroRows(request []byte) []byte {
	return bytes.Replace(request, []byte("{"), []byte(`{"include":["zero"],`), 1)
}

func (k *checker) replies(a *client.MatchResponse) map[string]reply {
	out := map[string]reply{}
	for i := range a.Workers {
		w := &a.Workers[i]
		out[k.names[streamKey{w.Worker, w.DPRank, a.Model, w.Namespace, w.Role}]] = reply{row: w}
	}
	for i := range a.Refused {
		w := &a.Refused[i]
		out[k.names[streamKey{w.Worker, w.DPRank, a.Model, w.Namespace, w.Role}]] = reply{refused: w}
	}
	return out
}

// asked are the streams that a question is put to: all of its model.
func (k *checker) asked(q *question) []string {
	var out []string
	for name, s := range k.streams {
		if q.model == "" || s.Model == q.model {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// compare lists what differs between an answer and the known one.
func compare(q *question, name string, r reply) (faults []string, long bool) {
	want, why := q.Expect[name], q.NotExact[name]
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	refuse := q.mode == "exact" && why != ""
	switch {
	case r.refused != nil && !refuse:
		fault("refused for %s, expected an answer", r.refused.Reason)
		return faults, false
	case r.refused != nil:
		if r.refused.Reason != why {
			fault("refused for %s, expected %s", r.refused.Reason, why)
		}
		return faults, false
	case r.row == nil:
		fault("no answer")
		return faults, false
	case refuse:
		fault("answered, expected a refusal for %s", why)
		return faults, r.row.Device > 0
	}
	long = compareRow(fault, &want, r.row)
	if got := r.row.Reason; got != why && got != "text_only" {
		fault("not exact: %s, expected %s", orNone(got), orNone(why))
	}
	return faults, long
}

// compareRow compares the figures and says whether one is too long.
func compareRow(fault func(string, ...any), want *expected, got *client.Row) (long bool) {
	figure := func(what string, got, want int) {
		if got != want {
			fault("%s %d, expected %d", what, got, want)
			long = long || got > want
		}
	}
	figure("device", got.Device, want.Device)
	figure("host", got.Host, want.Host)
	if want.Usable == nil {
		return long
	}
	if got.UsableTokens == nil {
		fault("usable unknown (%s), expected %d", got.UsableReason, *want.Usable)
		return long
	}
	figure("usable", *got.UsableTokens, *want.Usable)
	return long
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// tell prints one difference, and what the daemon says about it.
func (k *checker) tell(ctx context.Context, q *question, name string, r reply, faults []string, long bool) {
	mark := "differs"
	if long {
		mark = "TOO LONG"
	}
	fmt.Fprintf(k.out, "%s: line %d, after %d records, %s: %s\n", mark, q.line, q.After, name, strings.Join(faults, "; "))
	if r.row != nil {
		fmt.Fprintf(k.out, "    block size %d, state %s, seq %s, lost %d\n", r.row.BlockSize, r.row.State, optional(r.row.Seq), r.row.Lost)
	}
	for _, line := range k.explain(ctx, q, name) {
		fmt.Fprintf(k.out, "    %s\n", line)
	}
}

// explain asks the daemon why a stream's match ended where it did.
func (k *checker) explain(ctx context.Context, q *question, name string) []string {
	raw, err := k.client.Explain(ctx, withZeroRows(q.Request))
	if err != nil {
		return nil // The difference stands by itself.
	}
	s := k.streams[name]
	return sentencesFor(raw, s.Worker, s.DPRank)
}

func optional[T any](v *T) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v)
}
