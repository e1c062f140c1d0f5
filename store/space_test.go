package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

var spaceShape = shape{16, TargetChunkBytes}

// tmpfs mounts a file system of so many bytes, or skips.
func tmpfs(t *testing.T, bytes int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Skipf("mounting a tmpfs needs root and the permission to mount: %v (a limit on file sizes is tested instead, see TestFileSizeLimit)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

func ballastOf(dir string) string { return filepath.Join(dir, "ballast") }

// leaveFree fills the file system until so many bytes are left.
func leaveFree(dir string, left int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	f, err := os.OpenFile(ballastOf(dir), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	n := int64(st.Bavail)*int64(st.Bsize) - left
	for page := make([]byte, 4096); n > 0; n -= int64(len(page)) {
		if _, err := f.Write(page); err != nil && !errors.Is(err, syscall.ENOSPC) {
			return err
		}
	}
	return nil
}

func TestFullDisk(t *testing.T) {
	mnt := tmpfs(t, 64<<20)
	o := small(filepath.Join(mnt, "store"))
	o.ReserveBytes = openReserveBytes
	lines := &logLines{}
	o.Logger = lines.logger()
	s := open(t, o)
	mustWrite(t, s, 1, spaceShape)

	f := func(free int64) {
		t.Helper()
		if err := leaveFree(mnt, free); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			_, err := writeSeed(context.Background(), s, 99, spaceShape)
			wantIs(t, err, ErrNoSpace)
			if !strings.Contains(err.Error(), "the previous one stands") || !strings.Contains(err.Error(), mnt) {
				t.Errorf("the error does not say enough: %v", err)
			}
			wantSeed(t, s, 1, spaceShape)
		}
		if err := os.Remove(ballastOf(mnt)); err != nil {
			t.Fatal(err)
		}
	}
	f(10 << 20) // full in the middle of a generation
	f(5 << 20)
	f(0)
	mustWrite(t, s, 2, spaceShape)
	wantSeed(t, s, 2, spaceShape)

	// A start on a full disk costs nothing but the wait for space.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := leaveFree(mnt, 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		_, err := Open(o)
		wantIs(t, err, ErrNoSpace)
	}
	if err := os.Remove(ballastOf(mnt)); err != nil {
		t.Fatal(err)
	}
	s = open(t, o)
	wantSeed(t, s, 2, spaceShape)
	if n := lines.with(setAsideLine); len(n) != 0 {
		t.Errorf("log: %q", n)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	// Closing on a full disk ends well too, and the next start finds all.
	if out, err := child(t, "closes when full", mnt).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Remove(ballastOf(mnt)); err != nil {
		t.Fatal(err)
	}
	s = open(t, o)
	wantSeed(t, s, 3, spaceShape)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func init() {
	children["closes when full"] = func(args []string) error {
		o := small(filepath.Join(args[0], "store"))
		o.ReserveBytes = openReserveBytes
		s, err := Open(o)
		if err != nil {
			return err
		}
		if _, err := writeSeed(context.Background(), s, 3, spaceShape); err != nil {
			return err
		}
		if err := leaveFree(args[0], 0); err != nil {
			return err
		}
		if _, err := writeSeed(context.Background(), s, 4, spaceShape); !errors.Is(err, ErrNoSpace) {
			return fmt.Errorf("write on a full disk: %w", err)
		}
		if seed, err := loadSeed(s, spaceShape); err != nil || seed != 3 {
			return fmt.Errorf("load on a full disk: %d, %w", seed, err)
		}
		return s.Close()
	}
	// Badger alone, as it meets a full disk.
	children["badger fills the disk"] = func(args []string) error {
		db, err := openBadger(badgerOptions(args[0], minValueLogBytes, small("").Logger))
		if err != nil {
			return err
		}
		for n := uint32(0); ; n++ {
			if err := put(db, chunkKey(1, n), testChunk(nil, 1, int(n), TargetChunkBytes)); err != nil {
				return fmt.Errorf("refused in words: %w", err)
			}
		}
	}
}

// TestWhyThereIsAReserve: a full disk is no error to Badger but the end of the
// process.
func TestWhyThereIsAReserve(t *testing.T) {
	mnt := tmpfs(t, 24<<20)
	out, err := child(t, "badger fills the disk", filepath.Join(mnt, "db")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "SIGBUS") {
		t.Errorf("no fault: if Badger now reports a full disk, the reserve can go: %v: %s", err, cut(string(out)))
	}
}

// TestFileSizeLimit: what Badger does report (here ftruncate over the
// process's limit) fails the Write, and Badger is opened again before the next.
func TestFileSizeLimit(t *testing.T) {
	if out, err := child(t, "file size limit", t.TempDir()).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func init() {
	children["file size limit"] = func(args []string) error {
		signal.Ignore(syscall.SIGXFSZ)
		var was unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
			return err
		}
		limit := func(cur uint64) error {
			return unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: cur, Max: was.Max})
		}
		s, err := Open(small(args[0]))
		if err != nil {
			return err
		}
		if _, err := writeSeed(context.Background(), s, 1, spaceShape); err != nil {
			return err
		}
		if err := limit(1 << 20); err != nil {
			return err
		}
		for range 3 {
			if _, err := writeSeed(context.Background(), s, 2, spaceShape); err == nil || errors.Is(err, ErrDamaged) {
				return fmt.Errorf("write under the limit: %w", err)
			}
		}
		if err := limit(was.Cur); err != nil {
			return err
		}
		if seed, err := loadSeed(s, spaceShape); err != nil || seed != 1 {
			return fmt.Errorf("the old generation: %d, %w", seed, err)
		}
		if _, err := writeSeed(context.Background(), s, 3, spaceShape); err != nil {
			return err
		}
		if seed, err := loadSeed(s, spaceShape); err != nil || seed != 3 {
			return fmt.Errorf("the new generation: %d, %w", seed, err)
		}
		return s.Close()
	}
}
