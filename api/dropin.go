package api

import (
	"errors"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/normalize"
)

// The drop-in routes speak the language of the Dynamo standalone indexer and of
// the Mooncake conductor over the same Service. There a partition is (model,
// tenant, routing group); here it is a model and a namespace.

// defaultGroup is what an absent tenant_id or routing_group means.
const defaultGroup = "default"

// partitionNamespace is the namespace of a tenant's routing group: the default
// one where both are, so that workers registered on either side meet.
func partitionNamespace(tenant, group string) string {
	if tenant == "" {
		tenant = defaultGroup
	}
	if group == "" {
		group = defaultGroup
	}
	if tenant == defaultGroup && group == defaultGroup {
		return fleet.DefaultNamespace
	}
	return url.PathEscape(tenant) + "/" + url.PathEscape(group)
}

// partitionOf is the reverse of partitionNamespace. A namespace that was given
// natively is a routing group of the default tenant.
func partitionOf(namespace string) (tenant, group string) {
	tenant, group, ok := strings.Cut(namespace, "/")
	if !ok {
		return defaultGroup, namespace
	}
	if t, err := url.PathUnescape(tenant); err == nil {
		tenant = t
	}
	if g, err := url.PathUnescape(group); err == nil {
		group = g
	}
	return tenant, group
}

// encodeDropinError appends {"error": "text"}.
func encodeDropinError(e *encoder, err *Error) {
	text := err.Message
	if err.Param != "" {
		text = err.Param + ": " + text
	}
	e.openMap(1)
	e.key("error").str(text)
	e.closeMap()
}

// instanceID reads an id that may be a number or a string.
func instanceID(v container) (string, *Error) {
	if v.isString() {
		return name(v)
	}
	n, err := v.u64()
	return strconv.FormatUint(n, 10), err
}

// registration is the body of /register and /unregister.
type registration struct {
	id, model, group, tenant string
	endpoint, replay         string
	lora                     string
	blockSize                uint32
	rank                     int
	hasRank                  bool
	hasGroup                 bool
	// conductor says that a client of Mooncake's conductor asks, which looks
	// for the conductor's words in the answer: only there a registration must
	// have a hash_profile. What that says is not needed here.
	conductor bool
}

// registrationIsolation are the isolation fields that these routes read.
var registrationIsolation = []string{"tenant_id", "routing_group", "additional_salt", "additionalsalt", "lora_name"}

func (c *call) registration(required ...string) (*registration, *Error) {
	r := new(registration)
	v, end := c.reader()
	f := newFields(required...)
	err := v.object(func(key []byte) *Error {
		return f.read(key, v, registrationIsolation, func(field string) *Error { return r.field(field, v) })
	})
	if err == nil {
		err = end()
	}
	if err == nil {
		err = f.missing()
	}
	return r, err
}

func (r *registration) field(field string, v container) (err *Error) {
	var n int64
	switch field {
	case "instance_id":
		r.id, err = instanceID(v)
	case "model_name", "modelname":
		r.model, err = name(v)
	case "routing_group":
		r.hasGroup = true
		r.group, err = name(v)
	case "tenant_id":
		r.tenant, err = name(v)
	case "endpoint":
		r.endpoint, err = name(v)
	case "replay_endpoint":
		r.replay, err = name(v)
	case "lora_name":
		r.lora, err = name(v)
	case "hash_profile":
		r.conductor = true
		err = v.skip()
	case "additional_salt", "additionalsalt":
		// It tells apart instances whose blocks must not be mixed. Ours are
		// never mixed: each instance's blocks are its own events'.
		_, err = v.str()
	case "block_size":
		n, err = v.integer(1, math.MaxUint32)
		r.blockSize = uint32(n)
	case "dp_rank":
		r.hasRank = true
		r.rank, err = count(v)
	default:
		return errUnread
	}
	return err
}

// registering makes one change of a drop-in registration at a time: it reads
// what is there, adds or takes away a rank, and puts the whole back.
type registering struct{ mu sync.Mutex }

