"""What tests do in the workers of an engine with LMCache's server, and what they see there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from support.real_engine import Engine


def half():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_half


def busy(worker) -> bool:
    return half().transfers.busy


def way_of_asking(worker) -> str:
    """How this worker asks where chunks are."""
    return type(half().transfers.moves._places).__name__


def answers(worker) -> bool:
    """Whether the server does, as far as the worker knows."""
    return half()._client.healthy.is_set()


def damage(worker) -> None:
    """Overwrite all of the server's memory."""
    half().transfers._server.lent.pool.fill_(7)


def on_next(worker, direction: str, act: Callable[[], None]) -> None:
    """Do something once, in the middle of the next store or load of a worker."""
    [copies] = half().transfers.groups
    move = getattr(copies, direction)

    def fault(*args: Any) -> Any:
        delattr(copies, direction)
        half = max(1, len(args[0]) // 2)
        move(*(part[:half] for part in args))
        act()
        return move(*args)

    setattr(copies, direction, fault)


def on_next_layer(worker, act: Callable[[], None]) -> None:
    """Do something once, when the engine comes to the second layer of a step that loads."""
    in_steps, count = half().transfers.in_steps, 0
    before_layer = in_steps.before_layer

    def fault(name: str) -> None:
        nonlocal count
        count += bool(in_steps._loads)
        if count == 2:
            del in_steps.before_layer
            act()
        before_layer(name)

    in_steps.before_layer = fault


def watch_scheduling(worker) -> None:
    """Count the loads that begin before the worker hears of their step."""
    in_steps = half().transfers.in_steps
    begin = in_steps.begin_answered
    in_steps.begun_early = 0

    def counting(tokens: int, *, scheduling: bool = False) -> None:
        begin(tokens, scheduling=scheduling)
        in_steps.begun_early += scheduling and len(in_steps._loads)

    in_steps.begin_answered = counting


def begun_early(worker) -> int:
    """Return what `watch_scheduling` has counted."""
    return int(half().transfers.in_steps.begun_early)


def spoil(worker) -> None:
    """Let what the next step loads be something else, as is seen when it has been copied.

    Then the server's memory is as before, and the load too late.
    """
    from lmcache_xpu.cache.server import GivenUpError
    from lmcache_xpu.copies.moves import Located

    [copies] = half().transfers.groups
    check, load = Located.check, copies.beside_layers
    memory = half().transfers._server.lent.pool
    before = memory.clone()

    def give_up(located: Any) -> None:
        Located.check = check
        memory.copy_(before)
        raise GivenUpError("late")

    def overwritten(chunks: Any, objects: Any, *rest: Any) -> Any:
        del copies.beside_layers
        Located.check = give_up
        for obj in objects:
            numbers = obj[:-64].view(torch.float32)  # with a seal at the end
            numbers.copy_(torch.linspace(-2, 2, len(numbers)))
        return load(chunks, objects, *rest)

    copies.beside_layers = overwritten


def ways(worker) -> dict[str, float]:
    """How loads ran so far."""
    from prometheus_client import REGISTRY

    names = ("step", "async", "computed")
    name = "lmcache_xpu_loads_total"
    return {way: REGISTRY.get_sample_value(name, {"way": way}) or 0.0 for way in names}


def counted(worker) -> dict[str, float]:
    from prometheus_client import REGISTRY

    return {
        f"{sample.labels['direction']} {sample.labels['reason']}": sample.value
        for metric in REGISTRY.collect()
        if metric.name == "lmcache_xpu_errors"
        for sample in metric.samples
        if sample.name.endswith("_total")
        and sample.labels["tier"] in ("cpu", "server")
        and sample.value
    }


def wait_for(engine: Engine, look: Callable[[Any], bool], *, until: bool) -> bool:
    """Wait until every worker sees it so; whether that came within 20 s."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if set(engine.llm.collective_rpc(look)) == {until}:
            return True
        time.sleep(0.05)
    return False
