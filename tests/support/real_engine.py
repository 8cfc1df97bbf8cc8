"""A real vLLM on CPU with real LMCache in this process, for the probes that ask it."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from typing import Any

from packaging.version import Version
from support.probes import connector_options

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: faults can be planted
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    TOKENIZERS_PARALLELISM="false",
)

CHUNK, BLOCK, KV_HEADS = 256, 128, 2
STOCK = {"kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": None}
# On a chunk's boundary, inside a block, and on a block's boundary inside a chunk.
LENGTHS = {"boundary": 4 * CHUNK, "inside": 4 * CHUNK + 77, "block": 3 * CHUNK + BLOCK}


def prompt(length: int) -> list[int]:
    chosen = random.Random(length)
    return [chosen.randrange(300, 4000) for _ in range(length)]


def sampling() -> Any:
    """How each prompt is answered: 24 tokens, the likeliest."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def cached(name: str) -> int:
    """Tokens that a hit may restore: whole chunks, and never the last token of a prompt."""
    whole = LENGTHS[name] // CHUNK * CHUNK
    return whole - 1 if whole == LENGTHS[name] else whole


def caches(worker):
    return list(worker.model_runner.kv_caches)


def zero(worker):
    from lmcache_xpu.vllm_hooks.worker_hooks import worker_half

    if (half := worker_half(worker.vllm_config)) is not None:
        half.transfers.let_write()  # as before a step: stores that still read blocks end
    for cache in caches(worker):
        cache.zero_()


def digests(worker):
    """Per layer, the digests of the blocks that hold anything."""
    return [
        [hashlib.sha256(b.contiguous().numpy().tobytes()).hexdigest() for b in cache if b.any()]
        for cache in caches(worker)
    ]


def _record_every_step(engine: Any) -> None:
    """Record steps without an answer too.

    Before 0.28, `LLM` leaves these out, and with them what the next request hit (servers do not).
    """
    import vllm

    if Version(vllm.__version__) >= Version("0.28"):
        return
    take_output = engine.engine_core.get_output

    def get_output():
        output = take_output()
        if output.scheduler_stats is not None and not output.outputs:
            engine.logger_manager.record(
                scheduler_stats=output.scheduler_stats, iteration_stats=None
            )
        return output

    engine.engine_core.get_output = get_output


def is_exact(asked: dict[str, Any], name: str = "inside") -> bool:
    """Whether tokens and bytes were those of the recomputed prompt of `LENGTHS`."""
    return asked["same"] and asked["restored"] >= cached(name) // BLOCK


class Engine:
    """The engine and what is asked of it.

    Args:
        model: its directory.
        disk: directory of the disk tier; None without one.
        mode: `standard`; or LMCache's own engine, `layerwise` as `serve` starts it, and `stock` by
            LMCache's name, whole chunks at once.
        settings: of this package.
        lmcache: options of the connector.
        options: of vLLM.
    """

    def __init__(
        self,
        model: str,
        disk: str | None,
        mode: str,
        *,
        settings: dict[str, Any] | None = None,
        lmcache: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM

        if mode == "layerwise":  # the memory of a pool that is too large to be pinned
            from lmcache_xpu.stock import gpu_connectors  # and LMCache, see `connector`

            gpu_connectors.most_pinned = lambda device: 2**20
        connector = connector_options(
            {
                "model": model,
                "cpu_gib": 0.25,
                "disk_path": disk,
                "disk_gib": None if disk is None else 1,
                "layerwise": mode != "standard",
                "save_decode": True,  # a preempted request's hit reaches into its answer
                **(settings or {}),
            }
        )
        if mode == "stock":
            connector["kv_transfer_config"] |= STOCK
        connector["kv_transfer_config"]["kv_connector_extra_config"] |= {
            **({"lmcache.use_layerwise": False} if mode == "stock" else {}),
            **(lmcache or {}),
        }
        usual = {
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,  # chunked prefill: stores and loads in several steps
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**26,
            "disable_log_stats": False,
            **connector,
        }
        self.llm = LLM(model, **{**usual, **options})
        _record_every_step(self.llm.llm_engine)

    def ask(self, tokens: list[int], **options: Any) -> list[int]:
        return self.ask_at_once([tokens], **options)[0]

    def ask_at_once(self, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        asked = [{"prompt_token_ids": tokens, **options} for tokens in prompts]
        answers = self.llm.generate(asked, sampling(), use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def race(self, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
        """Ask all at once; the number of each prompt and its answer, the first to end first."""
        core, ended = self.llm.llm_engine, []
        for number, tokens in enumerate(prompts):
            core.add_request(f"{number} in a race", {"prompt_token_ids": tokens}, sampling())
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    number = int(output.request_id.split()[0])
                    ended.append((number, list(output.outputs[0].token_ids)))
        return ended

    def forget(self) -> None:
        """Empty the engine's own cache: not only its index, its bytes too."""
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc(zero)

    def blocks(self) -> list[list[str]]:
        return self.llm.collective_rpc(digests)[0]

    def counter(self, name: str) -> int:
        named = {metric.name: metric for metric in self.llm.get_metrics()}
        return named[f"vllm:{name}"].value

    def close_after(self, look: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Return what a function finds with this engine and arguments, and shut the engine down."""
        result = look(self, *args)
        self.llm.llm_engine.engine_core.shutdown()
        return result

    def external_hits(self) -> int:
        return self.counter("external_prefix_cache_hits")


def restored(cold: list[list[str]], warm: list[list[str]]) -> int:
    """Blocks that are byte for byte the same, in the layer that has the fewest."""
    return min(len(set(a) & set(b)) for a, b in zip(cold, warm, strict=True))


def hit(engine: Engine, tokens: list[int], cold: list[list[str]], **options: Any) -> dict:
    engine.forget()
    before = engine.external_hits()
    answer = engine.ask(tokens, **options)
    return {
        "answer": answer,
        "hit": engine.external_hits() - before,
        "restored": restored(cold, engine.blocks()),
    }


def counts(worker):
    """LMCache's references and pins that outlive a request."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    objs = engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache.values()
    facts = [obj.metadata for obj in objs]
    return sorted({(fact.ref_count, fact.pin_count) for fact in facts})
