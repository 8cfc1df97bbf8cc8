"""A real vLLM on CPU whose prompts come from a shared tier, byte by byte, also when it is damaged.

Run by engine/test_shared_tier.py, with the arguments STEP MODEL PORT REFERENCE RUNNER; the server
of the shared tier listens on PORT. The step `store` recomputes prompts and stores them. The step
`find` is another engine: it finds them whole, then damaged, then stored again, and at last ends the
server. Each prints a JSON object last. RUNNER is as in engine_probe.py.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import redis
from support import newer_runner
from support.probes import end_with
from support.real_engine import CHUNK, LENGTHS, Engine, hit, prompt
from support.servers import PASSWORD

CHUNKS = sum(length // CHUNK for length in LENGTHS.values())


def counted(worker, name: str, **labels: str) -> float:
    """A sample of this package's metrics, of loads from the shared tier."""
    from prometheus_client import REGISTRY

    labels = {"direction": "load", "tier": "shared", **labels}
    return REGISTRY.get_sample_value(f"lmcache_xpu_{name}_total", labels) or 0.0


def empty_cpu_tier(worker) -> int:
    """Empty LMCache's memory, once nothing of it is lent; return how many objects are left."""
    from lmcache_xpu.cache.local_cache import LocalCache

    [cache] = LocalCache._of_engines.values()
    manager = cache._storage
    end = time.monotonic() + 20
    while manager._l1_manager._objects and time.monotonic() < end:
        manager.clear()
        time.sleep(0.01)
    return len(manager._l1_manager._objects)


def wait_until_stored(client: redis.Redis) -> int:
    """Wait until the server has every chunk; return how many it has, fewer after 20 seconds."""
    end = time.monotonic() + 20
    while client.dbsize() < CHUNKS and time.monotonic() < end:
        time.sleep(0.05)
    return client.dbsize()


def store(engine: Engine, client: redis.Redis, reference: Path) -> dict:
    report: dict = {}
    for name, length in LENGTHS.items():
        engine.forget()
        before = engine.external_hits()
        answer = engine.ask(prompt(length))
        report[name] = {
            "recompute": answer,
            "hit": engine.external_hits() - before,
            "cold": engine.blocks(),
        }
    reference.write_text(json.dumps(report))
    prompts = {name: {k: v for k, v in f.items() if k != "cold"} for name, f in report.items()}
    return {"prompts": prompts, "stored": wait_until_stored(client)}


def find(engine: Engine, client: redis.Redis, reference: Path) -> dict:
    cold = {name: facts["cold"] for name, facts in json.loads(reference.read_text()).items()}

    def ask(name: str) -> dict:
        [left] = engine.llm.collective_rpc(empty_cpu_tier)
        [loaded] = engine.llm.collective_rpc(counted, args=("tokens",))
        answer = hit(engine, prompt(LENGTHS[name]), cold[name])
        [after] = engine.llm.collective_rpc(counted, args=("tokens",))
        return {**answer, "left in the CPU tier": left, "loaded": after - loaded}

    report: dict = {"whole": {name: ask(name) for name in LENGTHS}}
    for name in client.scan_iter():
        value = bytearray(client.get(name))
        value[-len(value) // 2] ^= 1
        client.set(name, bytes(value))
    report["damaged"] = {name: ask(name) for name in LENGTHS}
    [report["corrupt"]] = engine.llm.collective_rpc(
        partial(counted, name="errors", reason="corrupt")
    )
    report["stored"] = wait_until_stored(client)
    report["stored again"] = {name: ask(name) for name in LENGTHS}
    client.shutdown(nosave=True)
    report["server gone"] = {name: ask(name) for name in LENGTHS}
    return report


if __name__ == "__main__":
    step, model, port, reference, runner = sys.argv[1:]
    if runner == "newer":
        newer_runner.use()
    tier = {"remote_url": f"redis://127.0.0.1:{port}", "remote_password": PASSWORD}
    client = redis.Redis(port=int(port), password=PASSWORD)
    probe = {"store": store, "find": find}[step]
    end_with(
        lambda: Engine(model, None, "standard", settings=tier).close_after(
            probe, client, Path(reference)
        )
    )
