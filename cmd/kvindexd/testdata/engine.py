"""An engine's prefix cache behind a real libzmq publisher: vLLM's event structs
(msgspec), SHA-256 block hashes, one batch a request.

usage: engine.py map|array int|bytes BLOCK_SIZE
Prints "ready EVENTS REPLAY", then obeys lines of JSON:
  {"serve": {"tokens": [...], "images": [{"offset", "length", "identifier"}],
             "lora": "", "salt": ""}}   -> tokens that came from the cache
  {"evict": N}                          -> blocks left; the N oldest go
  {"clear": true}                       -> 0
Each answer is followed by the number of batches published so far.
"""
import hashlib
import json
import sys
import time
from collections import Counter, deque
from typing import Any, Optional, Union

import msgspec
import zmq

form, hashes, bs = sys.argv[1], sys.argv[2], int(sys.argv[3])
array = form == "array"
Hash = Union[bytes, int]


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: Optional[int] = None


class KVCacheEvent(msgspec.Struct, array_like=array, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[Hash]
    parent_block_hash: Optional[Hash]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]
    extra_keys: Optional[list[Optional[tuple[Any, ...]]]] = None
    group_idx: Optional[int] = None
    kv_cache_spec_kind: Optional[str] = None
    kv_cache_spec_sliding_window: Optional[int] = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[Hash]
    medium: Optional[str]
    group_idx: Optional[int] = None


class AllBlocksCleared(KVCacheEvent):
    pass


ctx = zmq.Context()
pub = ctx.socket(zmq.PUB)
pub.set_hwm(100000)
pub.bind("tcp://127.0.0.1:*")
router = ctx.socket(zmq.ROUTER)
router.bind("tcp://127.0.0.1:*")
print("ready", *(s.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0") for s in (pub, router)), flush=True)

encoder, ring, seq = msgspec.msgpack.Encoder(), deque(maxlen=10000), 0
# As in vLLM, content that is computed again is a second block of its own.
pool, copies = deque(), Counter()


def publish(events):
    global seq
    payload = encoder.encode(EventBatch(time.time(), events, 0))
    ring.append((seq, payload))
    pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])
    seq += 1


def external(h):
    return h if hashes == "bytes" else int.from_bytes(h[-8:], "big")


def extra(p, i):
    keys = [p["lora"]] if p.get("lora") else []
    for m in p.get("images") or []:
        if m["offset"] < (i + 1) * bs and m["offset"] + m["length"] > i * bs:
            keys.append((m["identifier"], m["offset"] - i * bs))
    if p.get("salt") and i == 0:
        keys.append(p["salt"])
    return tuple(keys) or None


def serve(p):
    chain, keys, parent = [], [], b""
    for i in range(len(p["tokens"]) // bs):
        keys.append(extra(p, i))
        parent = hashlib.sha256(repr((parent, p["tokens"][i * bs : (i + 1) * bs], keys[i])).encode()).digest()
        chain.append(parent)
    hit = 0
    while hit < len(chain) and copies[chain[hit]]:
        hit += 1
    if hit < len(chain):
        pool.extend(chain[hit:])
        copies.update(chain[hit:])
        new = keys[hit:]
        publish([
            BlockStored(
                [external(h) for h in chain[hit:]], external(chain[hit - 1]) if hit else None,
                p["tokens"][hit * bs : len(chain) * bs], bs, None, "GPU", p.get("lora") or None,
                new if any(new) else None, 0, "full_attention",
            )
        ])
    return min(hit, (len(p["tokens"]) - 1) // bs) * bs


def evict(n):
    gone = [pool.popleft() for _ in range(min(n, len(pool)))]
    copies.subtract(gone)
    publish([BlockRemoved([external(h) for h in gone], "GPU", 0)])
    return len(pool)


def clear():
    pool.clear()
    copies.clear()
    publish([AllBlocksCleared()])
    return 0


def replay():
    client, _, start = router.recv_multipart()
    for number, payload in ring:
        if number >= int.from_bytes(start, "big"):
            router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
    router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])


poller = zmq.Poller()
poller.register(sys.stdin, zmq.POLLIN)
poller.register(router, zmq.POLLIN)
while True:
    ready = dict(poller.poll())
    if router in ready:
        replay()
    if sys.stdin.fileno() not in ready:
        continue
    line = sys.stdin.readline()
    if not line:
        break
    order = json.loads(line)
    if "serve" in order:
        answer = serve(order["serve"])
    elif "evict" in order:
        answer = evict(order["evict"])
    else:
        answer = clear()
    print(answer, seq, flush=True)
