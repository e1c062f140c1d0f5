package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// A scenario asks both about one thing, in a model of its own.
type scenario struct {
	name string
	run  func(ctx context.Context, p *pair)
}

var scenarios = []scenario{
	{"register", register},
	{"register: bodies", registerBodies},
	{"workers", workers},
	{"unregister", unregister},
	{"peers", peers},
	{"query: bodies", queryBodies},
	{"routes", routes},
}

// with is o with one field set, or taken away with gone.
func with(o obj, key string, value any) obj {
	o = maps.Clone(o)
	if value == gone {
		delete(o, key)
	} else {
		o[key] = value
	}
	return o
}

type absent struct{}

var gone any = absent{}

func post(name, path string, body any, want func(answer) error, may ...*deviation) request {
	return request{name, http.MethodPost, path, body, want, may}
}

func get(name, path string, want func(answer) error, may ...*deviation) request {
	return request{name, http.MethodGet, path, nil, want, may}
}

func (p *pair) all(ctx context.Context, requests ...request) {
	for _, q := range requests {
		p.ask(ctx, q)
	}
}

var ok = obj{"status": "ok"}

// registration is a body that names nothing alive: both register first and
// connect later.
func registration(model string, instance any, port int) obj {
	return obj{"instance_id": instance, "endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", port), "model_name": model, "block_size": 4, "dp_rank": 0}
}

func register(ctx context.Context, p *pair) {
	r := registration("reg", 100, 1)
	p.all(ctx,
		post("an instance", "/register", r, is(201, ok)),
		post("the same again", "/register", r, is(201, ok), sameAgain),
		post("another endpoint in its place", "/register", with(r, "endpoint", "tcp://127.0.0.1:2"), refused(409)),
		post("another replay endpoint in its place", "/register", with(r, "replay_endpoint", "tcp://127.0.0.1:2"), refused(409)),
		post("a second rank", "/register", with(with(r, "dp_rank", 1), "endpoint", "tcp://127.0.0.1:2"), is(201, ok)),
		post("a rank on another rank's endpoint", "/register", with(r, "dp_rank", 2), refused(409), onePublisher),
		post("an instance on another's endpoint", "/register", with(r, "instance_id", 101), refused(409), onePublisher),
		post("another block size in the model", "/register", with(registration("reg", 102, 15), "block_size", 8), is(201, ok), manyPlaces),
		post("another routing group", "/register", with(registration("reg", 103, 3), "routing_group", "g"), is(201, ok)),
		post("a registered instance in another group", "/register", with(registration("reg", 100, 4), "routing_group", "g"), is(201, ok), manyPlaces),
		post("another tenant", "/register", with(registration("reg", 104, 5), "tenant_id", "acme"), is(201, ok)),
		post("no dp_rank", "/register", with(registration("reg", 105, 6), "dp_rank", gone), is(201, ok)),
		post("dp_rank null", "/register", with(registration("reg", 106, 7), "dp_rank", nil), is(201, ok)),
		post("the largest id", "/register", with(registration("reg", uint64(1<<64-1), 8), "dp_rank", gone), is(201, ok)),
		post("fields of other languages", "/register", obj{"instance_id": 107, "endpoint": "tcp://127.0.0.1:9", "model_name": "reg", "block_size": 4,
			"additional_salt": "w8a8", "type": "vLLM", "lora_name": "sql", "bogus": 1}, is(201, ok)),
	)
	for i, endpoint := range []string{"nonsense", "", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "http://127.0.0.1:1", "tcp://127.0.0.1:x"} {
		p.ask(ctx, post(fmt.Sprintf("endpoint %q", endpoint), "/register", with(registration("reg", 120+i, 0), "endpoint", endpoint), refused(400)))
	}
	p.all(ctx,
		post("a bad replay endpoint", "/register", with(registration("reg", 130, 10), "replay_endpoint", "nonsense"), refused(400)),
		post("inproc://", "/register", with(registration("reg", 131, 0), "endpoint", "inproc://a"), refused(400), allowList),
		post("a public address", "/register", with(registration("reg", 132, 0), "endpoint", "tcp://192.0.2.1:1"), refused(400), allowList),
		post("ipc://", "/register", with(registration("reg", 133, 0), "endpoint", "ipc:///nowhere/socket"), refused(400), allowList),
		post("an instance named by a string", "/register", registration("reg", "vllm-0", 11), is(201, ok), moreLanguages),
		post("modelname", "/register", with(with(registration("reg", 134, 12), "model_name", gone), "modelname", "reg"), is(201, ok), moreLanguages),
		post("no block_size", "/register", with(registration("reg", 135, 13), "block_size", gone), is(201, ok), moreLanguages),
		post("no model", "/register", with(registration("reg", 136, 14), "model_name", ""), refused(400), badValues),
	)
}

