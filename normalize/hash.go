package normalize

import (
	"encoding/binary"
	"runtime"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// The seeds of the XXH3 scheme. The chain's seed stays rootSeed whatever the
// adapter or the salt: those are in the local hashes already.
const (
	rootSeed   = 1337
	loraSeed   = 0
	saltSeed   = 1
	opaqueSeed = 2
	mmSeed     = 0
)

// unidentifiedSeed is what an event's block adds to its seed when a placeholder
// token stands in it and nothing says whose: no request can produce it.
var unidentifiedSeed = xxh3.HashStringSeed("unidentified", opaqueSeed)

// littleEndian says that this machine keeps a u32 as the scheme hashes it, so
// that token memory can be hashed where it lies. Of Go's ports these are the
// others. A constant, so that hashWords is small enough to be inlined.
const littleEndian = runtime.GOARCH != "mips" && runtime.GOARCH != "mips64" &&
	runtime.GOARCH != "ppc64" && runtime.GOARCH != "s390x"

// SaltSeedOf returns what a cache salt adds to the seed of every block of its
// chain. The empty salt is no salt and adds nothing.
func SaltSeedOf(salt string) SaltSeed {
	if salt == "" {
		return 0
	}
	return SaltSeed(xxh3.HashStringSeed(salt, saltSeed))
}

// saltSeedOf is SaltSeedOf for bytes of the wire.
func saltSeedOf(salt []byte) SaltSeed {
	if len(salt) == 0 {
		return 0
	}
	return SaltSeed(xxh3.HashSeed(salt, saltSeed))
}

// seedOf returns the seed of an adapter's blocks, before the salt.
func seedOf(lora string) uint64 {
	if lora == "" {
		return rootSeed
	}
	return rootSeed + xxh3.HashStringSeed(lora, loraSeed)
}

// seedOfBytes is seedOf for bytes of the wire.
func seedOfBytes(lora []byte) uint64 {
	if len(lora) == 0 {
		return rootSeed
	}
	return rootSeed + xxh3.HashSeed(lora, loraSeed)
}

// hashWords hashes words as their little-endian bytes, from where they lie if
// the machine's own order is that one.
func hashWords(words []uint32, seed uint64) LocalHash {
	if !littleEndian {
		return hashWordsPortable(words, seed)
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), 4*len(words))
	return LocalHash(xxh3.HashSeed(b, seed))
}

// hashWordsPortable is hashWords for a big-endian machine.
func hashWordsPortable(words []uint32, seed uint64) LocalHash {
	b := make([]byte, 0, 4*len(words))
	for _, w := range words {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return LocalHash(xxh3.HashSeed(b, seed))
}

// NextSequence returns the identity of the prefix that ends in l, given that of
// the prefix before it. The first block of a prefix has none before it: there
// the sequence hash is SequenceHash(l).
func NextSequence(prev SequenceHash, l LocalHash) SequenceHash {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], uint64(prev))
	binary.LittleEndian.PutUint64(b[8:], uint64(l))
	return SequenceHash(xxh3.HashSeed(b[:], rootSeed))
}

// SequenceHashes appends to dst the sequence hashes of a prefix that begins at
// position 0, one for each local hash.
func SequenceHashes(dst []SequenceHash, locals []LocalHash) []SequenceHash {
	if len(locals) == 0 {
		return dst
	}
	prev := SequenceHash(locals[0])
	dst = append(dst, prev)
	for _, l := range locals[1:] {
		prev = NextSequence(prev, l)
		dst = append(dst, prev)
	}
	return dst
}
