"""One disk, engines of two TP sizes in turn: what ranks hold alike, and what they don't.

On CPU blocks of several heads are packed, so that a rank's heads can't be cut out of them. What
can be shared there is what each rank holds whole: MLA's latent, and a single KV head. How heads are
cut and joined is in gpu_connector/test_shards.py, and what disks and servers find of other sizes
in tiers/: `make test` has these. `make test-ranks` has the engines.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.real_engine import BLOCK, CHUNK, restored
from support.scripts import environment, printed, run_probe, threads_of_ranks
from support.tp_sizes_probe import CHUNKS

from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

MLA = {
    "attention_config": {"backend": "CPU_MLA"},
    "block_size": 16,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 2**28,
    "skip_tokenizer_init": True,
}
TOKENS = CHUNKS * CHUNK


@dataclasses.dataclass(frozen=True)
class Case:
    """A model whose KV cache is shared out in some way."""

    name: str
    options: dict[str, Any]
    shared: bool  # ranks hold the same
    sizes: tuple[int, int] = (1, 2)

    @property
    def block(self) -> int:
        return int(self.options.get("block_size", BLOCK))

    @property
    def id(self) -> str:
        return f"{self.name}-{'-'.join(map(str, self.sizes))}"


CASES = [
    Case("mla", MLA, True),
    Case("two heads", {}, False),
    Case("one head", {}, True),
    Case("one head", {}, True, (1, 4)),
    Case("one head", {}, True, (2, 4)),
    Case("mla", MLA, True, (1, 4)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.id)
def engines(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, list[dict]]:
    directory: Path = tmp_path_factory.mktemp("sizes")
    make = {
        "mla": tiny_models.mla,
        "one head": partial(tiny_models.with_kv_heads, 1),
        "two heads": partial(tiny_models.with_kv_heads, 2),
    }
    model = make[request.param.name](directory)
    reports: list[dict] = []

    def run(size: int, *steps: Any) -> list[dict]:
        env = environment(**threads_of_ranks(size))
        options = json.dumps({"tensor_parallel_size": size, **request.param.options})
        done = run_probe("tp_sizes", model, directory / "disk", options, json.dumps(steps), env=env)
        reports.append(printed(done))
        return [asked["answer"][0] for asked in reports[-1]["asked"]]

    small, large = request.param.sizes
    [zero] = run(small, 0)
    _, first, _ = run(large, [0, zero], 1, "leave", "again")
    run(small, [1, first], [0, zero])
    return request.param, reports


def same_answer(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """The second one was asked with the first token."""
    common = len(before["answer"])
    return bool(after["answer"][:common] == before["answer"])


def alike(computed: list[list[list[str]]]) -> list[list[list[str]]]:
    """Blocks of the ranks that computed the same bytes: of four, the first; see `support.ranks`."""
    return computed if len(computed) == 2 else computed[:1]


def same_blocks(first: list[list[str]], second: list[list[str]], case: Case) -> bool:
    """Whether two ranks hold the same bytes of the chunks, in each layer."""
    return restored(first, second) >= TOKENS // case.block


def test_each_size_loads_what_another_one_stored_or_finds_nothing(engines):
    case, (first, second, third) = engines
    hits = TOKENS if case.shared else 0
    assert first["asked"][0]["hit"] == 0
    pairs = (first["asked"][0], second["asked"][0]), (second["asked"][1], third["asked"][0])
    for before, after in pairs:
        assert after["hit"] == hits
        # Sums over ranks are exact in this model alone: MLA gives each size tokens of its own.
        assert same_answer(before, after) or case.options == MLA
        if case.shared:
            ranks = alike(before["blocks"]) + after["blocks"]
            assert all(same_blocks(ranks[0], rank, case) for rank in ranks[1:])


def test_its_own_chunks_are_found_by_a_size_that_comes_back(engines):
    case, (first, _, third) = engines
    back = third["asked"][1]
    assert back["hit"] == TOKENS
    assert same_blocks(back["blocks"][0], first["asked"][0]["blocks"][0], case)
    assert same_answer(first["asked"][0], back)


def test_ranks_load_from_one_disk(engines):
    case, (_, second, _) = engines
    _, computed, loaded = second["asked"]
    assert (computed["hit"], loaded["hit"]) == (0, TOKENS)
    assert same_answer(computed, loaded)
    stored = alike(computed["blocks"])
    for number, warm in enumerate(loaded["blocks"]):
        assert same_blocks(stored[number % len(stored)], warm, case)
    assert len(loaded["blocks"]) == len(computed["blocks"])


def test_what_ranks_hold_alike_is_on_disk_once(engines):
    case, (first, second, _) = engines
    written = {name: size for name, size in second["sizes"].items() if name not in first["sizes"]}
    stored = sum(size - HEADER_BYTES for size in written.values())
    [size] = {size - HEADER_BYTES for size in first["sizes"].values()}  # of a chunk of TP 1
    prompts = 1 if case.shared else 2  # it computed prompt 0, too, or found it
    assert stored <= 1.02 * prompts * CHUNKS * size
    assert len(written) == (CHUNKS if case.shared else 2 * 2 * CHUNKS)
