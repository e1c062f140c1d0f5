package zmqwire

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// Payloads of tests are written as Go values: arr and obj keep their order, and
// raw is put in as it is.
type (
	arr []any
	obj []any // key, value, key, value, ...
	raw []byte
)

// unhex returns the bytes of hex digits, which may have spaces between them.
func unhex(t testing.TB, s string) raw {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// pack returns the msgpack form of v.
func pack(t testing.TB, v any) []byte {
	t.Helper()
	var out bytes.Buffer
	e := msgpack.NewEncoder(&out)
	e.UseCompactInts(true)
	var put func(v any)
	put = func(v any) {
		var err error
		switch v := v.(type) {
		case arr:
			err = e.EncodeArrayLen(len(v))
			for _, x := range v {
				put(x)
			}
		case obj:
			err = e.EncodeMapLen(len(v) / 2)
			for _, x := range v {
				put(x)
			}
		case raw:
			out.Write(v)
		default:
			err = e.Encode(v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	put(v)
	return out.Bytes()
}

// show writes an event as a person reads it: all that it says, and nothing that
// is absent.
func show(ev *Event) string {
	var s strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&s, format, args...) }
	say("%v", ev.Kind)
	if ev.Kind != AllBlocksCleared {
		say(" %d", ev.Hashes)
	}
	if ev.Remaining != nil {
		say(" remaining=%d", ev.Remaining)
	}
	if ev.HasParent {
		say(" <- %d", ev.Parent)
	}
	if ev.Kind == BlockStored {
		say(" tokens=%d/%d", ev.Tokens, ev.BlockSize)
	}
	if ev.Pairs {
		say(" pairs")
	}
	if ev.Lookahead != 0 || len(ev.LookaheadTokens) != 0 {
		say(" lookahead=%d:%d", ev.Lookahead, ev.LookaheadTokens)
	}
	if ev.HasLoraID {
		say(" lora_id")
	}
	for _, text := range []struct {
		name string
		text []byte
	}{
		{"medium", ev.Medium}, {"lora", ev.LoraName}, {"locality", ev.Locality}, {"ownership", ev.Ownership},
		{"session", ev.SessionID}, {"salt", ev.CacheSalt}, {"spec", ev.Spec},
	} {
		if text.text != nil {
			say(" %s=%q", text.name, text.text)
		}
	}
	if ev.ExtraEnd != nil {
		say(" extra=%s", showExtra(ev))
	}
	if ev.Group != NoGroup {
		say(" group=%d", ev.Group)
	}
	if ev.Window != 0 {
		say(" window=%d", ev.Window)
	}
	return s.String()
}

func showExtra(ev *Event) string {
	forms := map[ExtraForm]string{ExtraString: "str", ExtraBytes: "bin", ExtraItem: "item", ExtraOther: "other"}
	entries, begin := []string{}, 0
	for _, end := range ev.ExtraEnd {
		var items []string
		for _, key := range ev.Extra[begin:end] {
			items = append(items, fmt.Sprintf("%s:%s:%x", forms[key.Form], key.Text, key.Raw))
		}
		entries, begin = append(entries, "("+strings.Join(items, " ")+")"), end
	}
	return "[" + strings.Join(entries, " ") + "]"
}

// showBatch writes a batch: one line for each event, and one for what was left
// out, if anything was.
func showBatch(b *Batch) string {
	var lines []string
	for i := range b.Events {
		lines = append(lines, show(&b.Events[i]))
	}
	if b.Malformed+b.Unknown+b.Odd+b.LostRemovals > 0 {
		lines = append(lines, fmt.Sprintf("malformed=%d unknown=%d odd=%d lost_removals=%d", b.Malformed, b.Unknown, b.Odd, b.LostRemovals))
	}
	return strings.Join(lines, "\n")
}
