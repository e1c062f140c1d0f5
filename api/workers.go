package api

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// reply is an answer of the rarer routes: plain structs with json tags, in the
// encoding that was asked for.
func (c *call) reply(status int, v any) *Error {
	c.status = status
	var b bytes.Buffer
	var err error
	if c.out.msgpack {
		e := msgpack.NewEncoder(&b)
		e.SetCustomStructTag("json")
		e.UseCompactInts(true)
		err = e.Encode(v)
	} else {
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		err = e.Encode(v)
	}
	if err != nil {
		return failf(http.StatusInternalServerError, ReasonInternal, "the answer could not be encoded: %v", err)
	}
	text := b.Bytes()
	if !c.out.msgpack {
		text = bytes.TrimSuffix(text, []byte("\n"))
	}
	c.out.b = append(c.out.b[:0], text...)
	return nil
}

// workerAnswer is one worker for one model.
type workerAnswer struct {
	ID           string           `json:"id"`
	Model        string           `json:"model"`
	Namespace    string           `json:"namespace"`
	Role         string           `json:"role"`
	State        string           `json:"state"`
	Source       string           `json:"source"`
	Where        string           `json:"where"`
	Generation   uint64           `json:"generation"`
	Since        string           `json:"since"`
	Admitted     bool             `json:"admitted"`
	Differs      []string         `json:"rejected,omitempty"`
	BlockSize    uint32           `json:"block_size,omitempty"`
	ImageTokenID *uint32          `json:"image_token_id"`
	ImageFrom    string           `json:"image_token_id_from,omitempty"`
	VideoTokenID *uint32          `json:"video_token_id"`
	VideoFrom    string           `json:"video_token_id_from,omitempty"`
	ExactMM      bool             `json:"exact_mm"`
	MMReason     normalize.Reason `json:"exact_mm_reason,omitempty"`
	MMClaim      string           `json:"exact_mm_claim,omitempty"`
	Adapters     []string         `json:"adapters"`
	Ranks        []rankAnswer     `json:"ranks"`
	Spec         fleet.WorkerSpec `json:"spec"`
	// Others are the same worker's other models.
	Others []workerAnswer `json:"others,omitempty"`
}

// rankAnswer is one stream.
type rankAnswer struct {
	Rank           int            `json:"dp_rank"`
	Undeclared     bool           `json:"undeclared,omitempty"`
	Endpoint       string         `json:"endpoint"`
	ReplayEndpoint string         `json:"replay_endpoint,omitempty"`
	State          string         `json:"state"`
	Connected      bool           `json:"connected"`
	Seq            *uint64        `json:"seq"`
	AgeMS          *int64         `json:"age_ms"`
	Lost           uint64         `json:"lost"`
	LastError      string         `json:"last_error,omitempty"`
	Resident       residentAnswer `json:"resident"`
	Orphans        int64          `json:"orphans"`
	Trimmed        int64          `json:"trimmed"`
	Conflicts      int64          `json:"conflicts"`
	Counts         countsAnswer   `json:"counts"`
}

// residentAnswer is in blocks.
type residentAnswer struct {
	Device   int64 `json:"device"`
	Host     int64 `json:"host"`
	Disk     int64 `json:"disk"`
	External int64 `json:"external"`
}

// countsAnswer is since the worker's life began.
type countsAnswer struct {
	Messages       uint64 `json:"messages"`
	Applied        uint64 `json:"applied"`
	Duplicates     uint64 `json:"duplicates"`
	Malformed      uint64 `json:"malformed"`
	Gaps           uint64 `json:"gaps"`
	Lost           uint64 `json:"lost"`
	Burnt          uint64 `json:"burnt"`
	Replays        uint64 `json:"replays"`
	ReplayFailures uint64 `json:"replay_failures"`
	Replayed       uint64 `json:"replayed"`
	Restarts       uint64 `json:"restarts"`
	Reconnects     uint64 `json:"reconnects"`
}

