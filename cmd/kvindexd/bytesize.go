package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// byteSize is a flag in bytes that may be written with a unit: 512MiB, 2GB.
type byteSize int64

// units from long to short, so that the first suffix that fits is the unit.
var units = []struct {
	name  string
	bytes int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
	{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40}, {"B", 1},
}

// Set reads a number with or without a unit.
func (b *byteSize) Set(s string) error {
	number, unit := strings.TrimSpace(s), int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || v < 0 || v*float64(unit) > math.MaxInt64/2 || math.IsNaN(v) {
		return fmt.Errorf("%q: expected a number of bytes, such as 1048576 or 512MiB", s)
	}
	*b = byteSize(v * float64(unit))
	return nil
}

// String is the shortest exact form.
func (b *byteSize) String() string {
	for i := 3; i >= 0; i-- {
		if u := units[i]; *b > 0 && int64(*b)%u.bytes == 0 {
			return strconv.FormatInt(int64(*b)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(*b), 10)
}

// Type is the flag's placeholder in the help.
func (b *byteSize) Type() string { return "bytes" }
