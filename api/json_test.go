package api

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// The oracle of grammar is encoding/json; ours is stricter where maxDepth says.
func FuzzSkip(f *testing.F) {
	for _, seed := range []string{
		`{"a":[1,2.5e-3,{"b":"\u00e9\n"}],"c":null}`, `[]`, `[[[]]]`, `"a\"b"`, `-0.0`, `01`, `{"a":}`, `[1,]`, "\"\x01\"",
		`{"a":1,"a":2}`, ` true `, `"\ud83d\ude00"`, `nul`, "\xff", `"` + strings.Repeat("x", 30) + `\\"`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := scanner{b: b}
		err := s.skip()
		if err == nil {
			err = s.end()
		}
		want := json.Valid(b)
		if (err == nil) != want && !strings.Contains(errText(err), "nested deeper") {
			t.Fatalf("ours %v, encoding/json valid=%v", err, want)
		}
	})
}

func errText(err *Error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func FuzzTokens(f *testing.F) {
	for _, seed := range []string{
		`[]`, `[1]`, `[1, 2,3 ]`, `[null]`, `[-1]`, `[1.0]`, `[1e3]`, `[4294967295]`, `[4294967296]`, `[01]`, `[0]`, `[00]`,
		`[12345678,1234567,123456,12345,1234,123,12,1,0]`, `[1,,2]`, `[1 2]`, `[99999999999999999999]`, `[1,]`, `[ ]`, "[1,\n2]",
		`[10000000, 2000000 , 3]  `, `["1"]`, `[true]`, `[[1]]`, `[1`, `[1,`, `[`, `{}`, `[1,  2]`, "[\xff]", "[1\xb0,2]",
	} {
		f.Add([]byte(seed))
	}
	f.Add(jsonBody(promptOf(1, 1000), "")[len(`{"model":"m","token_ids":`):])
	f.Fuzz(func(t *testing.T, b []byte) {
		s := scanner{b: b}
		got, err := s.tokens(nil)
		if err == nil {
			err = s.end()
		}
		want, ok := oracleTokens(b)
		if (err == nil) != ok {
			t.Fatalf("ours %v (%v), the oracle %v", got, err, ok)
		}
		if ok && !equalTokens(got, want) {
			t.Fatalf("ours %v, the oracle %v", got, want)
		}
	})
}

func equalTokens(a, b []uint32) bool {
	return len(a) == len(b) && (len(a) == 0 || reflect.DeepEqual(a, b))
}

// oracleTokens reads an array of u32 with encoding/json, refusing the forms
// that it would let pass as numbers.
func oracleTokens(b []byte) ([]uint32, bool) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var vs []any
	if !json.Valid(b) || bytes.TrimLeft(b, " \t\r\n")[0] != '[' || d.Decode(&vs) != nil {
		return nil, false
	}
	var out []uint32
	for _, v := range vs {
		n, ok := v.(json.Number)
		if !ok {
			return nil, false
		}
		u, err := strconv.ParseUint(string(n), 10, 32)
		if err != nil {
			return nil, false
		}
		out = append(out, uint32(u))
	}
	return out, true
}

func TestTokensNameTheElement(t *testing.T) {
	f := func(in, param, part string) {
		t.Helper()
		s := scanner{b: []byte(in)}
		_, err := s.tokens(nil)
		if err == nil || err.Param != param || !strings.Contains(err.Message, part) || err.Status != 400 {
			t.Errorf("%s: %v, want %s … %s", in, err, param, part)
		}
	}
	f(`[1,2,null]`, "[2]", "not null")
	f(`[1,2,-3]`, "[2]", "negative")
	f(`[1,2,3.5]`, "[2]", "fraction")
	f(`[1,2,3e5]`, "[2]", "exponent")
	f(`[4294967296]`, "[0]", "too large")
	f(`[1,18446744073709551617]`, "[1]", "too large")
	f(`["1"]`, "[0]", "not a string")
	f(`[[1]]`, "[0]", "not an array")
	f(`[true]`, "[0]", "not a boolean")
	f(`{"a":1}`, "", "not an object")
	f(`[1`, "", "ends")
	f(`[NaN]`, "", "expected a value")
	f(`[007]`, "", "expected")
}