type workersAnswer struct {
	Workers []workerAnswer `json:"workers"`
}

func asWorker(v fleet.WorkerView) workerAnswer {
	w := workerAnswer{
		ID: v.Spec.ID, Model: v.Spec.Model, Namespace: v.Spec.Namespace, Role: v.Spec.Role,
		State: workerState(&v), Source: v.Source, Where: v.Where, Generation: v.Generation,
		Since: v.Since.UTC().Format(time.RFC3339), Admitted: v.Admitted, Differs: v.Differs,
		BlockSize: v.Spec.BlockSize, ImageTokenID: v.ImageTokenID, ImageFrom: v.ImageTokenIDFrom,
		VideoTokenID: v.VideoTokenID, VideoFrom: v.VideoTokenIDFrom,
		ExactMM: v.ExactMM, MMReason: v.MMReason, MMClaim: v.MMClaim,
		Adapters: []string{}, Ranks: []rankAnswer{}, Spec: v.Spec,
	}
	for _, l := range v.Spec.Loras {
		w.Adapters = append(w.Adapters, l.Name)
	}
	for i := range v.Streams {
		w.Ranks = append(w.Ranks, asRank(&v.Streams[i]))
	}
	return w
}

// workerState is the state of the stream that is to be trusted least.
func workerState(v *fleet.WorkerView) string {
	if !v.Admitted {
		return "rejected"
	}
	if len(v.Streams) == 0 {
		return fleet.Connecting.String()
	}
	trust := []fleet.State{fleet.Live, fleet.Partial, fleet.Replaying, fleet.Restored, fleet.Suspect, fleet.Connecting, fleet.Disconnected}
	worst := 0
	for _, s := range v.Streams {
		worst = max(worst, slices.Index(trust, s.Status.State))
	}
	return trust[worst].String()
}

func asRank(s *fleet.StreamView) rankAnswer {
	st, x, n := s.Status, s.Stats, s.Counts
	r := rankAnswer{
		Rank: s.Rank, Undeclared: s.Undeclared, Endpoint: s.Endpoint, ReplayEndpoint: s.ReplayEndpoint,
		State: st.State.String(), Connected: st.Connected, Lost: st.Lost, LastError: st.LastError,
		Resident: asResident(&x), Orphans: x.Orphans, Trimmed: x.Trimmed, Conflicts: x.Conflicts + x.ContentConflicts,
		Counts: countsAnswer(n),
	}
	if st.HasSeq {
		r.Seq = &st.Seq
	}
	if ms := st.Age.Milliseconds(); st.Age >= 0 {
		r.AgeMS = &ms
	}
	return r
}

func asResident(x *index.StreamStats) residentAnswer {
	return residentAnswer{
		Device: x.Resident[normalize.Device], Host: x.Resident[normalize.Host],
		Disk: x.Resident[normalize.Disk], External: x.Resident[normalize.External],
	}
}

// handleWorkers answers GET /v1/workers.
func handleWorkers(c *call) *Error {
	a := workersAnswer{Workers: []workerAnswer{}}
	for _, v := range c.srv.Fleet.Workers() {
		a.Workers = append(a.Workers, asWorker(v))
	}
	return c.reply(http.StatusOK, a)
}

// handleWorker answers GET /v1/workers/{id}.
func handleWorker(c *call) *Error { return c.replyWorker(http.StatusOK, c.r.PathValue("id")) }

func (c *call) replyWorker(status int, id string) *Error {
	vs, err := c.srv.Fleet.Worker(id)
	if err != nil {
		return fleetError(err)
	}
	a := asWorker(vs[0])
	for _, v := range vs[1:] {
		a.Others = append(a.Others, asWorker(v))
	}
	return c.reply(status, a)
}

