package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// report prints a table for people and says whether nothing was unexpected.
func report(w io.Writer, results []result, verbose bool) bool {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "\trequest\tdynamo\tkvindexd\t")
	scenario := ""
	for _, r := range results {
		if r.scenario != scenario {
			scenario = r.scenario
			fmt.Fprintf(t, "\n%s\t\t\t\t\n", scenario)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", sign(r.verdict), r.name, brief(r.dynamo), brief(r.ours), ids(r.by))
	}
	t.Flush()
	details(w, results, verbose)
	deviations(w, results)
	return closing(w, results)
}

func sign(v verdict) string {
	return [...]string{equal: "  =", known: "  ~", unexpected: "  !"}[v]
}

// brief is an answer in a cell: its status, and its scores if it has any.
func brief(a answer) string {
	if a.status == 0 {
		return "-"
	}
	m, _ := a.body.(map[string]any)
	instances, ok := m["instances"].(map[string]any)
	if !ok {
		return fmt.Sprint(a.status)
	}
	var tokens []string
	for id, v := range instances {
		i, _ := v.(map[string]any)
		ranks, _ := i["dp"].(map[string]any)
		for rank, n := range ranks {
			tokens = append(tokens, fmt.Sprintf("%s/%s:%v", id, rank, n))
		}
		if i["disk"] != i["gpu"] {
			tokens = append(tokens, fmt.Sprintf("%s:cpu %v disk %v", id, i["cpu"], i["disk"]))
		}
	}
	slices.Sort(tokens)
	return fmt.Sprint(a.status, " ", cmp.Or(strings.Join(tokens, " "), "nobody"))
}

func ids(ds []*deviation) string {
	var out []string
	for _, d := range ds {
		out = append(out, d.id)
	}
	return strings.Join(out, ", ")
}

// details lists what nobody expected, and with verbose the whole answers.
func details(w io.Writer, results []result, verbose bool) {
	for _, r := range results {
		if r.verdict == unexpected || verbose && r.verdict == known {
			fmt.Fprintf(w, "\n%s: %s\n", r.scenario, r.name)
			for _, line := range r.trouble {
				fmt.Fprintln(w, "  "+line)
			}
		}
		if verbose && r.verdict != equal {
			fmt.Fprintf(w, "  dynamo   %d %s\n  kvindexd %d %s\n",
				r.dynamo.status, compact(r.dynamo.body), r.ours.status, compact(r.ours.body))
		}
	}
}

// deviations lists the known differences that were seen, with their reasons,
// and those that were expected and are gone.
func deviations(w io.Writer, results []result) {
	count, gone := map[*deviation]int{}, map[*deviation][]string{}
	for _, r := range results {
		for _, d := range r.by {
			count[d]++
		}
		for _, d := range r.gone {
			gone[d] = append(gone[d], r.scenario+": "+r.name)
		}
	}
	fmt.Fprintln(w, "\nLeft out of the comparison, because only kvindexd has them:")
	for _, a := range additions {
		fmt.Fprintf(w, "  %s: %s\n", a.name, a.why)
	}
	if len(count)+len(gone) > 0 {
		fmt.Fprintln(w, "\nKnown differences:")
	}
	for _, d := range allDeviations {
		if count[d] > 0 {
			fmt.Fprintf(w, "  %s (%d)\n      %s\n", d.id, count[d], d.why)
		}
	}
	for _, d := range allDeviations {
		for _, where := range gone[d] {
			fmt.Fprintf(w, "  gone: %s was expected and did not show at %s\n", d.id, where)
		}
	}
}

func closing(w io.Writer, results []result) bool {
	var n [3]int
	for _, r := range results {
		n[r.verdict]++
	}
	fmt.Fprintf(w, "\n%d compared, %d equal, %d differ as known, %d unexpected\n", len(results), n[equal], n[known], n[unexpected])
	return n[unexpected] == 0
}
