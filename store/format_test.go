package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

// withVersion returns the sealed record with another version.
func withVersion(b []byte, v byte) []byte {
	b = bytes.Clone(b)
	b[4] = v
	return reseal(b)
}

func reseal(b []byte) []byte {
	binary.LittleEndian.PutUint64(b[len(b)-8:], xxh3.Hash(b[:len(b)-8]))
	return b
}

func testManifest() *manifest {
	return &manifest{
		Info: Info{
			Content: "index", ContentVersion: 2, Producer: "kvindexd", Created: time.Unix(1, 2),
			Meta: []byte("m"), Generation: 7, Chunks: 1, RawBytes: 11, StoredBytes: 70,
		},
		identity: 0x1122334455667788,
	}
}

// TestFormatStands keeps the bytes of version 1 as they are documented.
func TestFormatStands(t *testing.T) {
	f := func(name string, got []byte, want string) {
		t.Helper()
		if g := fmt.Sprintf("%x", got); g != want {
			t.Errorf("%s\n got %s\nwant %s", name, g, want)
		}
	}
	man := testManifest().append(nil)
	f("manifest", man[:64], "4b564d46"+"0100"+"0000"+"0700000000000000"+"8877665544332211"+"02ca9a3b00000000"+
		"01000000"+"02000000"+"0b00000000000000"+"4600000000000000"+"0500"+"0800"+"01000000")
	f("names and meta", man[64:78], fmt.Sprintf("%x", "indexkvindexdm"))
	c, err := newCodec()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	ch := c.appendChunk(nil, place{7, 0x1122334455667788, 3}, 5, []byte("incompress!"))
	f("chunk", ch[:40], "4b56434b"+"0100"+"0000"+"0700000000000000"+"8877665544332211"+"03000000"+"0500"+"0000"+"0b000000"+"0b000000")
	f("payload", ch[40:51], fmt.Sprintf("%x", "incompress!"))
	if sum := binary.LittleEndian.Uint64(ch[51:]); len(ch) != 59 || sum != xxh3.Hash(ch[:51]) {
		t.Errorf("chunk of %d bytes, checksum %x", len(ch), sum)
	}
}

// TestEveryBitCounts flips each bit of a manifest and of a chunk.
func TestEveryBitCounts(t *testing.T) {
	c, err := newCodec()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	at := place{7, 9, 3}
	man := testManifest().append(nil)
	ch := c.appendChunk(nil, at, 5, bytes.Repeat([]byte("text"), 100))
	f := func(what string, b []byte, parse func([]byte) error) {
		for i := range 8 * len(b) {
			b[i/8] ^= 1 << (i % 8)
			if err := parse(b); !errors.Is(err, ErrDamaged) {
				t.Fatalf("%s with bit %d flipped: %v", what, i, err)
			}
			b[i/8] ^= 1 << (i % 8)
		}
		for n := range b {
			if err := parse(b[:n]); !errors.Is(err, ErrDamaged) {
				t.Fatalf("%s cut to %d bytes: %v", what, n, err)
			}
		}
		if err := parse(b); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	f("manifest", man, func(b []byte) error { _, err := parseManifest(b); return err })
	f("chunk", ch, func(b []byte) error { _, err := parseChunk(b, at); return err })
}

// TestChunkKnowsItsPlace: an intact chunk is refused anywhere but there.
func TestChunkKnowsItsPlace(t *testing.T) {
	c, err := newCodec()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	ch := c.appendChunk(nil, place{7, 9, 3}, 5, []byte("x"))
	for _, at := range []place{{8, 9, 3}, {7, 8, 3}, {7, 9, 4}} {
		_, err := parseChunk(ch, at)
		wantIs(t, err, ErrDamaged)
	}
	_, err = parseChunk(withVersion(ch, 2), place{7, 9, 3})
	wantIs(t, err, ErrDamaged)
}

// lies are sealed chunks whose lengths do not hold.
func lies(c *codec) [][]byte {
	ch := c.appendChunk(nil, place{}, 1, bytes.Repeat([]byte("text"), 1000))
	at := func(off int, v uint32) []byte {
		b := bytes.Clone(ch)
		binary.LittleEndian.PutUint32(b[off:], v)
		return reseal(b)
	}
	return [][]byte{
		at(32, MaxChunkBytes), at(32, MaxChunkBytes+1), at(32, 1<<31), at(32, 0), at(32, 3999),
		at(36, 0), at(36, 1<<31), at(28, 7<<16), at(28, 0),
	}
}

func TestLyingLengths(t *testing.T) {
	c, err := newCodec()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for i, b := range lies(c) {
		ch, err := parseChunk(b, place{})
		if err == nil {
			_, err = c.decode(nil, ch)
		}
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("lie %d: %v", i, err)
		}
	}
}

func FuzzChunk(f *testing.F) {
	c, err := newCodec()
	if err != nil {
		f.Fatal(err)
	}
	for _, b := range lies(c) {
		f.Add(b)
	}
	f.Add(c.appendChunk(nil, place{}, 1, bytes.Repeat([]byte("text"), 100)))
	f.Add(c.appendChunk(nil, place{}, 1, []byte("raw")))
	var buf []byte
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= checksumBytes {
			b = reseal(bytes.Clone(b)) // or nothing would get past the checksum
		}
		ch, err := parseChunk(b, place{})
		if err == nil {
			buf, err = c.decode(buf, ch)
		}
		if err != nil && !errors.Is(err, ErrDamaged) {
			t.Fatalf("error of no known kind: %v", err)
		}
		if err == nil && len(buf) != ch.raw {
			t.Fatalf("%d bytes, header says %d", len(buf), ch.raw)
		}
		if cap(buf) > 2*MaxChunkBytes {
			t.Fatalf("buffer of %d bytes", cap(buf))
		}
	})
}

func FuzzManifest(f *testing.F) {
	f.Add(testManifest().append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= checksumBytes {
			b = reseal(bytes.Clone(b))
		}
		m, err := parseManifest(b)
		if err != nil {
			if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrVersion) {
				t.Fatalf("error of no known kind: %v", err)
			}
			return
		}
		if err := m.check(); err != nil {
			t.Fatal(err)
		}
		again, err := parseManifest(m.append(nil))
		if err != nil || again.describe() != m.describe() {
			t.Fatalf("%v, %v", again, err)
		}
	})
}

func FuzzExport(f *testing.F) {
	dir := f.TempDir()
	s := open(f, small(dir))
	mustWrite(f, s, 1, shape{3, 200})
	if err := s.Close(); err != nil {
		f.Fatal(err)
	}
	var whole bytes.Buffer
	if _, err := Export(dir, &whole); err != nil {
		f.Fatal(err)
	}
	f.Add(whole.Bytes())
	f.Add(whole.Bytes()[:100])
	f.Add([]byte("KVSX\x01\x00\x00\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		man, err := readExportHead(r)
		if err == nil {
			err = eachExported(r, man, func(ChunkKind, []byte) error { return nil })
		}
		if err != nil && !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrVersion) {
			t.Fatalf("error of no known kind: %v", err)
		}
	})
}

// FuzzTable holds the check of a table's footer to its promise: what passes
// does not end the process when the table is read.
func FuzzTable(f *testing.F) {
	dir := f.TempDir()
	s := open(f, small(dir))
	mustWrite(f, s, 1, shape{3, 2000})
	if err := s.Close(); err != nil {
		f.Fatal(err)
	}
	for _, name := range filesOf(f, dir+"/db", ".sst") {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)/2])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		path := t.TempDir() + "/000001.sst"
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		_ = checkTable(path, 1, 0)
	})
}