func registerBodies(ctx context.Context, p *pair) {
	r := registration("bodies", 200, 20)
	for _, f := range []string{"instance_id", "endpoint", "model_name"} {
		p.ask(ctx, post("without "+f, "/register", with(r, f, gone), refused(400), errorForm))
	}
	for _, c := range []struct {
		field string
		value any
	}{
		{"instance_id", -1}, {"instance_id", 1.5}, {"instance_id", nil}, {"instance_id", []int{1}},
		{"instance_id", raw64}, {"block_size", 0}, {"block_size", "16"}, {"block_size", -1}, {"block_size", 1 << 32},
		{"dp_rank", -1}, {"dp_rank", "0"}, {"model_name", 7}, {"endpoint", 7}, {"routing_group", 7}, {"replay_endpoint", 7},
	} {
		may := errorForm
		if c.value == 0 {
			may = badValues
		}
		p.ask(ctx, post(fmt.Sprintf("%s %s", c.field, compact(c.value)), "/register", with(r, c.field, c.value), refused(400), may))
	}
	for _, path := range []string{"/register", "/unregister", "/query", "/query_by_hash", "/register_peer", "/deregister_peer"} {
		for _, body := range []string{"", "{", "null", "[]", `"x"`, `{"a":1} x`, "\xff\xfe", `{"model_name":"a","model_name":"a","url":"a","url":"a"}`} {
			p.ask(ctx, post(fmt.Sprintf("%s %.20q", path, body), path, raw{"application/json", []byte(body)}, refused(400), errorForm))
		}
		p.ask(ctx, post(path+" as text/plain", path, raw{"text/plain", []byte("{}")}, refused(415), errorForm))
	}
}

// raw64 is 2^64 as a JSON number.
var raw64 = json.Number("18446744073709551616")

func workers(ctx context.Context, p *pair) {
	p.all(ctx,
		post("an instance", "/register", registration("workers", 300, 30), is(201, ok)),
		post("its second rank", "/register", with(registration("workers", 300, 31), "dp_rank", 1), is(201, ok)),
		post("one of a group", "/register", with(registration("workers", 301, 32), "routing_group", "g"), is(201, ok)),
		get("of the model", "/workers?model_name=workers", status(200), liveness),
		get("of the model and group", "/workers?model_name=workers&routing_group=g", status(200), liveness),
		get("of an unknown model", "/workers?model_name=zz", is(200, []any{})),
		get("of an unknown group", "/workers?model_name=workers&routing_group=zz", is(200, []any{})),
		get("with an unknown parameter", "/workers?model_name=workers&x=1", status(200), liveness),
	)
	e, err := newEngine("workers-live", "310", 0, 4)
	if err != nil {
		p.fail("a publisher", err)
		return
	}
	defer e.pub.Close()
	p.ask(ctx, post("one that publishes", "/register", e.registration(), is(201, ok)))
	if err := p.connected(ctx, e); err != nil {
		p.fail("a connection", err)
	}
	if behind, err := p.settle(ctx, e, patience); err != nil || behind != nil {
		p.fail("its first batch", fmt.Errorf("not applied by %v: %w", behind, err))
	}
	p.ask(ctx, get("of a live one", "/workers?model_name=workers-live", status(200)))
}

