package main

import (
	"context"
	"fmt"
	"strings"
)

// A deviation is a way in which the two are known to differ.
type deviation struct {
	id string
	// why it is so, and which of the two is right.
	why string
	// fields are the paths, whole or as prefixes, that may differ by it.
	fields []string
	// dynamo, if set, is what its answer is known to be like. Where it is not,
	// the difference is another one.
	dynamo func(answer) error
}

func (d *deviation) covers(path string) bool {
	for _, f := range d.fields {
		if within(path, f) {
			return true
		}
	}
	return false
}

// verdict of one request.
type verdict uint8

const (
	equal verdict = iota
	known
	unexpected
)

// result is one request that both answered.
type result struct {
	scenario, name string
	verdict        verdict
	dynamo, ours   answer
	// by explains a known difference; gone are the deviations that were
	// expected here and did not show.
	by, gone []*deviation
	// trouble says what nobody expected, one a line.
	trouble []string
}

// request is what both are asked.
type request struct {
	name         string
	method, path string
	body         any
	// want checks kvindexd's answer, whatever Dynamo's is; nil for no check of
	// its own.
	want func(answer) error
	// may are the deviations expected here.
	may []*deviation
}

// pair asks both and keeps the results.
type pair struct {
	dynamo, ours *server
	scenario     string
	results      []result
}

// ask sends the request to both and judges the answers.
func (p *pair) ask(ctx context.Context, q request) {
	r := result{scenario: p.scenario, name: q.name}
	var err error
	if r.dynamo, err = p.dynamo.ask(ctx, q.method, q.path, q.body); err != nil {
		r.trouble = append(r.trouble, fmt.Sprintf("dynamo does not answer: %v", err))
	}
	if r.ours, err = p.ours.ask(ctx, q.method, q.path, q.body); err != nil {
		r.trouble = append(r.trouble, fmt.Sprintf("kvindexd does not answer: %v", err))
	}
	p.judge(r, q.want, q.may)
}

func (p *pair) judge(r result, want func(answer) error, may []*deviation) {
	seen := map[*deviation]bool{}
	for _, f := range differences(r.dynamo, r.ours) {
		covered := false
		for _, d := range may {
			if d.covers(f.path) && (d.dynamo == nil || d.dynamo(r.dynamo) == nil) {
				covered, seen[d] = true, true
			}
		}
		if !covered {
			r.trouble = append(r.trouble, f.String())
		}
	}
	for _, d := range may {
		if seen[d] {
			r.by = append(r.by, d)
		} else {
			r.gone = append(r.gone, d)
		}
	}
	if want != nil {
		if err := want(r.ours); err != nil {
			r.trouble = append(r.trouble, "kvindexd is wrong: "+err.Error())
		}
	}
	switch {
	case len(r.trouble) > 0:
		r.verdict = unexpected
	case len(r.by) > 0:
		r.verdict = known
	}
	p.results = append(p.results, r)
}

// follows records whether both have applied what an engine published.
func (p *pair) follows(name string, behind []string, may []*deviation) {
	r := result{scenario: p.scenario, name: name}
	for _, b := range behind {
		if b == p.dynamo.name && len(may) > 0 {
			r.verdict, r.by = known, may
			continue
		}
		r.verdict = unexpected
		r.trouble = append(r.trouble, b+" has not applied what was published")
	}
	if r.verdict == equal {
		r.gone = may
	}
	p.results = append(p.results, r)
}

// fail records that a scenario could not be carried out.
func (p *pair) fail(name string, err error) {
	p.results = append(p.results, result{
		scenario: p.scenario, name: name, verdict: unexpected, trouble: strings.Split(err.Error(), "\n"),
	})
}

// status wants kvindexd to answer so.
func status(code int) func(answer) error {
	return func(a answer) error {
		if a.status != code {
			return fmt.Errorf("status %d, expected %d: %s", a.status, code, compact(a.body))
		}
		return nil
	}
}

// refused wants the code and a JSON object with an error text.
func refused(code int) func(answer) error {
	return func(a answer) error {
		m, _ := a.body.(map[string]any)
		if text, _ := m["error"].(string); text == "" || len(m) != 1 {
			return fmt.Errorf("expected {\"error\": text}, got %s", compact(a.body))
		}
		return status(code)(a)
	}
}

// is wants the status and exactly this body.
func is(code int, body any) func(answer) error {
	return func(a answer) error {
		if got, want := compact(a.body), compact(body); got != want {
			return fmt.Errorf("%s, expected %s", got, want)
		}
		return status(code)(a)
	}
}
