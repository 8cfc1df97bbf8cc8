"""vLLM's side: what LMCache's connector is told, where vLLM and LMCache disagree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu.vllm_connector import LMCacheXPUConnector

STEP = {"attention": "of the step"}


def connector(*, served: bool = True, can_load: tuple[bool | None, ...] = (True,)) -> Any:
    made: Any = object.__new__(LMCacheXPUConnector)
    made._served, made._overlap = served, None
    specs = [None if can is None else SimpleNamespace(can_load=can) for can in can_load]
    made._connector_metadata = SimpleNamespace(
        requests=[SimpleNamespace(load_spec=spec) for spec in specs]
    )
    return made


@pytest.mark.parametrize(
    ("made", "in_context", "given", "seen"),
    [
        (connector(), STEP, {}, STEP),
        (connector(), None, {"attn_metadata": STEP}, STEP),
        # A step that is one graph, up to vLLM 0.26: LMCache would skip the load, and the engine
        # compute from whatever the blocks hold. Seen on a card: no block of a hit was restored.
        (connector(can_load=(None, True)), None, {}, {}),
        (connector(can_load=(None, False)), None, {}, None),
        (connector(served=False), None, {}, None),
    ],
)
def test_a_load_is_not_skipped_for_want_of_attention_metadata(
    made, in_context, given, seen, monkeypatch
):
    found = []
    monkeypatch.setattr(
        LMCacheConnectorV1,
        "start_load_kv",
        lambda self, context, **kwargs: found.append(context.attn_metadata),
    )
    context = SimpleNamespace(attn_metadata=in_context)
    made.start_load_kv(context, **given)
    assert found == [seen]
    assert context.attn_metadata == in_context