func unregister(ctx context.Context, p *pair) {
	for i, r := range []obj{
		registration("un", 400, 40), with(registration("un", 400, 41), "dp_rank", 1), with(registration("un", 400, 42), "dp_rank", 2),
		with(registration("un", 401, 43), "routing_group", "g"), registration("un", 402, 44),
		registration("un", 403, 45), with(registration("un", 403, 46), "dp_rank", 1),
	} {
		p.ask(ctx, post(fmt.Sprint("register ", i), "/register", r, is(201, ok)))
	}
	left := get("who is left", "/workers?model_name=un", status(200), liveness)
	un := func(name string, body obj, want func(answer) error, may ...*deviation) {
		p.ask(ctx, post(name, "/unregister", body, want, may...))
	}
	un("an unknown instance", obj{"instance_id": 499, "model_name": "un"}, refused(404))
	un("an unknown model", obj{"instance_id": 400, "model_name": "zz"}, refused(404))
	un("another group", obj{"instance_id": 400, "model_name": "un", "routing_group": "zz"}, refused(404))
	un("an unknown rank", obj{"instance_id": 400, "model_name": "un", "routing_group": "default", "dp_rank": 7}, refused(404))
	un("a rank, its group named", obj{"instance_id": 400, "model_name": "un", "routing_group": "default", "dp_rank": 1}, is(200, ok))
	p.ask(ctx, left)
	un("an instance, no group named", obj{"instance_id": 401, "model_name": "un"}, is(200, ok))
	un("it again", obj{"instance_id": 401, "model_name": "un"}, refused(404))
	un("an instance, its group named", obj{"instance_id": 402, "model_name": "un", "routing_group": "default"}, is(200, ok))
	p.ask(ctx, left)
	un("a rank, no group named", obj{"instance_id": 403, "model_name": "un", "dp_rank": 1}, is(200, ok))
	p.ask(ctx, get("who is left", "/workers?model_name=un", listed("400/0", "400/2", "403/0"), liveness, rankLeaves))
	un("no instance", obj{"model_name": "un"}, refused(400), errorForm)
	un("the rest of it", obj{"instance_id": 400, "model_name": "un"}, is(200, ok))
	un("no model", obj{"instance_id": 403, "dp_rank": 0},
		is(200, obj{"status": "unregistered successfully", "removed_instances": []string{"403|default|0"}}), moreLanguages)
	p.ask(ctx, get("nobody is left", "/workers?model_name=un", is(200, []any{})))
}

// listed wants GET /workers to name these ranks and no other.
func listed(ranks ...string) func(answer) error {
	return func(a answer) error {
		instances, _ := a.body.([]any)
		var got []string
		for _, i := range instances {
			m, _ := i.(map[string]any)
			listeners, _ := m["listeners"].(map[string]any)
			for rank := range listeners {
				got = append(got, fmt.Sprintf("%v/%s", m["instance_id"], rank))
			}
		}
		if slices.Sort(got); !slices.Equal(got, ranks) {
			return fmt.Errorf("lists %v, expected %v", got, ranks)
		}
		return nil
	}
}

func peers(ctx context.Context, p *pair) {
	peer := obj{"url": "http://127.0.0.1:1"}
	p.all(ctx,
		get("none", "/peers", is(200, []any{})),
		post("one", "/register_peer", peer, is(201, ok)),
		post("it again", "/register_peer", peer, is(201, ok)),
		get("one", "/peers", is(200, []any{"http://127.0.0.1:1"})),
		post("take it out", "/deregister_peer", peer, is(200, ok)),
		post("take it out again", "/deregister_peer", peer, refused(404)),
		get("none again", "/peers", is(200, []any{})),
		post("no url", "/register_peer", obj{}, refused(400), errorForm),
		post("a number", "/register_peer", obj{"url": 5}, refused(400), errorForm),
		post("no url to take out", "/deregister_peer", obj{}, refused(400), errorForm),
		post("not a URL", "/register_peer", obj{"url": "nonsense"}, refused(400), badValues),
		post("a file", "/register_peer", obj{"url": "file:///etc/passwd"}, refused(400), badValues),
	)
}