// handleRegister answers POST /register. Ranks of one instance come one by one.
func handleRegister(c *call) *Error {
	r, err := c.registration("instance_id", "endpoint")
	if err == nil && r.model == "" {
		err = failf(http.StatusBadRequest, ReasonMissingField, "model_name is required")
	}
	if err != nil {
		return err
	}
	c.srv.registering.mu.Lock()
	defer c.srv.registering.mu.Unlock()
	spec, err := c.srv.withRank(r)
	if err != nil {
		return err
	}
	if err := c.srv.Fleet.Register(spec); err != nil {
		return registerError(err)
	}
	if r.conductor {
		return c.reply(http.StatusOK, registeredAnswer{"registered successfully", r.id})
	}
	return c.reply(http.StatusCreated, statusAnswer{"ok"})
}

// registeredAnswer and unregisteredAnswer are the conductor's words.
type registeredAnswer struct {
	Status string `json:"status"`
	ID     string `json:"instance_id"`
}

type unregisteredAnswer struct {
	Status  string   `json:"status"`
	Removed []string `json:"removed_instances"`
}

// registerError is fleetError, except that a forbidden endpoint is a bad one
// in this language.
func registerError(err error) *Error {
	e := fleetError(err)
	if errors.Is(err, fleet.ErrDenied) {
		e.Status = http.StatusBadRequest
	}
	return e
}

// withRank is what is registered for the instance, with r's rank in it.
func (s *Server) withRank(r *registration) (fleet.WorkerSpec, *Error) {
	spec := fleet.WorkerSpec{ID: r.id, Model: r.model, Namespace: partitionNamespace(r.tenant, r.group), BlockSize: r.blockSize}
	for _, old := range s.Fleet.Registered(r.id) {
		if old.Key() == spec.Key() {
			spec = old
		}
	}
	rank := fleet.RankSpec{Rank: r.rank, Endpoint: r.endpoint, ReplayEndpoint: r.replay}
	if spec.Endpoint != "" {
		return spec, conflict("the worker is registered natively; change it with PUT /v1/workers/%s", url.PathEscape(safe(r.id)))
	}
	if r.blockSize != 0 && spec.BlockSize != r.blockSize {
		return spec, conflict("the instance is registered with block_size %d", spec.BlockSize)
	}
	spec.Ranks = slices.Clone(spec.Ranks)
	at := slices.IndexFunc(spec.Ranks, func(o fleet.RankSpec) bool { return o.Rank == r.rank })
	switch {
	case at < 0:
		spec.Ranks = append(spec.Ranks, rank)
	case spec.Ranks[at] != rank:
		return spec, conflict("rank %d of the instance is registered with another endpoint", r.rank)
	}
	if r.lora != "" && !slices.ContainsFunc(spec.Loras, func(l fleet.LoraSpec) bool { return l.Name == r.lora }) {
		spec.Loras = append(slices.Clone(spec.Loras), fleet.LoraSpec{Name: r.lora})
	}
	return spec, nil
}

func conflict(format string, args ...any) *Error {
	return failf(http.StatusConflict, ReasonWorkerConflict, format, args...)
}

// handleUnregister answers POST /unregister. With dp_rank that rank only; with
// no group, the registrations in every group of the tenant; with no model, which
// only the conductor's clients leave out, those of every model.
func handleUnregister(c *call) *Error {
	r, err := c.registration("instance_id")
	if err != nil {
		return err
	}
	c.srv.registering.mu.Lock()
	defer c.srv.registering.mu.Unlock()
	var removed []string
	for _, spec := range c.srv.Fleet.Registered(r.id) {
		if !r.names(&spec) {
			continue
		}
		done, err := c.srv.withoutRank(spec, r)
		if err != nil {
			return fleetError(err)
		}
		if done {
			removed = append(removed, r.serviceKeys(&spec)...)
		}
	}
	if removed == nil {
		return failf(http.StatusNotFound, ReasonUnknownWorker, "no such instance, model or rank is registered")
	}
	if r.model == "" {
		return c.reply(http.StatusOK, unregisteredAnswer{"unregistered successfully", removed})
	}
	return c.reply(http.StatusOK, statusAnswer{"ok"})
}

