"""The jobs of one engine in this process, which its parent process asks for.

    python -m lmcache_xpu.bench.jobs VALUES CONNECTION

VALUES is a JSON object for `Settings.load`. CONNECTION is the file descriptor of a connection to
the parent process: the engine's start is an empty answer, then each job (see `answer`) has one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from lmcache_xpu.bench.engine import Engine, synchronize
from lmcache_xpu.bench.load import Conversations, Decoding, Sharing
from lmcache_xpu.bench.load_jobs import converse, decode, share
from lmcache_xpu.bench.shapes import Turn
from lmcache_xpu.bench.variants import SERVER_URL, Hits, lmcache_server
from lmcache_xpu.launch.cache_server import server_command, start_server
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.settings import Settings

STORE_S = 1.0  # stores go on after an answer
TURN_REPEATS = 3  # later turns of one history


def python_s() -> float:
    """Time a fixed piece of Python, which shows how fast the host is."""
    begin = time.perf_counter()
    for _ in range(100_000):
        pass
    return time.perf_counter() - begin


def exactness(engine: Engine, length: int) -> float:
    """Return the share of blocks, in all layers, that a hit in the tier restores to the byte."""
    prompt = engine.prompt(length)
    engine.forget()
    engine.zero()
    cold = engine.written(prompt)
    time.sleep(STORE_S)
    engine.forget()
    engine.zero()
    warm = engine.written(prompt)
    return float((cold == warm).float().mean())


def link_gb_s(repeats: int, devices: int) -> dict[str, float]:
    """Time one large copy from pinned memory (on CPU: a plain copy) and back; GB/s.

    So many devices copy at the same time; the rate is that of all together, a median.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    size = 2**30 if device else 2**28
    names = [f"{device.type}:{number}" for number in range(devices)] if device else ["cpu"]
    hosts = [
        torch.empty(size, dtype=torch.uint8, pin_memory=device is not None).fill_(1) for _ in names
    ]
    on_devices = [torch.ones(size, dtype=torch.uint8, device=name) for name in names]
    rates = {}
    for name, targets, sources in (("load", on_devices, hosts), ("store", hosts, on_devices)):
        times = []
        for _ in range(repeats + 2):
            synchronize(devices)
            begin = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            synchronize(devices)
            times.append(time.perf_counter() - begin)
        rates[name] = len(names) * size / sorted(times)[len(times) // 2] / 1e9
    return rates


def whole_prompt(engine: Engine, length: int, *, tier: bool) -> dict[str, float]:
    """Time a whole prompt: recomputed, in the engine's own cache, in the tier."""
    prompt = engine.prompt(length)
    seconds = {"recompute": engine.seconds(prompt)}
    time.sleep(STORE_S / 2)
    seconds["own prefix"] = engine.seconds(prompt)
    if tier:
        engine.forget()
        seconds["tier"] = engine.seconds(prompt)
    seconds["python"] = python_s()
    return seconds


def later_turns(engine: Engine, turns: Sequence[Turn], *, tier: bool) -> list[dict[str, float]]:
    """Time later turns at once, several times: histories in the engine's own cache, in the tier."""
    histories = [engine.prompt(turn.history) for turn in turns]
    pairs = list(zip(histories, turns, strict=True))
    for history in histories:
        engine.seconds(history)

    def ask() -> float:
        return engine.seconds(*(history + engine.prompt(turn.new) for history, turn in pairs))

    rounds = []
    for _ in range(TURN_REPEATS):
        time.sleep(STORE_S / 2)
        seconds = {"own prefix": ask()}
        if tier:
            time.sleep(STORE_S / 2)
            engine.forget()
            seconds["tier"] = ask()
        rounds.append({**seconds, "python": python_s()})
    return rounds


def answer(engine: Engine, job: dict[str, Any], hits: Hits) -> dict[str, Any]:
    """Do one job that the parent process asks for.

    Args:
        engine: the engine to measure.
        job: its only item names it.
        hits: see `Variant`.

    Raises:
        ValueError: there is no such job.
    """
    tier = hits == "tier"
    match job:
        case {"warm up": int() as length}:  # kernels are compiled at first use
            engine.seconds(engine.prompt(length))
            return {}
        case {"exact": int() as length}:
            return {"exact": exactness(engine, length)}
        case {"link": dict() as copies}:
            return {"link": link_gb_s(**copies)}
        case {"whole": int() as length}:
            return {"rounds": [whole_prompt(engine, length, tier=tier)]}
        case {"later": list() as turns}:
            return {"rounds": later_turns(engine, [Turn(*turn) for turn in turns], tier=tier)}
        case {"decode": dict() as load}:
            decoding = Decoding(**load | {"hit": Turn(**load["hit"])})
            return {"rounds": [decode(engine, decoding, keeps=hits == "own cache")]}
        case {"converse": dict() as load}:
            return {"rounds": [converse(engine, Conversations(**load))]}
        case {"share": dict() as load}:
            return {"rounds": [share(engine, Sharing(**load), tier=tier)]}
    raise ValueError(f"a job that is none: {job}")


def main() -> None:
    """Start the engine, and do jobs until the parent process closes the connection."""
    connection: Connection[dict[str, Any], Any] = Connection(int(sys.argv[2]))
    os.set_inheritable(connection.fileno(), False)
    settings = Settings.load(json.loads(sys.argv[1]))
    # Without offload a server is for LMCache's own connector to it, whose variant names one.
    if settings.is_server if settings.offload else settings.cache == "server":
        command = server_command if settings.offload else lmcache_server
        settings = at_server(settings, start_server(settings, command))  # ends with this process
    os.environ.update(engine_variables(settings))
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # `Engine` needs the scheduler in this process
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    engine = Engine(settings)
    connection.send({})
    with suppress(EOFError):
        while True:
            job, hits = connection.recv()
            time.sleep(STORE_S / 2)  # the engine before this one may still store
            connection.send(answer(engine, job, hits))


def at_server(settings: Settings, url: str) -> Settings:
    """Return the settings of an engine beside a server: with our connector, or with LMCache's."""
    words = tuple(word.replace(SERVER_URL, url) for word in settings.extra_args)
    return settings.model_copy(update={"server_url": url, "extra_args": words})


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # LMCache's threads would keep the process, a failed one too