func queryBodies(ctx context.Context, p *pair) {
	p.ask(ctx, post("an instance", "/register", registration("qb", 500, 50), is(201, ok)))
	nobody := is(200, truth(nil, prompt{}))
	q := obj{"model_name": "qb", "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8}}
	p.all(ctx,
		post("nothing stored", "/query", q, nobody),
		post("no token", "/query", with(q, "token_ids", []int{}), nobody),
		post("less than a block", "/query", with(q, "token_ids", []int{1}), nobody),
		post("an unknown model", "/query", with(q, "model_name", "zz"), refused(404)),
		post("an unknown group", "/query", with(q, "routing_group", "zz"), refused(404)),
		post("an unknown tenant", "/query", with(q, "tenant_id", "zz"), refused(404), tenants),
		post("nulls", "/query", obj{"model_name": "qb", "token_ids": []int{1}, "cache_salt": nil, "lora_name": nil}, nobody),
		post("empty strings", "/query", obj{"model_name": "qb", "token_ids": []int{1}, "cache_salt": "", "lora_name": ""}, nobody),
		post("an unknown adapter", "/query", with(q, "lora_name", "nobody-has-it"), nobody),
		post("an instance, unknown", "/query", with(q, "instance_id", 599), nobody),
		post("another block_size", "/query", with(q, "block_size", 64), nobody),
		post("model for model_name", "/query", with(with(q, "model_name", gone), "model", "qb"), nobody, moreLanguages),
		post("no model", "/query", with(q, "model_name", gone), refused(400), errorForm),
		post("no token_ids", "/query", with(q, "token_ids", gone), refused(400), errorForm),
		post("cache_salt 5", "/query", with(q, "cache_salt", 5), refused(400), errorForm),
	)
	for _, v := range []any{nil, "abc", obj{}, []int{-1}, []int{1 << 32}, []any{"1"}, []any{nil}, []any{1.5}, []any{true}, []any{json.Number("1.0")}, []any{json.Number("1e0")}} {
		p.ask(ctx, post("token_ids "+compact(v), "/query", with(q, "token_ids", v), refused(400), errorForm))
	}
	h := obj{"model_name": "qb", "block_hashes": []int{1, 2}}
	p.all(ctx,
		post("hashes", "/query_by_hash", h, nobody),
		post("no hash", "/query_by_hash", with(h, "block_hashes", []int{}), nobody),
		post("a negative hash", "/query_by_hash", with(h, "block_hashes", []int{-1}), nobody),
		post("an unsigned hash", "/query_by_hash", with(h, "block_hashes", []uint64{1<<64 - 1}), nobody, moreLanguages),
		post("rolling hashes", "/query_by_hash", with(with(h, "block_hashes", gone), "seq_hashes", []int{1}), nobody, moreLanguages),
		post("a salt beside hashes", "/query_by_hash", with(h, "cache_salt", "s"), refused(400)),
		post("an empty salt beside hashes", "/query_by_hash", with(h, "cache_salt", ""), refused(400)),
		post("salt null beside hashes", "/query_by_hash", with(h, "cache_salt", nil), nobody),
		post("hashes, unknown model", "/query_by_hash", with(h, "model_name", "zz"), refused(404)),
		post("hashes, no model", "/query_by_hash", with(h, "model_name", gone), refused(400), errorForm),
		post("no hashes", "/query_by_hash", with(h, "block_hashes", gone), refused(400), errorForm),
	)
	for _, v := range []any{nil, "abc", []any{"1"}, []any{1.5}, []any{nil}, []any{raw64}} {
		p.ask(ctx, post("block_hashes "+compact(v), "/query_by_hash", with(h, "block_hashes", v), refused(400), errorForm))
	}
}

func routes(ctx context.Context, p *pair) {
	p.all(ctx,
		get("health", "/health", status(200), healthBody),
		request{"GET of a POST route", http.MethodGet, "/register", nil, refused(405), []*deviation{errorForm}},
		request{"POST of a GET route", http.MethodPost, "/workers", obj{}, refused(405), []*deviation{errorForm}},
		get("no such route", "/nope", status(404), errorForm),
		get("metrics", "/metrics", status(200)),
	)
}