// serviceKeys names the ranks that r takes out of a registration, as the
// conductor does.
func (r *registration) serviceKeys(spec *fleet.WorkerSpec) (keys []string) {
	tenant, _ := partitionOf(spec.Key().Namespace)
	for _, o := range spec.Ranks {
		if !r.hasRank || o.Rank == r.rank {
			keys = append(keys, spec.ID+"|"+tenant+"|"+itoa(o.Rank))
		}
	}
	if keys == nil { // a worker that was stated natively, by its first rank
		keys = append(keys, spec.ID+"|"+tenant+"|"+itoa(r.rank))
	}
	return keys
}

// names says whether the registration is one that r means.
func (r *registration) names(spec *fleet.WorkerSpec) bool {
	if r.model != "" && spec.Model != r.model {
		return false
	}
	tenant, group := partitionOf(spec.Key().Namespace)
	want, wantGroup := partitionOf(partitionNamespace(r.tenant, r.group))
	return tenant == want && (!r.hasGroup || group == wantGroup)
}

// withoutRank takes r's rank, or everything, out of a registration.
func (s *Server) withoutRank(spec fleet.WorkerSpec, r *registration) (bool, error) {
	if !r.hasRank {
		return true, s.Fleet.Unregister(spec.ID, spec.Key())
	}
	if len(spec.Ranks) == 0 {
		if r.rank != 0 || spec.DPSize > 1 {
			return false, nil
		}
		return true, s.Fleet.Unregister(spec.ID, spec.Key())
	}
	left := slices.DeleteFunc(slices.Clone(spec.Ranks), func(o fleet.RankSpec) bool { return o.Rank == r.rank })
	switch len(left) {
	case len(spec.Ranks):
		return false, nil
	case 0:
		return true, s.Fleet.Unregister(spec.ID, spec.Key())
	}
	spec.Ranks = left
	return true, s.Fleet.Register(spec)
}

// instanceAnswer is an element of GET /workers.
type instanceAnswer struct {
	ID        any                       `json:"instance_id"`
	Source    string                    `json:"source"`
	Status    string                    `json:"status"`
	Model     string                    `json:"model_name"`
	Group     string                    `json:"routing_group"`
	Tenant    string                    `json:"tenant_id"`
	BlockSize uint32                    `json:"block_size"`
	Endpoints map[string]string         `json:"endpoints"`
	Listeners map[string]listenerAnswer `json:"listeners"`
}

type listenerAnswer struct {
	Endpoint  string `json:"endpoint"`
	Status    string `json:"status"`
	LastError string `json:"last_error,omitempty"`
}

// handleInstances answers GET /workers?model_name=&routing_group=.
func handleInstances(c *call) *Error {
	q := c.r.URL.Query()
	out := []instanceAnswer{}
	for _, v := range c.srv.Fleet.Workers() {
		a := asInstance(&v)
		if m := q.Get("model_name"); m != "" && m != a.Model {
			continue
		}
		if g := q.Get("routing_group"); g != "" && g != a.Group {
			continue
		}
		out = append(out, a)
	}
	return c.reply(http.StatusOK, out)
}

func asInstance(v *fleet.WorkerView) instanceAnswer {
	tenant, group := partitionOf(v.Spec.Namespace)
	a := instanceAnswer{
		ID: idValue(v.Spec.ID), Source: "zmq", Status: "pending", Model: v.Spec.Model, Group: group, Tenant: tenant,
		BlockSize: v.Spec.BlockSize, Endpoints: map[string]string{}, Listeners: map[string]listenerAnswer{},
	}
	status := map[string]int{}
	for i := range v.Streams {
		s := &v.Streams[i]
		rank := itoa(s.Rank)
		l := listenerAnswer{Endpoint: s.Endpoint, Status: listenerStatus(s), LastError: s.Status.LastError}
		a.Endpoints[rank], a.Listeners[rank] = s.Endpoint, l
		status[l.Status]++
	}
	for _, st := range []string{"failed", "pending", "active"} {
		if status[st] > 0 {
			a.Status = st
			break
		}
	}
	if !v.Admitted {
		a.Status = "paused"
	}
	return a
}

