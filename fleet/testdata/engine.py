"""A libzmq publisher with a ring, in the manner of vLLM's: one thread that
publishes and answers replays in turn. Lines on stdin:
  pub HEX     publish a batch      -> its seq
  hide HEX    keep it for replays only, as if its message was lost -> its seq
  burn        use up a number      -> it
  slow MS     wait so long before each batch of a replay -> ok
"""
import sys
import time
from collections import deque

import zmq

END = (-1).to_bytes(8, "big", signed=True)
events, replays, layout = sys.argv[1:4]
ctx = zmq.Context()
pub = ctx.socket(zmq.PUB)
pub.set_hwm(100000)
pub.bind(events)
router = ctx.socket(zmq.ROUTER)
router.bind(replays)
print(*(s.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0") for s in (pub, router)), flush=True)

ring, seq, slow = deque(maxlen=10000), 0, 0
poller = zmq.Poller()
poller.register(sys.stdin, zmq.POLLIN)
poller.register(router, zmq.POLLIN)
while True:
    ready = dict(poller.poll())
    if router in ready:
        client, _, start = router.recv_multipart()
        head = [client, b"", b""] if layout == "new" else [client, b""]
        for number, payload in list(ring):
            if number >= int.from_bytes(start, "big"):
                time.sleep(slow / 1000)
                router.send_multipart(head + [number.to_bytes(8, "big"), payload])
        router.send_multipart(head + [END, b""])
    if sys.stdin.fileno() not in ready:
        continue
    word, _, arg = sys.stdin.readline().strip().partition(" ")
    if word == "":
        break
    if word == "slow":
        slow = int(arg)
        print("ok", flush=True)
        continue
    if word != "burn":
        ring.append((seq, bytes.fromhex(arg)))
    if word == "pub":
        pub.send_multipart([b"", seq.to_bytes(8, "big"), bytes.fromhex(arg)])
    print(seq, flush=True)
    seq += 1