// Every length of number, at every distance from the end of the body, with
// every usual separator.
func TestTokensEveryLength(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, sep := range []string{",", ", ", " ,", ",\n\t", " , "} {
		for n := range 40 {
			var want []uint32
			var b strings.Builder
			b.WriteByte('[')
			for i := range n {
				v := uint32(r.Uint64() >> (32 + r.IntN(32)))
				if i%7 == 0 {
					v = math.MaxUint32
				}
				want = append(want, v)
				if i > 0 {
					b.WriteString(sep)
				}
				b.WriteString(strconv.FormatUint(uint64(v), 10))
			}
			b.WriteByte(']')
			s := scanner{b: []byte(b.String())}
			got, err := s.tokens(nil)
			if err != nil || !equalTokens(got, want) || s.i != len(s.b) {
				t.Fatalf("%q: %v %v", b.String(), got, err)
			}
		}
	}
}

// Long arrays, which are read at two places at once, with something odd at one
// of them, and with more of the body behind.
func TestTokensLongArrays(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	odd := []string{"12345678", "4294967295", "4294967296", "007", "00", "0", "-1", "1.5", "1e3", "null", `"1,2,3"`, "[1,2]", "", " 7", "7 ", "7\t", "9]", "\xb1"}
	for round := range 3000 {
		elements := make([]string, 300+r.IntN(900))
		bits := 3 + r.IntN(20)
		for i := range elements {
			elements[i] = strconv.FormatUint(uint64(r.Uint32N(1<<bits)), 10)
		}
		if round%10 > 0 {
			elements[r.IntN(len(elements))] = odd[r.IntN(len(odd))]
		}
		body := "[" + strings.Join(elements, []string{",", ", "}[round%2]) + "]" + strings.Repeat(" ", r.IntN(2)*3000)
		s := scanner{b: []byte(body)}
		got, err := s.tokens([]uint32{42})
		if err == nil {
			err = s.end()
		}
		want, ok := oracleTokens([]byte(body))
		if (err == nil) != ok || ok && !equalTokens(got[1:], want) || got[0] != 42 {
			t.Fatalf("round %d: %.3000s: %v, the oracle says %t", round, body, err, ok)
		}
	}
}

func FuzzString(f *testing.F) {
	for _, seed := range []string{`""`, `"a"`, `"\u0041\\\/\b"`, `"\ud83d\ude00"`, `"\ud83d"`, `"\ude00\ud83d"`, `"é"`, "\"\xff\"", `"\ud83dx"`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := scanner{b: b}
		got, err := s.str()
		if err == nil {
			err = s.end()
		}
		var want string
		werr := json.Unmarshal(b, &want)
		if err == nil && (werr != nil || got != want) {
			t.Fatalf("ours %q, encoding/json %q %v", got, want, werr)
		}
		// What ours refuses, encoding/json refuses or repairs.
		if err != nil && werr == nil && string(bytes.TrimSpace(b)) != "null" && !strings.ContainsRune(want, '\ufffd') {
			t.Fatalf("ours %v, encoding/json %q", err, want)
		}
	})
}

func FuzzAppendString(f *testing.F) {
	f.Add("plain")
	f.Add("\"\\\n\x00\x7f é \u2028 \xff \xc3")
	f.Fuzz(func(t *testing.T, in string) {
		var got string
		if err := json.Unmarshal(appendString(nil, in), &got); err != nil {
			t.Fatal(err)
		}
		if want := strings.ToValidUTF8(in, "\x00"); strings.ReplaceAll(got, "\ufffd", "") != strings.ReplaceAll(strings.ReplaceAll(want, "\ufffd", ""), "\x00", "") &&
			!strings.Contains(in, "\x00") {
			t.Fatalf("%q came back as %q", in, got)
		}
	})
}