// idValue is a number where the id is one, as it was registered.
func idValue(id string) any {
	if n, err := strconv.ParseUint(id, 10, 64); err == nil && strconv.FormatUint(n, 10) == id {
		return n
	}
	return id
}

func listenerStatus(s *fleet.StreamView) string {
	switch {
	case s.Status.State == fleet.Disconnected:
		return "failed"
	case s.Status.Connected, s.Status.HasSeq:
		return "active"
	}
	return "pending"
}

// queryIsolation are the isolation fields that /query and /query_by_hash read.
var queryIsolation = []string{"tenant_id", "routing_group", "lora_name", "cache_salt"}

// handleQuery answers POST /query.
func handleQuery(c *call) *Error { return c.query("token_ids") }

// handleQueryByHash answers POST /query_by_hash.
func handleQueryByHash(c *call) *Error { return c.query("") }

// query reads a question of the drop-in language into c.req and answers it.
func (c *call) query(required string) *Error {
	var p partitionQuery
	c.req.reset()
	if err := c.readQuery(&p, required); err != nil {
		return err
	}
	r := &c.req
	r.Namespace = partitionNamespace(p.tenant, p.group)
	if r.given&(fieldBlockHashes|fieldSequenceHashes) != 0 {
		if p.salted {
			return badField("cache_salt", "hashes are made with the salt already; leave cache_salt out")
		}
		if r.HashBlockSize = p.blockSize; r.HashBlockSize == 0 {
			size, err := c.srv.service.blockSize(r)
			if err != nil {
				return err
			}
			r.HashBlockSize = size
		}
	}
	if p.instance != "" {
		r.given |= fieldWorkers
		r.Workers = append(r.Workers[:0], p.instance)
	}
	if err := r.check(); err != nil {
		return err
	}
	if err := c.srv.service.match(c.r.Context(), r, &c.res); err != nil {
		return err
	}
	encodeScores(&c.out, c.res.Workers)
	return nil
}

// partitionQuery are the fields that a MatchRequest has no place for.
type partitionQuery struct {
	tenant, group, instance string
	blockSize               uint32
	salted                  bool // it has a cache_salt, if only an empty one
}

func (c *call) readQuery(p *partitionQuery, required string) *Error {
	v, end := c.reader()
	f := newFields()
	err := v.object(func(key []byte) *Error {
		return f.read(key, v, queryIsolation, func(field string) *Error { return c.queryField(field, v, p, required == "") })
	})
	if err == nil {
		err = end()
	}
	if err == nil && c.req.Model == "" {
		err = failf(http.StatusBadRequest, ReasonMissingField, "model_name is required")
	}
	if err == nil && required == "" && c.req.given&(fieldBlockHashes|fieldSequenceHashes) == 0 {
		err = failf(http.StatusBadRequest, ReasonMissingField, "give block_hashes or seq_hashes")
	}
	if err == nil && required != "" && c.req.given&fieldTokens == 0 {
		err = failf(http.StatusBadRequest, ReasonMissingField, "token_ids is required")
	}
	return err
}

