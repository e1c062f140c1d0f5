package store

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The "writer" child writes generation after generation and says on stdout
// when it begins one and when Write has returned.
func init() {
	children["writer"] = func(args []string) error {
		sh := killShape
		seed, err := strconv.ParseUint(args[1], 10, 64)
		if err != nil {
			return err
		}
		s, err := Open(small(args[0]))
		if err != nil {
			return err
		}
		if _, err := loadSeed(s, sh); err != nil && !errors.Is(err, ErrEmpty) {
			return err
		}
		for {
			seed++
			fmt.Println("begin", seed)
			if _, err := writeSeed(context.Background(), s, seed, sh); err != nil {
				return err
			}
			fmt.Println("done", seed)
		}
	}
}

var killShape = shape{10, 300 << 10}

// TestKillAtAnyInstant: after a kill -9 the newest whole generation is served,
// which is the last one that Write reported, or the one after it.
func TestKillAtAnyInstant(t *testing.T) {
	kills := 15
	if long() {
		kills = 200
	}
	o := small(t.TempDir())
	var last uint64
	middle := 0
	for i := range kills {
		begun, done := killWriter(t, o.Dir, last, time.Duration(rand.Int64N(int64(400*time.Millisecond))))
		lines := &logLines{}
		o.Logger = lines.logger()
		s, err := Open(o)
		if err != nil {
			t.Fatalf("kill %d: Open: %v", i, err)
		}
		seed, err := loadSeed(s, killShape)
		switch {
		case errors.Is(err, ErrEmpty) && max(last, done) == 0:
		case err != nil:
			t.Fatalf("kill %d: after generation %d was done and %d begun: %v", i, done, begun, err)
		case seed < max(last, done) || seed > max(last, begun):
			t.Fatalf("kill %d: generation %d loads; %d was done and %d begun", i, seed, max(last, done), begun)
		}
		if n := lines.with(setAsideLine); len(n) > 0 {
			t.Fatalf("kill %d: %s", i, n)
		}
		if begun > done {
			middle++
		}
		last = max(last, seed)
		if disk := s.Stats().DiskBytes; disk > 6*int64(killShape.chunks*killShape.size) {
			t.Errorf("kill %d: %d bytes on disk", i, disk)
		}
		if err := s.Close(); err != nil {
			t.Fatalf("kill %d: Close: %v", i, err)
		}
	}
	t.Logf("%d kills, %d of them inside a Write; %d generations", kills, middle, last)
	if middle == 0 {
		t.Error("no kill met a Write")
	}
}

// killWriter runs the child for so long and kills it. Returns the last
// generation it began and the last one it finished, 0 for none.
func killWriter(t *testing.T, dir string, from uint64, after time.Duration) (begun, done uint64) {
	t.Helper()
	cmd := child(t, "writer", dir, fmt.Sprint(from))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	for in := bufio.NewScanner(out); in.Scan(); {
		word, number, _ := strings.Cut(in.Text(), " ")
		n, _ := strconv.ParseUint(number, 10, 64)
		if word == "begin" {
			begun = n
		} else {
			done = n
		}
	}
	_ = cmd.Wait()
	if cmd.ProcessState.Exited() {
		t.Fatalf("the writer ended by itself: %s", &stderr)
	}
	return begun, done
}

// TestDirectoryThatKillsStarts: a process that dies while opening or loading
// twice in a row costs the directory its trust.
func TestDirectoryThatKillsStarts(t *testing.T) {
	lines := &logLines{}
	o := small(t.TempDir())
	o.Logger = lines.logger()
	sh := shape{3, 5000}
	s := open(t, o)
	mustWrite(t, s, 1, sh)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	die := func() {
		t.Helper()
		if err := child(t, "dies loading", o.Dir).Run(); err == nil {
			t.Fatal("the child lived")
		}
	}
	die()
	s = open(t, o)
	wantSeed(t, s, 1, sh) // one is no pattern, and a good load forgives it
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	die()
	die()
	r, err := Inspect(o.Dir)
	if err != nil || r.KilledStarts != 2 || r.Clean {
		t.Fatalf("%+v, %v", r, err)
	}
	s = open(t, o)
	_, err = s.Load(context.Background(), nil)
	wantIs(t, err, ErrDamaged)
	n := lines.with(setAsideLine)
	if len(n) != 1 || !strings.Contains(n[0], "2 starts in a row") || !strings.Contains(n[0], "generation 1") {
		t.Errorf("log: %q", n)
	}
	mustWrite(t, s, 2, sh)
	wantSeed(t, s, 2, sh)
	if !exists(o.Dir, "db.damaged", "WHY") {
		t.Error("not kept")
	}
}

func init() {
	children["dies loading"] = func(args []string) error {
		s, err := Open(small(args[0]))
		if err != nil {
			return err
		}
		_, err = s.Load(context.Background(), func(ChunkKind, []byte) error {
			os.Exit(7)
			return nil
		})
		return err
	}
}
