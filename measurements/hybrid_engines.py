"""What a hit and a store cost in engines of models with windows or states, asked alternately.

    PYTHONPATH=src python measurements/hybrid_engines.py qwen3.6 --json OUT

Models are configurations alone: vLLM makes their weights up. For a GPU. Three engines share it:
without a connector, with this package, and with vLLM's OffloadingConnector. Prints each answer, and
whether a hit restored all blocks to the byte.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lmcache_xpu.bench.jobs import Prompts, exactness, warm_up
from lmcache_xpu.bench.runner import Child, machine
from lmcache_xpu.bench.shapes import shape_named
from lmcache_xpu.bench.variants import variants_named
from lmcache_xpu.launch.serve import built_for

ROWS = (
    Prompts(61440, 4096),
    Prompts(16384, 1024),
    Prompts(16384, 1024, count=4),
    Prompts(65536),
)
STEP = 8192  # tokens
MEMORY_FRACTION = 0.25  # of the device, for each engine
COMMON = {"vocab_size": 32_000, "max_position_embeddings": 131_072, "dtype": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's shape, in layers of several kinds."""

    config: dict[str, Any]  # of its config.json
    layers: tuple[str, ...]  # kinds, repeated
    repeats: int
    cpu_gib: float
    arguments: list[str] = field(default_factory=list)  # of vLLM

    def write(self, directory: Path) -> None:
        """Write the model's config.json."""
        kinds = [*self.layers] * self.repeats
        values = {**COMMON, **self.config, "layer_types": kinds, "num_hidden_layers": len(kinds)}
        (directory / "config.json").write_text(json.dumps(values))


WINDOW, WHOLE, STATE = "sliding_attention", "full_attention", "linear_attention"
MODELS = {
    "qwen3.6": Model(  # of 27 billion parameters, a third of its depth
        config={
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        layers=(STATE, STATE, STATE, WHOLE),
        repeats=5,
        cpu_gib=24,
        arguments=["--additional-config", json.dumps({"gdn_prefill_backend": "triton"})],
    ),
    "gemma3": Model(
        config={
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
        },
        layers=(WINDOW,) * 5 + (WHOLE,),
        repeats=3,
        cpu_gib=16,
    ),
    "gpt-oss": Model(  # of 20 billion parameters, half of its depth
        config={
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        layers=(WINDOW, WHOLE),
        repeats=6,
        cpu_gib=16,
    ),
}


def main(
    shape: Annotated[str, typer.Argument(help=", ".join(MODELS))],
    json_path: Annotated[Path, typer.Option("--json", help="For the figures")],
    repeats: Annotated[int, typer.Option(help="Of each row")] = 2,
) -> None:
    """Measure a shape; the figures so far are written after each row."""
    model, console, device = MODELS[shape], Console(stderr=True), built_for()
    dense = shape_named("8b")
    engine = {**dense.settings, "cpu_gib": model.cpu_gib, "memory_fraction": MEMORY_FRACTION}
    engines = replace(dense, settings=engine)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model.write(Path(directory))
        children = []
        for variant in variants_named(engines, ["none", "ours", "offloading"]):
            values = variant.values(engines, directory, device, graphs=False)
            values["extra_args"] += ["--max-num-batched-tokens", str(STEP), *model.arguments]
            variables = variant.variables(engines, device)
            child = Child(variant, values, variables, timeout_s=900, console=console)
            children.append(stack.enter_context(child))
        for child in children:
            child.ask("start", partial(warm_up, length=STEP))
        for child in children:
            child.ask("long prompt", partial(warm_up, length=5 * STEP))
            if child.variant.hits == "tier":
                child.result.exact = child.ask("exactness", partial(exactness, length=STEP))
            print(child.variant.name, child.result.exact, child.result.error, flush=True)
        for row in ROWS * repeats:
            for child in children:
                if rounds := child.ask(str(row), row.measure):
                    child.result.rounds.setdefault(str(row), []).extend(rounds)
                print(row, child.variant.name, rounds, child.result.error or "", flush=True)
            results = [asdict(c.result) | {"medians": c.result.medians} for c in children]
            json_path.write_text(json.dumps({"machine": machine(), "results": results}))


if __name__ == "__main__":
    typer.run(main)
