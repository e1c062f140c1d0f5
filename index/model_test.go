package index

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvindexd/kvindexd/normalize"
	"github.com/kvindexd/kvindexd/zmqwire"
)

// model is what the index must equal: a map per stream, no hashes, no sharing,
// nothing forgotten. It reads the same events, before they are normalised.
type model struct {
	cfg    StreamConfig
	nodes  map[modelKey]*modelNode
	newest map[modelChain]zmqwire.EngineHash // the handle that decides for a content
	groups map[int32]*modelGroup
	full   map[modelTree]map[int32]bool // the full groups that have stored there
	clock  int
	roots  map[zmqwire.EngineHash]bool // first hashes of root stores of the batch under way
}

type modelKey struct {
	shape  normalize.Shape
	engine zmqwire.EngineHash
}

type modelChain struct {
	shape normalize.Shape
	chain string
}

type modelTree struct {
	shape normalize.Shape
	tier  normalize.Tier
}

type modelPlane struct {
	tier  normalize.Tier
	group int32
}

type modelNode struct {
	parent  zmqwire.EngineHash
	waits   bool   // its parent has no place yet
	content string // of the block alone
	chain   string // of everything up to it, "" while it waits
	salt    string
	stored  int // when last
	copies  map[modelPlane]int
}

type modelGroup struct {
	window bool
	shape  normalize.Shape
}

func newModel(c StreamConfig) *model {
	m := &model{cfg: c}
	m.restart()
	return m
}

func (m *model) restart() {
	m.clear()
	m.groups = map[int32]*modelGroup{}
}

func (m *model) clear() {
	m.nodes = map[modelKey]*modelNode{}
	m.newest = map[modelChain]zmqwire.EngineHash{}
	m.full = map[modelTree]map[int32]bool{}
	for _, g := range m.groups {
		g.shape = normalize.Shape{}
	}
}

func (m *model) apply(events []zmqwire.Event) {
	m.roots = map[zmqwire.EngineHash]bool{}
	for i := range events {
		switch ev := &events[i]; ev.Kind {
		case zmqwire.BlockStored:
			m.store(ev)
		case zmqwire.BlockRemoved:
			m.remove(ev)
		case zmqwire.AllBlocksCleared:
			m.clear()
		}
	}
}

func modelTier(medium []byte) normalize.Tier {
	switch string(medium) {
	case "CPU":
		return normalize.Host
	case "DISK":
		return normalize.Disk
	}
	return normalize.Device
}

func (n *modelNode) resident() bool {
	for _, c := range n.copies {
		if c > 0 {
			return true
		}
	}
	return false
}

func (m *model) store(ev *zmqwire.Event) {
	index := max(ev.Group, 0)
	g := m.groups[index]
	if g == nil {
		g = &modelGroup{window: string(ev.Spec) == "sliding_window"}
		m.groups[index] = g
	}
	tier := modelTier(ev.Medium)
	p := modelPlane{tier, index}
	if ev.BlockSize == 0 {
		for _, e := range ev.Hashes {
			if n, shape := m.locate(g, e); n != nil && n.content != "" {
				m.uses(g, shape, p)
				m.addCopy(n, e, p, false)
				m.become(shape, e)
			}
		}
		return
	}
	shape := normalize.Shape{BlockSize: ev.BlockSize, Window: normalize.Window(ev.Lookahead)}
	if len(ev.Tokens) != len(ev.Hashes)*int(ev.BlockSize) {
		if g.window {
			g.shape = shape
			for _, e := range ev.Hashes {
				m.node(shape, e, nil).copies[p]++
				m.become(shape, e)
			}
		}
		return
	}
	g.shape = shape
	m.uses(g, shape, p)
	m.storeChain(ev, g, shape, p)
}

// uses notes that a full group stands on a tier of a tree from now on. For the
// device it counts in any case.
func (m *model) uses(g *modelGroup, shape normalize.Shape, p modelPlane) {
	if g.window {
		return
	}
	for _, tier := range []normalize.Tier{normalize.Device, p.tier} {
		at := modelTree{shape, tier}
		if m.full[at] == nil {
			m.full[at] = map[int32]bool{}
		}
		m.full[at][p.group] = true
	}
}

// node returns the stream's record of a handle, made from first where it is new.
func (m *model) node(shape normalize.Shape, e zmqwire.EngineHash, first *modelNode) *modelNode {
	k := modelKey{shape, e}
	n := m.nodes[k]
	if n == nil {
		if n = first; n == nil {
			n = &modelNode{waits: true}
		}
		if n.copies == nil {
			n.copies = map[modelPlane]int{}
		}
		m.nodes[k] = n
	}
	return n
}

