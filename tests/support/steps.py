"""Steps as vLLM's scheduler describes them."""

from __future__ import annotations

from types import SimpleNamespace as Fake


def step(new=(), cached=()):
    """(id, blocks, computed) of new requests; (id, blocks, computed, resumed) of others."""
    return Fake(
        scheduled_new_reqs=[
            Fake(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed in new
        ],
        scheduled_cached_reqs=Fake(
            req_ids=[row[0] for row in cached],
            new_block_ids=[None if row[1] is None else (row[1],) for row in cached],
            num_computed_tokens=[row[2] for row in cached],
            resumed_req_ids={row[0] for row in cached if row[3]},
        ),
    )
