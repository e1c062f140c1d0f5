"""Real libzmq peers of a publisher under test.

sub ENDPOINT TOPIC [bind]   prints "ready ENDPOINT"; for each line "want N" it
                            receives N messages and prints "got N FIRST LAST SHA1"
dealer ENDPOINT START       asks for a replay; prints a line "FRAMES SEQ LEN" per
                            reply and "end FRAMES"
dealer-bare ENDPOINT START  the same without the delimiter; prints "silence"
                            when nothing comes
"""
import hashlib
import sys

import zmq

END = b"\xff" * 8


def sub(ctx, endpoint, topic, bind):
    s = ctx.socket(zmq.SUB)
    s.setsockopt(zmq.RCVTIMEO, 15000)
    s.setsockopt(zmq.HEARTBEAT_IVL, 50)
    s.set_hwm(0)
    s.subscribe(topic.encode())
    if bind:
        s.bind(endpoint)
        endpoint = s.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    else:
        s.connect(endpoint)
    print("ready", endpoint, flush=True)
    # libzmq sends a bound socket's subscription from the thread that uses it,
    # so the wait for a command is one on the socket, too.
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    poller.register(s, 0)
    while True:
        while sys.stdin.fileno() not in dict(poller.poll(20)):
            s.getsockopt(zmq.EVENTS)
        line = sys.stdin.readline()
        if not line:
            break
        n, digest, seqs = int(line.split()[1]), hashlib.sha1(), []
        for _ in range(n):
            frames = s.recv_multipart()
            assert len(frames) == 3, frames
            digest.update(b"".join(frames))
            seqs.append(int.from_bytes(frames[1], "big"))
        print("got", n, seqs[0], seqs[-1], digest.hexdigest(), flush=True)


def dealer(ctx, endpoint, start, delimiter):
    s = ctx.socket(zmq.DEALER)
    s.setsockopt(zmq.RCVTIMEO, 5000 if delimiter else 500)
    s.setsockopt(zmq.LINGER, 0)
    s.connect(endpoint)
    s.send_multipart(([b""] if delimiter else []) + [start.to_bytes(8, "big")])
    while True:
        try:
            frames = s.recv_multipart()
        except zmq.Again:
            print("silence", flush=True)
            return
        if frames[-2] == END and not frames[-1]:
            print("end", len(frames), flush=True)
            return
        print(len(frames), int.from_bytes(frames[-2], "big"), len(frames[-1]), flush=True)


def main():
    ctx, kind = zmq.Context(), sys.argv[1]
    if kind == "sub":
        sub(ctx, sys.argv[2], sys.argv[3], "bind" in sys.argv[4:])
    else:
        dealer(ctx, sys.argv[2], int(sys.argv[3]), kind == "dealer")
    ctx.destroy(linger=0)


main()
