"""A publisher with libzmq's own sockets, which can be killed:

  engine.py new|old EVENTS REPLAY RING HWM      in the manner of vLLM's; the
                                                layout of its replies
  engine.py PATH EVENTS REPLAY RING HWM         vLLM's ZmqEventPublisher; PATH is
                                                a directory that has its
                                                kv_events.py, or its wheel

It prints the endpoints that it bound and then obeys lines on stdin:
  pub HEX    publish a batch -> its number
  post HEX   the same, without an answer
  burn       use up a number, as an encoding that fails does -> it
"""
import os
import sys
from collections import deque

import zmq

sys.dont_write_bytecode = True
END = (-1).to_bytes(8, "big", signed=True)


def bound(socket):
    return socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")


class Lines:
    """The lines of stdin. What was read ahead is known, so that a poller is not
    asked to wait for it.
    """

    def __init__(self):
        self.ahead = b""

    def ready(self):
        return b"\n" in self.ahead

    def next(self):
        while not self.ready():
            some = os.read(0, 1 << 16)
            if not some:
                return ""
            self.ahead += some
        line, _, self.ahead = self.ahead.partition(b"\n")
        return line.decode()


class Libzmq:
    """One thread publishes and answers replays in turn."""

    def __init__(self, layout, events, replay, ring, hwm):
        self.head = [b"", b""] if layout == "new" else [b""]
        self.ring, self.seq = deque(maxlen=ring), 0
        context = zmq.Context.instance()
        self.pub = context.socket(zmq.PUB)
        self.pub.set_hwm(hwm)
        self.pub.bind(events)
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.SNDHWM, 2 * (ring + 1))
        self.router.bind(replay)

    def endpoints(self):
        return bound(self.pub), bound(self.router)

    def publish(self, payload):
        self.ring.append((self.seq, payload))
        self.pub.send_multipart([b"", self.seq.to_bytes(8, "big"), payload])
        return self.burn()

    def burn(self):
        self.seq += 1
        return self.seq - 1

    def serve(self, lines):
        """Answers replays until there is a line to read."""
        poller = zmq.Poller()
        poller.register(0, zmq.POLLIN)
        poller.register(self.router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if lines.ready() else None))
            if self.router in ready:
                self.answer()
            if lines.ready() or 0 in ready:
                return

    def answer(self):
        client, _, start = self.router.recv_multipart()
        for seq, payload in self.ring:
            if seq >= int.from_bytes(start, "big"):
                self.router.send_multipart([client, *self.head, seq.to_bytes(8, "big"), payload])
        self.router.send_multipart([client, *self.head, END, b""])


class VLLM:
    """vLLM's publisher, which has a thread of its own."""

    def __init__(self, path, events, replay, ring, hwm):
        import msgspec
        import vllm_events

        self.module = vllm_events.load(path)
        self.decode = msgspec.msgpack.Decoder(self.module.KVEventBatch).decode
        self.publisher = self.module.ZmqEventPublisher(
            0, endpoint=events, replay_endpoint=replay, buffer_steps=ring, hwm=hwm)
        self.seq = 0

    def endpoints(self):
        return bound(self.publisher._pub), bound(self.publisher._replay)

    def publish(self, payload):
        return self.put(self.decode(payload))

    def burn(self):
        return self.put(self.module.KVEventBatch(ts=0.0, events=[object()]))

    def put(self, batch):
        self.publisher.publish(batch)
        self.seq += 1
        return self.seq - 1

    def serve(self, lines):
        """Its own thread does."""


def main(kind, events, replay, ring, hwm):
    make = Libzmq if kind in ("new", "old") else VLLM
    engine = make(kind, events, replay, int(ring), int(hwm))
    print(*engine.endpoints(), flush=True)
    lines = Lines()
    while True:
        engine.serve(lines)
        word, _, arg = lines.next().partition(" ")
        if word == "":
            return
        seq = engine.burn() if word == "burn" else engine.publish(bytes.fromhex(arg))
        if word != "post":
            print(seq, flush=True)


main(*sys.argv[1:])
