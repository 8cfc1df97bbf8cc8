"""The layerwise connector as LMCache's engine and vLLM adapter drive it, for one request."""

from __future__ import annotations

from support.connectors import make, slots_of

from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector

LAYERS = 3
SPANS = ([0, 4, 8], [4, 8, 11])  # the last chunk ends inside a block


def connect(cache, **options) -> VLLMPagedMemLayerwiseXPUConnector:
    return make(cache, kind=VLLMPagedMemLayerwiseXPUConnector, **options)


def store(connector, objs, spans, slots, cache) -> None:
    """LMCacheEngine.store_layer: after step k, layer k - 2 is published."""
    steps = connector.batched_from_gpu(
        objs, *spans, kvcaches=cache.engine, slot_mapping=slots, offset=0, sync=True, req_id="r"
    )
    next(steps)
    for _ in range(LAYERS):
        next(steps)


def load(connector, objs, spans, slots, cache, **more) -> None:
    """LMCacheEngine.retrieve_layer: two steps at start, one per wait_for_layer_load."""
    steps = connector.batched_to_gpu(
        *spans, kvcaches=cache.engine, slot_mapping=slots, sync=False, **more
    )
    next(steps)
    for layer in range(LAYERS):
        steps.send(objs[layer])
    next(steps)


def moved(source, here, target, there):
    wanted = target.twin()
    for plane in range(source.planes):
        for layer in range(LAYERS):
            for here_slot, there_slot in zip(here.tolist(), there.tolist(), strict=True):
                wanted.put(plane, layer, there_slot, source.token(plane, layer, here_slot))
    return wanted.raw


def start(connector, cache):
    steps = connector.batched_to_gpu(
        *SPANS, kvcaches=cache.engine, slot_mapping=slots_of(4, 1, 3)[:11]
    )
    next(steps)
    return steps
