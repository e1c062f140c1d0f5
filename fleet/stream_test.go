package fleet

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/xxh3"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the expected output of testdata/stream")

// TestStream runs the histories of testdata/stream: a line is a command, the
// lines that begin with a tab are what the stream did, asked for and is.
//
//	config replay|no-replay [clear]      before anything else
//	restore SEQ CONTENT STATE            from a snapshot
//	connect, cut                         the transport
//	live SEQ CONTENT                     a message
//	reply SEQ CONTENT [SKIPPED]          an answer to the replay that was asked for
//	done, fail                           its end
//	wait DURATION                        time passes, until a replay is asked for
//	fail-for DURATION                    time passes, and every replay fails
//	reset                                by hand
//
// The contents CLEAR, JUNK, TORN and CONFLICT stand for a batch with an
// AllBlocksCleared, an unreadable one, one with a removal that cannot be read,
// and the last of many conflicts.
func TestStream(t *testing.T) {
	files, err := filepath.Glob("testdata/stream/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no histories", err)
	}
	reached := map[State]bool{}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) { runHistory(t, file, reached) })
	}
	for s := range numStates {
		if !reached[s] {
			t.Errorf("no history reaches %s", s)
		}
	}
}

func runHistory(t *testing.T, file string, reached map[State]bool) {
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	d := new(driver)
	d.begin(streamConfig{replay: true})
	sc := bufio.NewScanner(bytes.NewReader(want))
	for sc.Scan() {
		line := sc.Text()
		if strings.HasPrefix(line, "\t") {
			continue
		}
		fmt.Fprintln(&got, line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := d.command(strings.Fields(line)); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		d.report(&got)
		reached[d.s.shown] = true
	}
	if *rewrite {
		if err := os.WriteFile(file, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// driver runs one stream on a clock of its own and writes down what it does.
type driver struct {
	s     *stream
	now   time.Time
	did   []string
	asked replayRequest
}

func (d *driver) begin(cfg streamConfig) {
	d.now = time.Unix(1_700_000_000, 0)
	cfg.restarted = func(why string) { d.did = append(d.did, "restart: "+why) }
	cfg.changed = func(from, to State, why string) {
		d.did = append(d.did, fmt.Sprintf("%s -> %s: %s", from, to, why))
	}
	d.s = newStream(cfg, d, new(counters), d.now)
}

func (d *driver) apply(_ time.Time, payload []byte) outcome {
	d.did = append(d.did, "apply "+string(payload))
	return outcome{
		unreadable:   string(payload) == "JUNK",
		cleared:      strings.Contains(string(payload), "CLEAR"),
		conflicted:   string(payload) == "CONFLICT",
		lostRemovals: strings.Count(string(payload), "TORN"),
	}
}

func (d *driver) clear() { d.did = append(d.did, "clear") }

func (d *driver) command(f []string) error {
	var seq uint64
	if len(f) > 2 {
		seq, _ = strconv.ParseUint(f[1], 10, 64)
	}
	switch f[0] {
	case "config":
		d.begin(streamConfig{replay: f[1] == "replay", onGapClear: len(f) > 2})
	case "restore":
		for s, name := range stateNames {
			if name == f[3] {
				d.s.restore(d.now, Mark{Seq: seq, HasSeq: true, Digest: xxh3.HashString(f[2]), State: State(s)})
			}
		}
	case "connect":
		d.s.connected(d.now)
	case "cut":
		d.s.disconnected(d.now, errors.New("connection reset"))
	case "live":
		d.s.live(d.now, seq, []byte(f[2]))
	case "reply":
		var skipped uint64
		if len(f) > 3 {
			skipped, _ = strconv.ParseUint(f[3], 10, 64)
		}
		if err := d.s.replied(d.now, d.asked, seq, []byte(f[2]), skipped); err != nil {
			d.did = append(d.did, "stop the replay")
			d.s.replayDone(d.now, d.asked, err)
		}
	case "done":
		d.s.replayDone(d.now, d.asked, nil)
	case "fail":
		d.s.replayDone(d.now, d.asked, errors.New("replay endpoint silent"))
	case "reset":
		d.s.reset(d.now)
	case "wait":
		return d.wait(f[1])
	case "fail-for":
		return d.failFor(f[1])
	default:
		return errors.New("unknown command")
	}
	d.endStale()
	d.ask()
	return nil
}

// endStale is what a publisher does with a replay that the stream no longer
// wants.
func (d *driver) endStale() {
	if d.s.inflight && d.asked.epoch != d.s.epoch {
		d.s.replayDone(d.now, d.asked, errStopReplay)
	}
}

// failFor is wait where every replay fails.
func (d *driver) failFor(text string) error {
	w, err := time.ParseDuration(text)
	if err != nil {
		return err
	}
	asked := 0
	for end := d.now.Add(w); d.now.Before(end); {
		if d.s.inflight {
			asked++
			d.s.replayDone(d.now, d.asked, errors.New("replay endpoint silent"))
		}
		did := d.did
		if err := d.wait(end.Sub(d.now).String()); err != nil {
			return err
		}
		for _, l := range d.did[len(did):] {
			if !strings.HasPrefix(l, "after") && !strings.HasPrefix(l, "ask") {
				did = append(did, l)
			}
		}
		d.did = did
	}
	d.did = append(d.did, fmt.Sprintf("%d replays failed", asked))
	return nil
}

// wait lets time pass as a publisher's control loop does: from deadline to
// deadline, until a replay is asked for or the time is over.
func (d *driver) wait(text string) error {
	w, err := time.ParseDuration(text)
	if err != nil {
		return err
	}
	began, end := d.now, d.now.Add(w)
	for d.now.Before(end) {
		at, ok := d.s.deadline()
		if !ok || at.After(end) {
			at = end
		}
		if at.After(d.now) {
			d.now = at
		} else {
			d.now = d.now.Add(time.Millisecond)
		}
		d.s.tick(d.now)
		if d.ask() {
			if d.now.Before(end) {
				d.did = append(d.did, fmt.Sprintf("after %s", d.now.Sub(began)))
			}
			break
		}
	}
	return nil
}

func (d *driver) ask() bool {
	at, due := d.s.deadline()
	r, ok := d.s.want(d.now)
	if ok && (!due || at.After(d.now)) {
		d.did = append(d.did, "BUG: a replay is wanted of which no deadline told")
	}
	if ok {
		d.asked = r
		d.did = append(d.did, fmt.Sprintf("ask from %d (%s)", r.from, [...]string{"fill", "probe", "resync"}[r.purpose]))
	}
	return ok
}

func (d *driver) report(w *bytes.Buffer) {
	for _, l := range d.did {
		fmt.Fprintf(w, "\t%s\n", l)
	}
	d.did = nil
	seq := "-"
	if d.s.has {
		seq = strconv.FormatUint(d.s.last, 10)
	}
	fmt.Fprintf(w, "\t= %s seq %s lost %d waiting %d\n", d.s.shown, seq, d.s.lost, d.s.pending.len())
}
