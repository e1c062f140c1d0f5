package zmqwire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// ErrMalformed is in the chain of every error that says that bytes do not have
// the form which a publisher promises. A message that gives it changes no
// state: no event of it was read, and its seq, if it has one, is not to be
// believed.
var ErrMalformed = errors.New("malformed")

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

const (
	seqBytes = 8
	// endSeq marks the end of a replay, and nothing else: it is no batch's
	// number, for the number after it would be 0 again.
	endSeq = math.MaxUint64
)

// ParseMessage reads a live message: [topic] [seq, 8 bytes big endian]
// [payload]. Anything else is an error in whose chain is ErrMalformed.
func ParseMessage(frames [][]byte) (Message, error) {
	if len(frames) != 3 {
		return Message{}, fmt.Errorf("zmqwire: %w message: %d frames, expected 3: topic, seq, payload", ErrMalformed, len(frames))
	}
	seq, err := parseSeq(frames[1])
	if err != nil {
		return Message{}, err
	}
	if seq == endSeq {
		return Message{}, fmt.Errorf("zmqwire: %w message: its seq is the end marker of a replay", ErrMalformed)
	}
	return Message{Topic: frames[0], Seq: seq, Payload: frames[2]}, nil
}

// ParseReply reads one reply of a replay socket, as a DEALER receives it, with
// or without the empty delimiter: [seq] [payload] up to vLLM 0.25, [topic]
// [seq] [payload] from 0.26 on. end says that the publisher has no more: the
// reply's seq is all ones and its payload is empty.
func ParseReply(frames [][]byte) (m Message, end bool, err error) {
	n := len(frames)
	if n < 2 || n > 4 {
		return Message{}, false, fmt.Errorf("zmqwire: %w reply: %d frames, expected 2 to 4: delimiter, topic, seq, payload", ErrMalformed, n)
	}
	if n == 4 && len(frames[0]) != 0 {
		return Message{}, false, fmt.Errorf("zmqwire: %w reply: a delimiter of %d bytes, expected none", ErrMalformed, len(frames[0]))
	}
	seq, err := parseSeq(frames[n-2])
	if err != nil {
		return Message{}, false, err
	}
	m = Message{Seq: seq, Payload: frames[n-1]}
	if n > 2 {
		// Of three frames the first is an empty delimiter or the topic
		// itself: either way it reads as the topic.
		m.Topic = frames[n-3]
	}
	if seq != endSeq {
		return m, false, nil
	}
	if len(m.Payload) != 0 {
		return Message{}, false, fmt.Errorf("zmqwire: %w reply: an end marker with a payload of %d bytes", ErrMalformed, len(m.Payload))
	}
	return Message{Topic: m.Topic}, true, nil
}

func parseSeq(frame []byte) (uint64, error) {
	if len(frame) != seqBytes {
		return 0, fmt.Errorf("zmqwire: %w message: a seq of %d bytes, expected %d", ErrMalformed, len(frame), seqBytes)
	}
	return binary.BigEndian.Uint64(frame), nil
}
