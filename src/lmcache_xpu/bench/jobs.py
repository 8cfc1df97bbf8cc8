"""The jobs of one engine in this process, which its parent process asks for.

    python -m lmcache_xpu.bench.jobs VALUES

VALUES is a JSON object for `Settings.load`. Jobs are lines of JSON on the standard input (see
`answer`). Answers are lines that begin with `MARK`, each a JSON object; everything else is the
engine's own output.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
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

MARK = "BENCH "
SETTLE_S = 1.0  # stores go on after an answer
TURN_REPEATS = 3  # later turns of one history


def say(**facts: Any) -> None:
    """Write one line for the parent process, at once: a server writes to the same pipe."""
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps(facts)}\n".encode())


def python_s() -> float:
    """Time a fixed piece of Python: hosts were seen to change their speed by 1.7."""
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
    time.sleep(SETTLE_S)
    engine.forget()
    engine.zero()
    warm = engine.written(prompt)
    return float((cold == warm).float().mean())


def link_gb_s(repeats: int, devices: int) -> dict[str, float]:
    """Time one large copy from pinned memory (on CPU: a plain copy) and back; GB/s.

    Args:
        repeats: of the copy; the median counts.
        devices: that copy at the same time, each as much; the rate is that of all together.
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
    time.sleep(SETTLE_S / 2)
    seconds["own prefix"] = engine.seconds(prompt)
    if tier:
        engine.forget()
        seconds["tier"] = engine.seconds(prompt)
    seconds["python"] = python_s()
    return seconds


def later_turns(engine: Engine, turns: Sequence[Turn], *, tier: bool) -> list[dict[str, float]]:
    """Time later turns at once, several times: histories in the engine's own cache, in the tier."""
    histories = [engine.prompt(turn.history) for turn in turns]

    def ask() -> float:
        return engine.seconds(
            *(
                history + engine.prompt(turn.new)
                for history, turn in zip(histories, turns, strict=True)
            )
        )

    for history in histories:
        engine.seconds(history)
    rounds = []
    for _ in range(TURN_REPEATS):
        time.sleep(SETTLE_S / 2)
        seconds = {"own prefix": ask()}
        if tier:
            time.sleep(SETTLE_S / 2)
            engine.forget()
            seconds["tier"] = ask()
        seconds["python"] = python_s()
        rounds.append(seconds)
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
        case {"warm up": int() as length}:  # what is compiled at first use
            return {"seconds": engine.seconds(engine.prompt(length))}
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
            return {"load": decode(engine, decoding, keeps=hits == "own cache")}
        case {"converse": dict() as load}:
            return {"load": converse(engine, Conversations(**load))}
        case {"share": dict() as load}:
            return {"load": share(engine, Sharing(**load), tier=tier)}
    raise ValueError(f"a job that is none: {job}")


def main() -> None:
    """Start the engine, and do jobs until the standard input ends."""
    status = 1
    try:
        _do_jobs()
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # LMCache's threads would keep the process, a failed one too


def _do_jobs() -> None:
    settings = Settings.load(json.loads(sys.argv[1]))
    # Without offload a server is for LMCache's own connector to it, whose variant names one.
    if settings.is_server if settings.offload else settings.cache == "server":
        command = server_command if settings.offload else lmcache_server
        settings = at_server(settings, start_server(settings, command))  # ends with this process
    os.environ.update(engine_variables(settings))
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: its cache is looked at
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    engine = Engine(settings)
    say(started=True)
    for line in sys.stdin:
        job = json.loads(line)
        time.sleep(SETTLE_S / 2)  # the engine before this one may still store
        say(**answer(engine, job["do"], job["hits"]))


def at_server(settings: Settings, url: str) -> Settings:
    """Return the settings of an engine beside a server: with our connector, or with LMCache's."""
    words = tuple(word.replace(SERVER_URL, url) for word in settings.extra_args)
    return settings.model_copy(update={"server_url": url, "extra_args": words})


if __name__ == "__main__":
    main()