func (m *model) storeChain(ev *zmqwire.Event, g *modelGroup, shape normalize.Shape, p modelPlane) {
	bs := int(ev.BlockSize)
	report := !ev.HasParent && m.isReport(ev, g, shape, p)
	cur := ev.Parent
	has := ev.HasParent
	var at *modelNode // the node of cur, while it has a place
	if has {
		at = m.nodes[modelKey{shape, cur}]
	}
	placed := !has || at != nil && at.chain != ""
	salt := string(ev.CacheSalt) // of all the event's blocks, wherever its first one stands
	if at != nil {
		salt = at.salt
	}
	for i, e := range ev.Hashes {
		content := fmt.Sprint(ev.Tokens[i*bs:(i+1)*bs], string(ev.LoraName))
		n := m.nodes[modelKey{shape, e}]
		unknown := n == nil || n.content == "" // heard of by handle alone
		fresh := &modelNode{content: content, parent: cur, waits: true}
		if placed {
			m.placeUnder(fresh, at, has, salt)
		} else if at := m.nodes[modelKey{shape, cur}]; at != nil && at.chain != "" {
			m.placeUnder(fresh, at, true, at.salt)
		}
		switch {
		case unknown && n != nil:
			fresh.copies = n.copies
			*n = *fresh
		case unknown:
			n = m.node(shape, e, fresh)
		case n.chain == "": // an orphan keeps waiting for the parent it named
			placed = false
		case placed && n.chain != fresh.chain && !n.resident():
			if m.above(shape, fresh, n) || m.hasRival(shape, n, e) {
				return
			}
			fresh.copies = n.copies
			*n = *fresh
		}
		if !placed && n.chain != "" { // a known block, named under a parent nobody knows
			m.addCopy(n, e, p, false)
		} else if n.chain == "" {
			n.copies[p]++
		} else {
			m.addCopy(n, e, p, report)
		}
		m.become(shape, e)
		if n.chain != "" {
			m.link(shape, e)
		}
		if placed {
			at, has = n, true
		}
		cur = e
	}
}

// placeUnder gives a node its place below at, or at the root.
func (m *model) placeUnder(n, at *modelNode, has bool, salt string) {
	n.salt = salt
	n.chain = salt + "|" + n.content
	if has {
		n.chain = at.chain + "/" + n.chain
	}
	n.waits = false
}

// link places what waits for e.
func (m *model) link(shape normalize.Shape, e zmqwire.EngineHash) {
	at := m.nodes[modelKey{shape, e}]
	var waiting []modelKey
	for k, n := range m.nodes {
		if k.shape == shape && n.waits && n.content != "" && n.parent == e {
			waiting = append(waiting, k)
		}
	}
	slices.SortFunc(waiting, func(a, b modelKey) int { return m.nodes[a].stored - m.nodes[b].stored })
	for _, k := range waiting {
		m.placeUnder(m.nodes[k], at, true, at.salt)
		m.newest[modelChain{shape, m.nodes[k].chain}] = k.engine
		m.link(shape, k.engine)
	}
}

func (m *model) become(shape normalize.Shape, e zmqwire.EngineHash) {
	n := m.nodes[modelKey{shape, e}]
	m.clock++
	n.stored = m.clock
	if n.chain != "" {
		m.newest[modelChain{shape, n.chain}] = e
	}
}

func (m *model) addCopy(n *modelNode, e zmqwire.EngineHash, p modelPlane, report bool) {
	if report && n.copies[p] >= 2 {
		return
	}
	n.copies[p]++
}

// above says whether old stands in the chain of now.
func (m *model) above(shape normalize.Shape, now, old *modelNode) bool {
	return old.chain != "" && strings.HasPrefix(now.chain+"/", old.chain+"/") && now.chain != old.chain
}

func (m *model) hasRival(shape normalize.Shape, n *modelNode, e zmqwire.EngineHash) bool {
	for k, o := range m.nodes {
		if k.shape == shape && k.engine != e && o.chain == n.chain {
			return true
		}
	}
	return false
}

func (m *model) isReport(ev *zmqwire.Event, g *modelGroup, shape normalize.Shape, p modelPlane) bool {
	if len(ev.Hashes) == 0 || p.tier != normalize.Device || g.window || m.cfg.EagleDrop {
		return false
	}
	for _, o := range m.groups {
		if o.window {
			return false
		}
	}
	if m.roots[ev.Hashes[0]] {
		return false
	}
	m.roots[ev.Hashes[0]] = true
	for _, e := range ev.Hashes {
		n := m.nodes[modelKey{shape, e}]
		if n == nil || n.chain == "" || !m.decides(shape, n, e) || n.copies[p] == 0 {
			return false
		}
	}
	return true
}