// handlePutWorker answers PUT /v1/workers/{id}: 201 for a new worker, 200 for
// one that was there; the same body again changes nothing.
func handlePutWorker(c *call) *Error {
	id := c.r.PathValue("id")
	spec, err := c.workerSpec()
	if err != nil {
		return err
	}
	if spec.ID != "" && spec.ID != id {
		e := failf(http.StatusBadRequest, ReasonConflictingFields, "the body's id is not the path's")
		e.Param = "id"
		return e
	}
	spec.ID = id
	status := http.StatusOK
	if len(c.srv.Fleet.Registered(id)) == 0 {
		status = http.StatusCreated
	}
	if err := c.srv.Fleet.Put(spec); err != nil {
		return fleetError(err)
	}
	return c.replyWorker(status, id)
}

// specFields are the names that a worker's body may have.
var specFields = func() []string {
	var names []string
	for f := range reflect.TypeFor[fleet.WorkerSpec]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}()

// workerSpec reads the body as a worker. Grammar, duplicates and isolation
// fields are checked as everywhere; what is left is encoding/json's.
func (c *call) workerSpec() (fleet.WorkerSpec, *Error) {
	var spec fleet.WorkerSpec
	raw := c.body
	if c.msgpackIn {
		c.mp.b, c.mp.i, c.mp.json = c.body, 0, c.mp.json[:0]
		if err := c.mp.transcribe(1); err != nil {
			return spec, err
		}
		if err := c.mp.end(); err != nil {
			return spec, err
		}
		raw = c.mp.json
	}
	s := scanner{b: raw}
	f := newFields()
	err := s.object(func(key []byte) *Error {
		return f.read(key, &s, specFields, func(string) *Error { return errUnread })
	})
	if err == nil {
		err = s.end()
	}
	if err != nil {
		return spec, err
	}
	if err := json.Unmarshal(raw, &spec); err != nil {
		var t *json.UnmarshalTypeError
		if errors.As(err, &t) {
			return spec, badField(t.Field, "must be of type %s, not %s", t.Type, t.Value)
		}
		return spec, failf(http.StatusBadRequest, ReasonMalformedBody, "the body is no worker: %v", err)
	}
	return spec, nil
}

// fleetError says what a change of the fleet, or a name of it, failed by.
func fleetError(err error) *Error {
	switch {
	case errors.Is(err, fleet.ErrUnknownWorker):
		return failf(http.StatusNotFound, ReasonUnknownWorker, "%v (GET /v1/workers lists them)", err)
	case errors.Is(err, fleet.ErrCapture):
		return failf(http.StatusConflict, ReasonServesCapture, "%v: nothing can be changed", err)
	case errors.Is(err, fleet.ErrDenied):
		return failf(http.StatusForbidden, ReasonEndpointForbidden, "%v; the daemon's --allow-endpoint decides", err)
	case errors.Is(err, fleet.ErrConflict):
		return failf(http.StatusConflict, ReasonWorkerConflict, "%v", err)
	case errors.Is(err, fleet.ErrInvalid):
		return failf(http.StatusBadRequest, ReasonInvalidWorker, "%v", err)
	}
	return failf(http.StatusInternalServerError, ReasonInternal, "the fleet could not be changed: %v", err)
}

type statusAnswer struct {
	Status string `json:"status"`
}

// handleDeleteWorker answers DELETE /v1/workers/{id}.
func handleDeleteWorker(c *call) *Error {
	if err := c.srv.Fleet.Delete(c.r.PathValue("id")); err != nil {
		return fleetError(err)
	}
	return c.reply(http.StatusOK, statusAnswer{"ok"})
}

// handleResetWorker answers POST /v1/workers/{id}/reset.
func handleResetWorker(c *call) *Error {
	if err := c.srv.Fleet.Reset(c.r.PathValue("id")); err != nil {
		return fleetError(err)
	}
	return c.reply(http.StatusOK, statusAnswer{"ok"})
}

