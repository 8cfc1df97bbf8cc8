"""vLLM's calls for each layer, and LMCache's generators, which know groups of layers.

LMCache counts groups of layers that move together as its layers, and vLLM calls for each layer of
the model. LMCache sees the call for the first layer of a group when it loads, for the last when it
stores. What it raises ends its own generator, and vLLM's calls go on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Layers", "load_calls", "store_calls"]

Layers = Generator[Any, None, None]
Groups = Sequence[tuple[int, int]]


def load_calls(
    load: Layers | None,
    groups: Groups,
    nothing: torch.Tensor,
    failed: Callable[[Exception], None],
) -> Layers:
    """Load group by group; yields once more than the model has layers.

    Args:
        load: LMCache's generator, which has begun; None where there is nothing to load.
        groups: the first layer of each, and the one behind its last.
        nothing: is yielded where LMCache loads nothing, or not yet.
        failed: is told what LMCache raises.
    """
    # The group before is to be there when LMCache hears of the next one.
    for calls in (1, *(last - first for first, last in groups)):
        loaded = None
        if load is not None:
            try:
                loaded = next(load)
            except Exception as error:
                failed(error)
                load = None
        for _ in range(calls):
            yield nothing if loaded is None else loaded


def store_calls(
    store: Layers | None, groups: Groups, failed: Callable[[Exception], None]
) -> Layers:
    """Store group by group; yields once more than the model has layers.

    Args:
        store: LMCache's generator, which is closed at the end; None where nothing is stored.
        groups: the first layer of each, and the one behind its last.
        failed: is told what LMCache raises.
    """
    try:
        for calls in (*(last - first for first, last in groups), 1):
            for _ in range(calls - 1):
                yield
            if store is not None:
                try:
                    next(store)
                except Exception as error:
                    store = None
                    failed(error)
            yield
    finally:
        if store is not None:
            store.close()
