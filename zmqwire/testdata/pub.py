"""A libzmq publisher as vLLM's is one: PUB and, with --replay, a ROUTER.

Prints "ready EVENTS REPLAY" with the endpoints it has, then obeys lines:
  send N SIZE      publish N batches of SIZE bytes; answers "sent NEXT"
  raw HEX HEX ...  publish frames as they are; answers "sent NEXT"
  burn N           use up N numbers; answers "sent NEXT"
  quit
Each payload begins with its seq in 8 bytes, big endian.
"""
import argparse
import sys
from collections import deque

import zmq

END = (-1).to_bytes(8, "big", signed=True)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--endpoint", default="tcp://127.0.0.1:*")
    a.add_argument("--connect", action="store_true")
    a.add_argument("--replay", default="")
    a.add_argument("--layout", choices=["old", "new"], default="new")
    a.add_argument("--topic", default="")
    a.add_argument("--ring", type=int, default=10000)
    a.add_argument("--hwm", type=int, default=100000)
    a.add_argument("--replay-hwm", type=int, default=-1)
    a.add_argument("--xpub", action="store_true", help="print each subscription")
    args = a.parse_args()

    ctx = zmq.Context()
    pub = ctx.socket(zmq.XPUB if args.xpub else zmq.PUB)
    pub.set_hwm(args.hwm)
    pub.setsockopt(zmq.LINGER, 1000)
    if ":[" in args.endpoint or "::" in args.endpoint:
        pub.setsockopt(zmq.IPV6, 1)
    if args.connect:
        pub.connect(args.endpoint)
        endpoint = args.endpoint
    else:
        pub.bind(args.endpoint)
        endpoint = pub.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    replay, replay_endpoint = None, "-"
    if args.replay:
        replay = ctx.socket(zmq.ROUTER)
        replay.setsockopt(zmq.LINGER, 0)
        if args.replay_hwm >= 0:
            replay.set_hwm(args.replay_hwm)
        replay.bind(args.replay)
        replay_endpoint = replay.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    print("ready", endpoint, replay_endpoint, flush=True)

    topic, seq, ring = args.topic.encode(), 0, deque(maxlen=args.ring)

    def service():
        client, _, start = replay.recv_multipart()
        head = [client, b""] if args.layout == "old" else [client, b"", topic]
        for s, payload in ring:
            if s >= int.from_bytes(start, "big"):
                replay.send_multipart(head + [s.to_bytes(8, "big"), payload])
        head = [client, b""] if args.layout == "old" else [client, b"", b""]
        replay.send_multipart(head + [END, b""])

    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    if replay is not None:
        poller.register(replay, zmq.POLLIN)
    if args.xpub:
        poller.register(pub, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if replay is not None and replay in ready:
            service()
        if args.xpub and pub in ready:
            print("subscription", pub.recv().hex(), flush=True)
        if sys.stdin.fileno() not in ready:
            continue
        words = sys.stdin.readline().split()
        if not words or words[0] == "quit":
            break
        if words[0] == "send":
            body = bytes(max(0, int(words[2]) - 8))
            for _ in range(int(words[1])):
                number = seq.to_bytes(8, "big")
                payload = number + body
                pub.send_multipart([topic, number, payload])
                if replay is not None:
                    ring.append((seq, payload))
                seq += 1
        elif words[0] == "raw":
            pub.send_multipart([bytes.fromhex(w.strip(".")) for w in words[1:]])
        elif words[0] == "burn":
            seq += int(words[1])
        print("sent", seq, flush=True)
    ctx.destroy(linger=1000)


main()