func (m *model) decides(shape normalize.Shape, n *modelNode, e zmqwire.EngineHash) bool {
	return m.newest[modelChain{shape, n.chain}] == e
}

func (m *model) locate(g *modelGroup, e zmqwire.EngineHash) (*modelNode, normalize.Shape) {
	if g.window {
		return m.nodes[modelKey{g.shape, e}], g.shape
	}
	for _, shape := range m.shapes() {
		if n := m.nodes[modelKey{shape, e}]; n != nil {
			return n, shape
		}
	}
	return nil, normalize.Shape{}
}

func (m *model) remove(ev *zmqwire.Event) {
	for index, g := range m.groups {
		if ev.Group >= 0 && ev.Group != index {
			continue
		}
		for i, e := range ev.Hashes {
			p := modelPlane{modelTier(ev.Medium), index}
			n, _ := m.locate(g, e)
			if n == nil || n.copies[p] == 0 {
				continue
			}
			n.copies[p]--
			if ev.Remaining != nil {
				n.copies[p] = int(ev.Remaining[i])
			}
		}
	}
}

// holds says whether the content stands on a tier, in all full groups.
func (m *model) holds(shape normalize.Shape, chain string, tier normalize.Tier) bool {
	n := m.current(shape, chain)
	if n == nil {
		return false
	}
	groups := m.full[modelTree{shape, tier}]
	for index := range groups {
		if n.copies[modelPlane{tier, index}] == 0 {
			return false
		}
	}
	return len(groups) > 0
}

func (m *model) current(shape normalize.Shape, chain string) *modelNode {
	e, ok := m.newest[modelChain{shape, chain}]
	if !ok {
		return nil
	}
	if n := m.nodes[modelKey{shape, e}]; n.chain == chain {
		return n
	}
	return nil // the handle stands for something else by now
}

// chains are the contents of a prompt's prefixes, shortest first.
func chains(shape normalize.Shape, tokens []uint32, lora, salt string) []string {
	var out []string
	bs := int(shape.BlockSize)
	for a := 0; a+bs+shape.Window.Tokens() <= len(tokens); a += bs {
		content := fmt.Sprint(tokens[a:a+bs], lora)
		if a == 0 {
			out = append(out, salt+"|"+content)
		} else {
			out = append(out, out[len(out)-1]+"/"+salt+"|"+content)
		}
	}
	return out
}

// match is the stream's right answer.
func (m *model) match(tokens []uint32, lora, salt string) Row {
	var best Row
	for _, shape := range m.shapes() {
		bs := int(shape.BlockSize)
		cs := chains(shape, tokens, lora, salt)
		run := func(n int, tiers ...normalize.Tier) int {
			for n < len(cs) && slices.ContainsFunc(tiers, func(t normalize.Tier) bool { return m.holds(shape, cs[n], t) }) {
				n++
			}
			return n
		}
		device := run(0, normalize.Device)
		host := run(device, normalize.Device, normalize.Host)
		disk := run(host, normalize.Disk, normalize.External)
		row := Row{Shape: shape, Device: device * bs, Host: host * bs, Disk: disk * bs}
		if slices.Compare([]int{row.Device, row.Host, row.Disk}, []int{best.Device, best.Host, best.Disk}) > 0 {
			best = row
		}
	}
	return best
}

func (m *model) shapes() []normalize.Shape {
	var out []normalize.Shape
	for _, g := range m.groups {
		if !g.window && g.shape.BlockSize != 0 && !slices.Contains(out, g.shape) {
			out = append(out, g.shape)
		}
	}
	return out
}

// placed says whether the parent of a store has a place.
func (m *model) placed(ev *zmqwire.Event) bool {
	n := m.nodes[modelKey{normalize.Shape{BlockSize: ev.BlockSize}, ev.Parent}]
	return n != nil && n.chain != ""
}

// most is the longest run of blocks of which the stream has a copy anywhere,
// under any handle.
func (m *model) most(tokens []uint32, lora, salt string) int {
	best := 0
	for _, shape := range m.shapes() {
		n := 0
		for _, chain := range chains(shape, tokens, lora, salt) {
			if !m.anywhere(shape, chain) {
				break
			}
			n += int(shape.BlockSize)
		}
		best = max(best, n)
	}
	return best
}

func (m *model) anywhere(shape normalize.Shape, chain string) bool {
	for k, n := range m.nodes {
		if k.shape == shape && n.chain == chain && n.resident() {
			return true
		}
	}
	return false
}
