package fleet

import (
	"encoding/json"
	"testing"

	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// request is the body of a match request, as the cases and captures have it.
type request struct {
	Model     string          `json:"model"`
	Tokens    []uint32        `json:"token_ids"`
	LoraName  string          `json:"lora_name"`
	CacheSalt string          `json:"cache_salt"`
	Features  json.RawMessage `json:"features"`
	Mode      string          `json:"mm"`
}

// answer is what one stream says to a request.
type answer struct {
	row    index.Row
	reason string
	state  State
}

// match asks every stream of the fleet, by "worker/rank". With mode exact, a
// stream that cannot answer exactly has a reason and no row.
func match(t testing.TB, f *Fleet, r *request) map[string]answer {
	t.Helper()
	res, err := f.Resolve(Selector{Model: r.Model, LoraName: r.LoraName})
	if err != nil {
		t.Fatal(err)
	}
	mode, err := normalize.ParseMode(r.Mode)
	if err != nil {
		t.Fatal(err)
	}
	p := normalize.Prompt{Tokens: r.Tokens, LoraName: res.LoraName, CacheSalt: r.CacheSalt, Mode: mode}
	if r.Features != nil {
		p.Features = normalize.ParseFeaturesJSON(r.Features)
	}
	out := map[string]answer{}
	for _, pic := range res.Pictures {
		askPicture(pic, &p, out)
	}
	return out
}

func askPicture(pic *Picture, p *normalize.Prompt, out map[string]answer) {
	shapes := pic.Index.Shapes()
	views := make([]index.QueryView, len(pic.Views))
	reasons := map[normalize.View]map[normalize.Shape]string{}
	for i, v := range pic.Views {
		reasons[v] = map[normalize.Shape]string{}
		for _, s := range shapes {
			pr := p.Project(v, s)
			if p.Mode != normalize.TextOnly {
				reasons[v][s] = string(pr.Reason)
			}
			var c normalize.Chain
			p.Chain(&c, &pr, v, s)
			views[i].Chains = append(views[i].Chains, c)
			views[i].Limits = append(views[i].Limits, pr.Limit)
		}
	}
	rows := make([]index.Row, len(pic.Members))
	pic.Index.Match(&index.Query{PromptTokens: len(p.Tokens), Views: views, Of: pic.ViewOf}, pic.Streams, rows)
	for i, m := range pic.Members {
		a := answer{row: rows[i], state: m.Status().State}
		if s, ok := m.Stream().Shape(); ok {
			a.reason = reasons[m.View][s]
		} else {
			for _, r := range reasons[m.View] {
				a.reason = r
			}
		}
		out[streamName(m.Worker, m.Rank)] = a
	}
}

// device is one stream's answer to a plain prompt, in tokens.
func device(t testing.TB, f *Fleet, model, stream string, tokens ...uint32) int {
	t.Helper()
	return match(t, f, &request{Model: model, Tokens: tokens})[stream].row.Device
}
