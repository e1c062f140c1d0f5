package normalize

import (
	"encoding/binary"
	"encoding/hex"

	"github.com/zeebo/xxh3"
)

// identifierLen is the length of an identifier that is a hash in hex, as vLLM's
// own processor makes them.
const identifierLen = 64

// padBase and padMask map a hash to a token id that no vocabulary has. They are
// the KV-event RFCs': 30 bits of the hash survive.
const (
	padBase = 1_000_000
	padMask = 1<<30 - 1
)

// ParseIdentifier returns the hash that stands for a multimodal identifier.
// Exactly 64 hex digits, in either case, give their first 16 as a number; any
// other string is hashed. The empty string identifies nothing: false.
func ParseIdentifier(s string) (MMHash, bool) {
	if s == "" {
		return 0, false
	}
	return parseIdentifier([]byte(s)), true
}

// parseIdentifier is ParseIdentifier for a non-empty identifier of the wire.
func parseIdentifier(s []byte) MMHash {
	if isHexIdentifier(s) {
		var first [8]byte
		// Cannot fail: every digit was looked at.
		_, _ = hex.Decode(first[:], s[:16])
		return MMHash(binary.BigEndian.Uint64(first[:]))
	}
	return MMHash(xxh3.HashSeed(s, mmSeed))
}

// isHexIdentifier says whether s is 64 ASCII hex digits.
func isHexIdentifier(s []byte) bool {
	if len(s) != identifierLen {
		return false
	}
	for _, c := range s {
		switch {
		case '0' <= c && c <= '9', 'a' <= c && c <= 'f', 'A' <= c && c <= 'F':
		default:
			return false
		}
	}
	return true
}

// Pad returns the token id that takes the place of a placeholder token of h.
func Pad(h MMHash) uint32 {
	return padBase + uint32(h&padMask)
}

// Marker returns an identifier that ParseIdentifier reads back as h: 16 hex
// digits of h and 48 zeros. It is what a frontend may hand to its engine in the
// place of an identifier of its own.
func Marker(h MMHash) string {
	const digits = "0123456789abcdef"
	var b [identifierLen]byte
	for i := range b {
		b[i] = '0'
	}
	for i := range 16 {
		b[i] = digits[h>>(60-4*i)&0xf]
	}
	return string(b[:])
}
