package zmqwire

// Message is one message of a publisher: live from its PUB socket, or one reply
// of its replay socket. The slices are the reader's and valid until the next
// read.
type Message struct {
	// Topic may be empty; replies of older publishers carry none.
	Topic []byte
	// Seq counts a publisher's batches from 0.
	Seq uint64
	// Payload is one msgpack batch.
	Payload []byte
}