func (c *call) queryField(field string, v container, p *partitionQuery, byHash bool) (err *Error) {
	r := &c.req
	var n int64
	switch {
	case field == "model_name" || field == "model" || field == "modelname":
		r.Model, err = name(v)
	case field == "routing_group":
		p.group, err = name(v)
	case field == "tenant_id":
		p.tenant, err = name(v)
	case field == "lora_name":
		r.LoraName, err = name(v)
	case field == "cache_salt":
		p.salted = true
		r.CacheSalt, err = v.str()
	case field == "instance_id":
		p.instance, err = instanceID(v)
	case field == "block_size":
		n, err = v.integer(1, math.MaxUint32)
		p.blockSize = uint32(n)
	case field == "token_ids" && !byHash:
		r.given |= fieldTokens
		r.Tokens, err = v.tokens(r.Tokens)
	case field == "block_hashes" && byHash:
		r.given |= fieldBlockHashes
		var hs []uint64
		hs, err = v.hashes(nil, true)
		for _, h := range hs {
			r.BlockHashes = append(r.BlockHashes, normalize.LocalHash(h))
		}
	case (field == "seq_hashes" || field == "block_hash") && byHash: // the latter is the conductor's early name
		r.given |= fieldSequenceHashes
		var hs []uint64
		hs, err = v.hashes(nil, true)
		for _, h := range hs {
			r.SequenceHashes = append(r.SequenceHashes, normalize.SequenceHash(h))
		}
	default:
		return errUnread
	}
	return err
}

// blockSize is the one block size of the sets that r asks, 0 if there are
// several or none.
func (s *Service) blockSize(r *MatchRequest) (size uint32, err *Error) {
	resolved, cause := s.fleet.Resolve(fleet.Selector{Model: r.Model, LoraName: r.LoraName, Namespace: r.Namespace, Role: r.Role})
	if cause != nil {
		return 0, resolveError(cause, r)
	}
	for _, p := range resolved.Pictures {
		for _, shape := range p.Index.Shapes() {
			if size != 0 && size != shape.BlockSize {
				return 0, nil
			}
			size = shape.BlockSize
		}
		for _, m := range p.Members {
			if size == 0 {
				size = m.BlockSize
			}
		}
	}
	return size, nil
}

// answersInKind: a client of the conductor sends msgpack, reads msgpack and does
// not say so. The answer is in the encoding of the question, unless the request
// asks for JSON.
func (c *call) answersInKind() {
	if c.msgpackIn && !strings.Contains(c.r.Header.Get("Accept"), "json") {
		c.out.reset(true)
	}
}

// reader is the body in whichever encoding it came.
func (c *call) reader() (container, func() *Error) {
	if c.msgpackIn {
		c.mp.b, c.mp.i = c.body, 0
		return &c.mp, c.mp.end
	}
	c.in.b, c.in.i = c.body, 0
	return &c.in, c.in.end
}

// instanceRows groups rows by worker, in the order of the rows.
func instanceRows(rows []WorkerRow) [][]*WorkerRow {
	var out [][]*WorkerRow
	at := map[string]int{}
	for i := range rows {
		w := rows[i].Worker
		j, ok := at[w]
		if !ok {
			j = len(out)
			at[w] = j
			out = append(out, nil)
		}
		out[j] = append(out[j], &rows[i])
	}
	return out
}

// encodeScores appends the answer of /query: tokens per instance and rank. Scores
// are of the device; who holds only elsewhere is among the instances.
func encodeScores(e *encoder, rows []WorkerRow) {
	instances := instanceRows(rows)
	scored := onDevice(instances)
	e.openMap(3)
	e.key("scores").openMap(len(scored))
	for _, ranks := range scored {
		e.name(ranks[0].Worker)
		e.openMap(len(ranks))
		for _, r := range ranks {
			e.name(itoa(r.Rank))
			e.int(r.Device)
		}
		e.closeMap()
	}
	e.closeMap()
	e.key("frequencies").openArray(0)
	e.closeArray()
	e.key("instances").openMap(len(instances))
	for _, ranks := range instances {
		e.name(ranks[0].Worker)
		encodeInstance(e, ranks)
	}
	e.closeMap()
	e.closeMap()
}

// onDevice are the ranks that hold something on the device.
func onDevice(instances [][]*WorkerRow) (scored [][]*WorkerRow) {
	for _, ranks := range instances {
		var on []*WorkerRow
		for _, r := range ranks {
			if r.Device > 0 {
				on = append(on, r)
			}
		}
		if on != nil {
			scored = append(scored, on)
		}
	}
	return scored
}

