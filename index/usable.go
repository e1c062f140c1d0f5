package index

import "github.com/kvindexd/kvindexd/normalize"

// usable fills in what vLLM itself would take from its device cache for the
// prompt (KVCacheManager.get_computed_blocks of vLLM 0.33): it recomputes the
// last token, in whole blocks; drafting without lookahead hashes gives up the
// last matched block; with sliding windows the hit ends where every window
// still stands in the cache.
func (w *walk) usable(s *Stream, sp specialRow, view int, row *Row) {
	row.Usable = 0
	if s.other || sp.uneven {
		row.UsableReason = UnindexedGroup
		return
	}
	u := usable{w: w, s: s, view: view, device: row.Device, bs: sp.blockSize, top: w.q.PromptTokens}
	if u.bs == 0 {
		return // it holds nothing, of any size
	}
	u.drop = s.config.EagleDrop && row.Shape.Window == normalize.Plain
	if row.UsableReason = u.kinds(); row.UsableReason != UsableKnown {
		return
	}
	row.Usable = u.hit(max(0, min(w.q.PromptTokens-1, w.q.Views[view].limit(row.Shape))))
}

// special says whether what is usable of a match depends on more than its
// length.
func (s *Stream) special() bool { return s.other || s.config.EagleDrop || s.hybrid() || s.uneven() }

// limit is the end of the part identified in blocks of a shape; 0 for a shape
// that was not asked.
func (v *QueryView) limit(s normalize.Shape) int {
	for i := range v.Chains {
		if v.Chains[i].Shape == s {
			return v.Limits[i]
		}
	}
	return 0
}

// blockSize of the stream's full-attention groups: the largest that they stored
// blocks of, or the configured one. Where the hashes are finer than a group's
// blocks, vLLM also announces the end of a prompt that ends inside a block, as a
// block of the hashes' size. Such an entry is resident, and no lookup takes it.
func (s *Stream) blockSize() int {
	bs := s.config.BlockSize
	for i := range s.groups {
		if g := &s.groups[i]; g.spec == normalize.SpecFull {
			for _, shape := range g.shapes {
				bs = max(bs, shape.BlockSize)
			}
		}
	}
	return int(bs)
}

// usable is one stream's computation; sizes in tokens.
type usable struct {
	w      *walk
	s      *Stream
	view   int
	device int
	bs     int // of the full-attention groups
	top    int // the prompt's length
	align  int // a hit is a multiple of it
	drop   bool
	kind   [maxWindowKinds]windowKind
	n      int
}

// A windowKind is the sliding-window groups of one shape and window: they count
// together.
type windowKind struct {
	shape  normalize.Shape
	window int
	groups uint64 // by place in Stream.groups
}

const maxWindowKinds = 8

// kinds collects the window kinds and the alignment.
func (u *usable) kinds() UsableReason {
	u.align = u.bs
	for i := range u.s.groups {
		g := &u.s.groups[i]
		if g.spec != normalize.SpecWindow || len(g.shapes) == 0 {
			continue
		}
		if len(g.unplaced) > 0 {
			return UnplacedWindow
		}
		if g.window == 0 || len(g.shapes) > 1 || !u.addKind(i, g) {
			return UnindexedGroup
		}
		u.align = lcm(u.align, int(g.shapes[0].BlockSize))
	}
	return UsableKnown
}

func (u *usable) addKind(i int, g *group) bool {
	for k := range u.kind[:u.n] {
		if kind := &u.kind[k]; kind.shape == g.shapes[0] && kind.window == int(g.window) {
			kind.groups |= 1 << i
			return true
		}
	}
	if u.n == maxWindowKinds {
		return false
	}
	u.kind[u.n] = windowKind{shape: g.shapes[0], window: int(g.window), groups: 1 << i}
	u.n++
	return true
}

// hit is the length that all groups agree on, at most most.
func (u *usable) hit(most int) int {
	if u.n == 0 {
		return u.full(most, u.drop)
	}
	hit, full := most, -1
	var verified uint64 // the kinds that have looked past the candidate already
	for {
		cur := hit
		if full < 0 {
			look := cur
			if u.drop {
				look = min(cur+u.bs, u.whole())
			}
			full = u.full(look, u.drop)
			cur = full
		} else {
			cur = min(cur, full)
		}
		for k := range u.kind[:u.n] {
			kind := &u.kind[k]
			drops := u.drop && verified>>k&1 == 0
			look := cur
			if drops {
				look = min(cur+int(kind.shape.BlockSize), u.whole())
			}
			now := u.window(kind, look, drops)
			if drops {
				verified |= 1 << k
			} else if now < cur {
				verified = 0
			}
			cur = now
		}
		if cur >= hit {
			return hit
		}
		hit = cur
		if u.n == 1 {
			return hit
		}
	}
}

func (u *usable) whole() int { return u.top / u.bs * u.bs }

// full is the full-attention groups' part.
func (u *usable) full(most int, drop bool) int {
	n := min(u.device/u.bs, most/u.bs) * u.bs
	if drop && n > 0 {
		n -= min(u.align, u.bs)
	}
	return n - n%u.align
}

// window is one kind's part: going down from most, the first place where enough
// blocks in a row are held by all of its groups.
func (u *usable) window(kind *windowKind, most int, drop bool) int {
	bs := int(kind.shape.BlockSize)
	need := (kind.window - 1 + bs - 1) / bs
	if drop {
		need++
	}
	held := u.holder(kind)
	run, n := 0, -1
	for i := most/bs - 1; i >= 0; i-- {
		if !held(i) {
			run = 0
			continue
		}
		end := i + 1
		if drop {
			end = i
		}
		if run == 0 && bs != u.align && end*bs%u.align != 0 {
			continue
		}
		if run++; run >= need {
			n = i + run
			break
		}
	}
	if n < 0 {
		n = alignDown(run, bs, u.align)
	}
	if drop && n > 0 {
		n = alignDown(n-1, bs, u.align)
	}
	return n * bs
}

// alignDown returns the most blocks, at most n, whose tokens are a multiple of
// align.
func alignDown(n, bs, align int) int {
	for n*bs%align != 0 {
		n--
	}
	return n
}

// holder returns whether all groups of a kind hold block i of the query on the
// device.
func (u *usable) holder(kind *windowKind) func(i int) bool {
	m := u.s.memberOf(kind.shape)
	steps := u.w.stepsOf(kind.shape, u.view)
	if m == nil || len(steps) == 0 {
		return func(int) bool { return false }
	}
	var planes uint64
	for i := range u.s.groups {
		if kind.groups>>i&1 == 0 {
			continue
		}
		p, ok := m.findPlane(normalize.Device, u.s.groups[i].index, false)
		if !ok {
			return func(int) bool { return false }
		}
		planes |= 1 << p
	}
	at := len(steps) - 1
	var mask uint64
	loaded := -1
	return func(i int) bool { // i only goes down
		for at >= 0 && int(steps[at].base) > i {
			at--
		}
		if at < 0 || i >= int(steps[at].base+steps[at].m) {
			return false
		}
		if loaded != at {
			loaded, mask = at, 0
			if e := m.t.entry(m, m.t.run(steps[at].run)); e != nil {
				mask = m.allPlanes(e, planes)
			}
		}
		return mask>>(i-int(steps[at].base))&1 != 0
	}
}

// stepsOf returns the path of a view in the tree of a shape.
func (w *walk) stepsOf(shape normalize.Shape, view int) []step {
	for i := range w.paths {
		if p := &w.paths[i]; p.view == view && p.t.shape == shape {
			return w.steps[p.from:p.to]
		}
	}
	return nil
}

func lcm(a, b int) int {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}
