package zmqwire

import (
	"bytes"
	"io"
	"net"
	"testing"
)

// A large message is not gathered, and must not overtake the small ones that
// were.
func TestBatchWriterKeepsOrder(t *testing.T) {
	for _, sizes := range [][]int{
		{10 << 10, 40 << 10, 10 << 10},
		{1, writeBuffer / 2, 1, writeBuffer/2 - 1, writeBuffer, 3},
		{writeBuffer - 1, 1, 1, 20 << 10, 33 << 10, 9 * writeBuffer},
	} {
		var want []byte
		var parts [][]byte
		for i, n := range sizes {
			part := bytes.Repeat([]byte{byte(i + 1)}, n)
			parts, want = append(parts, part), append(want, part...)
		}
		a, b := net.Pipe()
		got := make(chan []byte, 1)
		go func() {
			all, _ := io.ReadAll(b)
			got <- all
		}()
		w := batchWriter{conn: a}
		if err := w.write(parts...); err != nil {
			t.Fatal(err)
		}
		if err := w.flush(); err != nil {
			t.Fatal(err)
		}
		a.Close()
		if !bytes.Equal(<-got, want) {
			t.Errorf("sizes %v: the bytes came in another order", sizes)
		}
	}
}