// modelAnswer is one worker set.
type modelAnswer struct {
	Model        string           `json:"model"`
	Namespace    string           `json:"namespace"`
	Role         string           `json:"role"`
	Aliases      []string         `json:"aliases"`
	Adapters     []string         `json:"adapters"`
	BlockSizes   []uint32         `json:"block_sizes"`
	Shapes       []shapeAnswer    `json:"shapes"`
	ImageTokenID *uint32          `json:"image_token_id"`
	VideoTokenID *uint32          `json:"video_token_id"`
	TowerLora    bool             `json:"tower_connector_lora"`
	ExactMM      bool             `json:"exact_mm"`
	Members      int              `json:"members"`
	Workers      []string         `json:"workers"`
	Rejected     []rejectedAnswer `json:"rejected"`
	Blocks       int64            `json:"blocks"`
	Memberships  int64            `json:"memberships"`
	Nodes        int64            `json:"nodes"`
	Bytes        int64            `json:"bytes"`
	Trimmed      int64            `json:"trimmed"`
}

type shapeAnswer struct {
	BlockSize uint32 `json:"block_size"`
	Window    string `json:"window"`
}

type rejectedAnswer struct {
	Worker string   `json:"worker"`
	Differ []string `json:"differs"`
	Since  string   `json:"since"`
}

type modelsAnswer struct {
	Models []modelAnswer `json:"models"`
}

// handleModels answers GET /v1/models.
func handleModels(c *call) *Error {
	a := modelsAnswer{Models: []modelAnswer{}}
	for _, p := range c.srv.Fleet.Sets() {
		a.Models = append(a.Models, asModel(p))
	}
	return c.reply(http.StatusOK, a)
}

func asModel(p *fleet.Picture) modelAnswer {
	x := p.Index.Stats()
	m := modelAnswer{
		Model: p.Key.Model, Namespace: p.Key.Namespace, Role: p.Key.Role,
		Aliases: append([]string{}, p.Aliases...), Adapters: []string{}, BlockSizes: []uint32{}, Shapes: []shapeAnswer{},
		ImageTokenID: p.Config.ImageTokenID, VideoTokenID: p.Config.VideoTokenID,
		TowerLora: p.Config.TowerConnectorLora != nil && *p.Config.TowerConnectorLora,
		Members:   len(p.Members), Workers: []string{}, Rejected: []rejectedAnswer{},
		Blocks: x.Blocks, Memberships: x.Memberships, Nodes: x.Runs, Bytes: x.Bytes, Trimmed: x.Trimmed,
	}
	m.Adapters = append(m.Adapters, slices.Compact(slices.Sorted(maps.Values(p.Adapters)))...)
	for _, s := range p.Index.Shapes() {
		m.Shapes = append(m.Shapes, shapeAnswer{s.BlockSize, windowName(s.Window)})
		m.BlockSizes = append(m.BlockSizes, s.BlockSize)
	}
	slices.Sort(m.BlockSizes)
	m.BlockSizes = slices.Compact(m.BlockSizes)
	slices.SortFunc(m.Shapes, func(a, b shapeAnswer) int {
		return cmp.Or(cmp.Compare(a.BlockSize, b.BlockSize), strings.Compare(a.Window, b.Window))
	})
	for _, w := range p.Members {
		m.ExactMM = m.ExactMM || w.ExactMM
		m.Workers = append(m.Workers, w.Worker)
	}
	m.Workers = slices.Compact(m.Workers)
	for _, r := range p.Rejected {
		m.Rejected = append(m.Rejected, rejectedAnswer{r.Worker, r.Fields, r.Since.UTC().Format(time.RFC3339)})
	}
	return m
}

// knowsWorker says whether an admitted worker has this id.
func (s *Service) knowsWorker(id string) bool {
	for _, p := range s.fleet.Sets() {
		_, ok := slices.BinarySearchFunc(p.Members, id, func(m *fleet.Member, id string) int { return strings.Compare(m.Worker, id) })
		if ok {
			return true
		}
	}
	return false
}
