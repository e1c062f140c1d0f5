"""Loads vLLM's vllm/distributed/kv_events.py without vLLM: stand-ins take the
place of what it imports, none of which its publisher needs for its work here.
"""
import dataclasses
import logging
import pathlib
import sys
import types
import zipfile


@dataclasses.dataclass
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def unused(*args):
    raise NotImplementedError("a stand-in was called")


STAND_INS = {
    "vllm.config": {"KVEventsConfig": KVEventsConfig},
    "vllm.config.kv_events": {"KVEventsConfig": KVEventsConfig},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils.network_utils": {
        "get_ip": unused,
        "get_tcp_uri": unused,
        "is_valid_ipv6_address": unused,
        "split_zmq_path": unused,
    },
    "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
}


def source(path):
    path = pathlib.Path(path)
    if path.suffix == ".whl":
        return zipfile.ZipFile(path).read("vllm/distributed/kv_events.py")
    return (path / "kv_events.py").read_bytes()


def load(path):
    logging.basicConfig(level=logging.CRITICAL + 1)
    for name, members in STAND_INS.items():
        for end in (i for i, c in enumerate(name + ".") if c == "."):
            sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
        vars(sys.modules[name]).update(members)
    module = types.ModuleType("vllm.distributed.kv_events")
    sys.modules[module.__name__] = module
    exec(compile(source(path), f"{path}/kv_events.py", "exec"), module.__dict__)
    return module