// encodeInstance appends one instance's matches, those of its best rank and of
// each. As at the Dynamo indexer, cpu continues gpu and disk continues both.
func encodeInstance(e *encoder, ranks []*WorkerRow) {
	var best WorkerRow
	for _, r := range ranks {
		best.Device, best.Host, best.Disk = max(best.Device, r.Device), max(best.Host, r.Host), max(best.Disk, r.Disk)
	}
	e.openMap(6)
	e.key("longest_matched").int(best.Disk)
	encodeTiers(e, &best)
	e.key("dp").openMap(len(ranks))
	for _, r := range ranks {
		e.name(itoa(r.Rank))
		e.int(r.Device)
	}
	e.closeMap()
	e.key("rank_matches").openMap(len(ranks))
	for _, r := range ranks {
		e.name(itoa(r.Rank))
		e.openMap(3)
		encodeTiers(e, r)
		e.closeMap()
	}
	e.closeMap()
	e.closeMap()
}

func encodeTiers(e *encoder, r *WorkerRow) {
	e.key("gpu").int(r.Device)
	e.key("cpu").int(r.Host)
	e.key("disk").int(r.Disk)
}

// peers are base URLs that a joining replica may recover from.
type peers struct {
	mu      sync.Mutex
	urls    []string
	changed func([]string)
}

// maxPeers bounds the list.
const maxPeers = 256

func (p *peers) set(urls []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.urls = slices.Clone(urls)
}

func (p *peers) list() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string{}, p.urls...)
}

func (p *peers) add(u string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Contains(p.urls, u) {
		return true
	}
	if len(p.urls) >= maxPeers {
		return false
	}
	p.urls = append(p.urls, u)
	p.tell()
	return true
}

// tell passes the list on: under mu.
func (p *peers) tell() {
	if p.changed != nil {
		p.changed(slices.Clone(p.urls))
	}
}

func (p *peers) remove(u string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.urls)
	p.urls = slices.DeleteFunc(p.urls, func(o string) bool { return o == u })
	if len(p.urls) == n {
		return false
	}
	p.tell()
	return true
}

// peerURL reads the body {"url": "http://…"}.
func (c *call) peerURL() (string, *Error) {
	v, end := c.reader()
	f := newFields("url")
	var u string
	err := v.object(func(key []byte) *Error {
		return f.read(key, v, nil, func(field string) (err *Error) {
			if field != "url" {
				return errUnread
			}
			u, err = name(v)
			return err
		})
	})
	if err == nil {
		err = end()
	}
	if err == nil {
		err = f.missing()
	}
	if err != nil {
		return "", err
	}
	p, bad := url.Parse(u)
	if bad != nil || p.Host == "" || p.User != nil || (p.Scheme != "http" && p.Scheme != "https") {
		return "", badField("url", "must be a base URL such as http://host:port")
	}
	return strings.TrimSuffix(u, "/"), nil
}

// handleRegisterPeer answers POST /register_peer.
func handleRegisterPeer(c *call) *Error {
	u, err := c.peerURL()
	if err != nil {
		return err
	}
	if !c.srv.peers.add(u) {
		return failf(http.StatusConflict, ReasonWorkerConflict, "there are %d peers already", maxPeers)
	}
	return c.reply(http.StatusCreated, statusAnswer{"ok"})
}

// handleDeregisterPeer answers POST /deregister_peer.
func handleDeregisterPeer(c *call) *Error {
	u, err := c.peerURL()
	if err != nil {
		return err
	}
	if !c.srv.peers.remove(u) {
		return failf(http.StatusNotFound, ReasonUnknownWorker, "no such peer is registered")
	}
	return c.reply(http.StatusOK, statusAnswer{"ok"})
}

// handlePeers answers GET /peers.
func handlePeers(c *call) *Error { return c.reply(http.StatusOK, c.srv.peers.list()) }
