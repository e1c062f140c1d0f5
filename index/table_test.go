package index

import (
	"math/rand/v2"
	"testing"
)

// TestTable holds the table against a map through growth, shrinking, values
// that change and keys that are put right after they were looked for.
func TestTable(t *testing.T) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var tab table
		want := map[uint64]uint32{}
		space := uint64(1) << (3 + 2*seed)
		for n := range 200_000 {
			key := rng.Uint64N(space)
			if seed%2 == 1 {
				key *= 0x9e3779b97f4a7c15
			}
			value := rng.Uint32N(1<<31) + 1
			shrinking := n/50_000%2 == 1
			switch op := rng.IntN(8); {
			case op < 3 && !shrinking || op == 0:
				if got := tab.lookup(key); got != want[key] {
					t.Fatalf("seed %d: lookup %x = %d, want %d", seed, key, got, want[key])
				}
				tab.put(key, value)
				want[key] = value
			case op < 4:
				tab.put(key, value)
				want[key] = value
			case op < 5:
				tab.delIf(key, value) // mostly another value
				if want[key] == value {
					delete(want, key)
				}
			case op < 7:
				tab.del(key)
				delete(want, key)
			default:
				if got := tab.get(key); got != want[key] {
					t.Fatalf("seed %d: get %x = %d, want %d", seed, key, got, want[key])
				}
			}
			if tab.n != len(want) {
				t.Fatalf("seed %d, step %d: %d keys, want %d", seed, n, tab.n, len(want))
			}
		}
		found := 0
		tab.each(func(key uint64, value uint32) bool {
			if want[key] != value {
				t.Errorf("seed %d: each gives %x = %d, want %d", seed, key, value, want[key])
			}
			found++
			return true
		})
		if found != len(want) {
			t.Errorf("seed %d: each gives %d keys of %d", seed, found, len(want))
		}
		for key := range want {
			if tab.get(key) != want[key] {
				t.Fatalf("seed %d: %x = %d, want %d", seed, key, tab.get(key), want[key])
			}
			tab.del(key)
		}
		if tab.n != 0 || tab.slots != 0 {
			t.Errorf("seed %d: %d keys, %d slots left", seed, tab.n, tab.slots)
		}
	}
}

// TestSlab: arrays do not overlap, come zeroed, and pages go when they are
// empty.
func TestSlab(t *testing.T) {
	var s slab[uint64]
	rng := rand.New(rand.NewPCG(1, 2))
	type held struct {
		ref   uint32
		class uint8
		mark  uint64
	}
	var all []held
	for n := range 100_000 {
		if rng.IntN(5) < 3 == (n/20_000%2 == 0) || len(all) == 0 {
			h := held{class: uint8(rng.IntN(8)), mark: uint64(n) + 1}
			h.ref = s.alloc(h.class)
			if h.ref == 0 {
				t.Fatal("reference 0 was handed out")
			}
			a := s.array(h.ref, 1<<h.class)
			for i := range a {
				if a[i] != 0 {
					t.Fatalf("array of class %d is not zeroed", h.class)
				}
				a[i] = h.mark
			}
			all = append(all, h)
			continue
		}
		i := rng.IntN(len(all))
		h := all[i]
		for _, v := range s.array(h.ref, 1<<h.class) {
			if v != h.mark {
				t.Fatalf("array %d holds %d, want %d", h.ref, v, h.mark)
			}
		}
		s.free(h.ref)
		all[i] = all[len(all)-1]
		all = all[:len(all)-1]
	}
	for _, h := range all {
		s.free(h.ref)
	}
	if pages := len(s.mem) - len(s.spare) - 1; pages > slabClasses {
		t.Errorf("%d pages left of an empty slab", pages)
	}
}
