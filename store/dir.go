package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// paths are the names inside a store's directory. Badger has a directory of its
// own below it, so that setting it aside is a rename inside ours and works
// where ours is a mount point.
//
//	LOCK          flock'd by the owner for as long as it lives; holds its pid
//	STARTING      how many starts in a row have not finished loading
//	HAS_SNAPSHOT  number of the last complete generation
//	db/           Badger
//	db.next/      a fresh directory that is being written in place of db
//	db.old/       the directory that db.next has replaced, on its way out
//	db.damaged/   the last one set aside, with a file WHY
type paths struct{ dir string }

func (p paths) db() string       { return filepath.Join(p.dir, "db") }
func (p paths) next() string     { return filepath.Join(p.dir, "db.next") }
func (p paths) old() string      { return filepath.Join(p.dir, "db.old") }
func (p paths) damaged() string  { return filepath.Join(p.dir, "db.damaged") }
func (p paths) lock() string     { return filepath.Join(p.dir, "LOCK") }
func (p paths) starting() string { return filepath.Join(p.dir, "STARTING") }
func (p paths) has() string      { return filepath.Join(p.dir, "HAS_SNAPSHOT") }
func (p paths) why() string      { return filepath.Join(p.damaged(), "WHY") }

// maxKilledStarts is after how many starts that died the directory goes.
const maxKilledStarts = 2

// openReserveBytes is what opening or closing Badger may write: the headers of
// a few files and a table of some kilobytes.
const openReserveBytes = 4 << 20

// dirLock is the exclusive hold on a store's directory. It lives in the kernel
// and ends with the process, however that ends.
type dirLock struct{ f *os.File }

// lockDir takes the lock or says who has it. Errors: ErrLocked.
func lockDir(p paths) (*dirLock, error) {
	f, err := os.OpenFile(p.lock(), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("snapshot directory lock: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		defer f.Close()
		return nil, lockedError(p.dir, f)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock snapshot directory %s: %w", p.dir, err)
	}
	// The pid is for a person who meets ErrLocked; nothing depends on it.
	if f.Truncate(0) == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return &dirLock{f}, nil
}

func lockedError(dir string, f *os.File) error {
	var buf [32]byte
	n, _ := f.ReadAt(buf[:], 0)
	holder := "another kvindexd"
	if pid := strings.TrimSpace(string(buf[:n])); pid != "" {
		holder += " (process " + pid + ")"
	}
	return fmt.Errorf("%w: %s is held by %s; stop it or choose another directory", ErrLocked, dir, holder)
}

func (l *dirLock) release() { _ = l.f.Close() }

// countStart returns how many starts before this one did not finish, and
// records that this one has begun.
func (p paths) countStart() (int, error) {
	n, _, err := readNumber(p.starting())
	if err != nil {
		return 0, err
	}
	return int(min(n, maxKilledStarts)), writeNumber(p.starting(), n+1)
}

// endStart records that the directory has not killed this start.
func (p paths) endStart() error {
	err := os.Remove(p.starting())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// hasSnapshot returns the last complete generation's number, if there ever was
// one. Badger opens a directory without its MANIFEST as an empty one and
// deletes the tables; this file is how that is told from a new store.
func (p paths) hasSnapshot() (uint64, bool, error) { return readNumber(p.has()) }

func (p paths) setHasSnapshot(gen uint64) error { return writeNumber(p.has(), gen) }

// readNumber reads a file of one decimal number; one that holds anything else
// counts as 0, as it is there.
func readNumber(path string) (n uint64, ok bool, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	n, _ = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 63)
	return n, true, nil
}

// writeNumber replaces the file as a whole, durably.
func writeNumber(path string, n uint64) error {
	return writeFile(path, strconv.AppendUint(nil, n, 10))
}

func writeFile(path string, data []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// setAside renames db to db.damaged, in place of an earlier one, and forgets
// what was recorded about it. Returns the new name.
func (p paths) setAside(reason error, lost string) (string, error) {
	if err := os.RemoveAll(p.damaged()); err != nil {
		return "", err
	}
	if err := os.Rename(p.db(), p.damaged()); errors.Is(err, fs.ErrNotExist) {
		err = os.Mkdir(p.damaged(), 0o755) // the whole directory is what was lost
		if err != nil {
			return "", err
		}
	} else if err != nil {
		return "", err
	}
	why := fmt.Sprintf("set aside: %s\nreason: %v\nlost: %s", time.Now().UTC().Format(time.RFC3339), reason, lost)
	// The explanation is a courtesy; a disk too full for it is no reason to fail.
	_ = os.WriteFile(p.why(), []byte(why+"\n"), 0o644)
	for _, name := range []string{p.has(), p.starting()} {
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	return p.damaged(), syncDir(p.dir)
}

// swap puts db.next, complete and closed, in db's place. A kill between the
// two renames is finished by finishSwap.
func (p paths) swap() error {
	if err := os.RemoveAll(p.old()); err != nil {
		return err
	}
	if err := os.Rename(p.db(), p.old()); err != nil {
		return err
	}
	if err := os.Rename(p.next(), p.db()); err != nil {
		return err
	}
	if err := syncDir(p.dir); err != nil {
		return err
	}
	return os.RemoveAll(p.old())
}

// finishSwap completes or undoes a swap that a kill interrupted. db is renamed
// away only when db.next is complete: so db.next without db is the newest
// generation, and beside db it is an attempt that counts for nothing.
func (p paths) finishSwap() error {
	_, errDB := os.Stat(p.db())
	_, errNext := os.Stat(p.next())
	if errors.Is(errDB, fs.ErrNotExist) && errNext == nil {
		if err := os.Rename(p.next(), p.db()); err != nil {
			return err
		}
		if err := syncDir(p.dir); err != nil {
			return err
		}
	}
	return errors.Join(os.RemoveAll(p.next()), os.RemoveAll(p.old()))
}

// checkSpace fails with ErrNoSpace where fewer than need bytes are free.
func checkSpace(dir string, need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("free space of %s: %w", dir, err)
	}
	if free := int64(st.Bavail) * int64(st.Bsize); free < need {
		return fmt.Errorf("%w: %s has %d bytes free, %d are needed", ErrNoSpace, dir, free, need)
	}
	return nil
}

// diskUse is what the files below dir occupy, in bytes. Badger's current log
// files are sparse, so their blocks count and not their length.
func diskUse(dir string) int64 {
	var total int64
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // a file that is just going away occupies nothing
		}
		if fi, err := d.Info(); err == nil {
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				total += st.Blocks * 512
			}
		}
		return nil
	})
	return total
}
