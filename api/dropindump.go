package api

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strconv"

	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
	"github.com/kvindexd/kvindexd/normalize"
)

// handleDropInDump answers GET /dump: for each partition what its instances
// hold, as the stores that would bring it about. Written as it goes; an answer
// that is no JSON to its end is not whole.
func handleDropInDump(c *call) *Error {
	done, err := c.srv.dumping()
	if err != nil {
		return err
	}
	defer done()
	c.streamed = true
	c.w.Header().Set("Content-Type", "application/json")
	d := dropInDump{
		ctx: c.r.Context(),
		w:   bufio.NewWriterSize(&patient{w: c.w, control: http.NewResponseController(c.w), patience: c.srv.WriteTimeout}, 64<<10),
	}
	if d.partitions(c.srv.Fleet.Sets()) != nil {
		panic(http.ErrAbortHandler) // the reader went away, or must see that this is not all
	}
	return nil
}

// dropInDump writes a dump.
type dropInDump struct {
	ctx context.Context
	w   *bufio.Writer
	buf []byte
	n   int // events of the partition
}

// partitionName is a key of the dump: "model:group", and the tenant before the
// group where it is not the default one.
func partitionName(k fleet.SetKey) string {
	tenant, group := partitionOf(k.Namespace)
	if tenant != defaultGroup {
		group = tenant + "/" + group
	}
	return k.Model + ":" + group
}

// partitions writes all of them; the roles of one stand together.
func (d *dropInDump) partitions(sets []*fleet.Picture) error {
	byName := map[string][]*fleet.Picture{}
	var names []string
	for _, p := range sets {
		name := partitionName(p.Key)
		if byName[name] == nil {
			names = append(names, name)
		}
		byName[name] = append(byName[name], p)
	}
	d.text("{")
	for i, name := range names {
		if i > 0 {
			d.text(",")
		}
		if err := d.partition(name, byName[name]); err != nil {
			return err
		}
	}
	d.text("}")
	return d.w.Flush()
}

func (d *dropInDump) partition(name string, sets []*fleet.Picture) error {
	size := partitionBlockSize(sets)
	d.value(name)
	d.text(`:{"block_size":` + itoa(int(size)) + `,"events":[`)
	d.n = 0
	for _, p := range sets {
		for i, m := range p.Members {
			if err := d.ctx.Err(); err != nil {
				return err
			}
			var hs []index.Holding
			m.Freeze(func(fleet.Mark) { hs = p.Index.Holdings(p.Streams[i]) })
			if err := d.stream(m, size, hs); err != nil {
				return err
			}
		}
	}
	d.text("]}")
	return nil
}

// partitionBlockSize is the block size that a partition is dumped with: what its
// members are registered with, else the smallest that they store. The format
// has room for one, and for blocks whose identity is their own tokens.
func partitionBlockSize(sets []*fleet.Picture) (size uint32) {
	for _, p := range sets {
		for _, m := range p.Members {
			if m.BlockSize != 0 {
				return m.BlockSize
			}
		}
		for _, s := range p.Index.Shapes() {
			if s.Window == normalize.Plain && (size == 0 || s.BlockSize < size) {
				size = s.BlockSize
			}
		}
	}
	return size
}

// storageTiers are the tiers in the language of the dump.
var storageTiers = [normalize.NoTier]string{"device", "host_pinned", "disk", "external"}

// stream writes one event for each row of blocks. block_hash is the rolling hash:
// engine hashes are handles of one process and mean nothing to others.
func (d *dropInDump) stream(m *fleet.Member, size uint32, hs []index.Holding) error {
	event := 0
	for _, h := range hs {
		if h.Shape.BlockSize != size || h.Shape.Window != normalize.Plain {
			continue
		}
		if d.n++; d.n > 1 {
			d.text(",")
		}
		d.text(`{"worker_id":`)
		d.value(idValue(m.Worker))
		d.text(`,"storage_tier":"` + storageTiers[h.Tier] + `","residency_domain":"worker","event":{"event_id":` + itoa(event) + `,"data":{"stored":{"parent_hash":`)
		if h.Depth == 0 {
			d.text("null")
		} else {
			d.number(uint64(h.Parent))
		}
		d.text(`,"start_position":null,"blocks":[`)
		for i := range h.Seqs {
			if i > 0 {
				d.text(",")
			}
			d.text(`{"block_hash":`)
			d.number(uint64(h.Seqs[i]))
			d.text(`,"tokens_hash":`)
			d.number(uint64(h.Locals[i]))
			d.text(`,"mm_extra_info":null}`)
		}
		d.text(`]}},"dp_rank":` + itoa(m.Rank) + `}}`)
		event++
	}
	_, err := d.w.Write(nil) // a failure of before is kept
	return err
}

func (d *dropInDump) text(s string) { _, _ = io.WriteString(d.w, s) } // bufio keeps the error

func (d *dropInDump) number(n uint64) {
	d.buf = strconv.AppendUint(d.buf[:0], n, 10)
	_, _ = d.w.Write(d.buf)
}

// value writes an instance's id or a name.
func (d *dropInDump) value(v any) {
	var e encoder
	e.reset(false)
	switch v := v.(type) {
	case uint64:
		d.number(v)
		return
	case string:
		e.str(v)
	}
	_, _ = d.w.Write(e.b)
}
