"""Models of other kinds than the demo's Llama, with random weights, made in a second.

As in `lmcache_xpu.harness.random_model`, queries and keys are scaled up so that what a model says
depends on every token before. None has a tokenizer: the engine is given tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from lmcache_xpu.harness.random_model import EXACT, make_model

HIDDEN, LAYERS, HEADS, VOCABULARY, POSITIONS = 256, 8, 4, 4096, 8192
GAIN = 2.0  # of queries and keys

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def with_kv_heads(heads: int, parent: Path) -> Path:
    """The exact Llama of `random_model`, with so many KV heads."""
    spec = dataclasses.replace(EXACT, name=f"exact-{heads}", kv_heads=heads)
    return make_model(spec, parent)


def mla(parent: Path) -> Path:
    """A dense DeepSeek-V3, whose attention keeps one latent for all heads, with an MTP layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **COMMON,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=512,  # what vLLM has a CPU kernel for
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_routed_experts=8,
        first_k_dense_replace=100,  # of the layers: no experts at all
    )
    with torch.device("meta"):
        shapes = _shapes(DeepseekV3ForCausalLM(config))
    first, mtp = "model.layers.0.", f"model.layers.{LAYERS}."
    shapes |= {
        mtp + name.removeprefix(first): shape
        for name, shape in shapes.items()
        if name.startswith(first)
    }
    norms = ("enorm", "hnorm", "shared_head.norm")
    shapes |= {f"{mtp}{name}.weight": (HIDDEN,) for name in norms}
    shapes |= {
        f"{mtp}{name}.weight": (VOCABULARY, HIDDEN) for name in ("embed_tokens", "shared_head.head")
    }
    shapes[f"{mtp}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    values = {
        **config.to_dict(),
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
    }
    return _write(parent / "mla", values, shapes)


def eagle(parent: Path, target: Path) -> Path:
    """An EAGLE drafter of one layer for a Llama."""
    values = json.loads((target / "config.json").read_text())
    hidden, heads, width = (values[n] for n in ("hidden_size", "num_attention_heads", "head_dim"))
    kv, inner = values["num_key_value_heads"], values["intermediate_size"]
    layer = "layers.0."
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        layer + "self_attn.q_proj.weight": (heads * width, hidden),
        layer + "self_attn.k_proj.weight": (kv * width, hidden),
        layer + "self_attn.v_proj.weight": (kv * width, hidden),
        layer + "self_attn.o_proj.weight": (hidden, heads * width),
        layer + "post_attention_layernorm.weight": (hidden,),
        layer + "mlp.gate_proj.weight": (inner, hidden),
        layer + "mlp.up_proj.weight": (inner, hidden),
        layer + "mlp.down_proj.weight": (hidden, inner),
    }
    return _write(parent / "eagle", {**values, "num_hidden_layers": 1}, shapes)


def gemma3(parent: Path) -> Path:
    """A Gemma 3: three of four layers attend to a window, and the last one to the whole prompt."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=256,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
        query_pre_attn_scalar=16,  # of 64: queries and keys have norms of their own,
    )
    with torch.device("meta"):
        shapes = _shapes(Gemma3ForCausalLM(config))
    values = {**config.to_dict(), "architectures": ["Gemma3ForCausalLM"]}
    return _write(parent / "gemma3", values, shapes, norm=0.0)  # its norms multiply by 1 + weight


def gemma4(parent: Path) -> Path:
    """A Gemma 4's configuration: windows, and whole attention with wider heads. No weights."""
    from transformers import Gemma4TextConfig

    config = Gemma4TextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=64,
        num_global_key_value_heads=1,
        global_head_dim=128,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        sliding_window=256,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
    )
    values = {**config.to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    return _write(parent / "gemma4", values, {})


def gpt_oss(parent: Path) -> Path:
    """A gpt-oss's configuration: windows and sinks in every second layer. No weights."""
    from transformers import GptOssConfig

    config = GptOssConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )
    values = {**config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    return _write(parent / "gpt-oss", values, {})


STATES = {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def qwen3_5(parent: Path) -> Path:
    """A Qwen 3.5's configuration, its text alone: three of four layers keep a state. No weights."""
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**COMMON, **STATES)
    values = {**config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"]}
    return _write(parent / "qwen3-5", values, {})


def qwen3_next(parent: Path) -> Path:
    """A Qwen3-Next's configuration: three of four layers keep a state. No weights."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        **COMMON,
        **STATES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _write(
        parent / "qwen3-next", {**config.to_dict(), "architectures": ["Qwen3NextForCausalLM"]}, {}
    )


def mistral(parent: Path) -> Path:
    """A Mistral 7B v0.1's configuration: every layer attends to a window. No weights."""
    from transformers import MistralConfig

    config = MistralConfig(**COMMON, num_key_value_heads=2, head_dim=64, sliding_window=512)
    values = {**config.to_dict(), "architectures": ["MistralForCausalLM"]}
    return _write(parent / "mistral", values, {})


def llama4(parent: Path) -> Path:
    """A Llama 4's configuration: three of four layers attend to a stretch. No weights."""
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size_mlp=2 * HIDDEN,
        num_local_experts=4,
        num_experts_per_tok=1,
        moe_layers=[],
        interleave_moe_layer_step=0,
        attention_chunk_size=896,  # in which hits of 2,048 and 2,304 tokens end
        layer_types=(["chunked_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
        no_rope_layers=[1, 1, 1, 0] * (LAYERS // 4),
    )
    values = {**config.to_dict(), "architectures": ["Llama4ForCausalLM"]}
    return _write(parent / "llama4", values, {})


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def _write(
    directory: Path, values: dict[str, Any], shapes: dict[str, tuple[int, ...]], norm: float = 1.0
) -> Path:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.full(shape, norm)
        gain = math.sqrt(shape[1]) if "embed_tokens" in name else 1.0
        if any(part in name for part in ("q_proj", "k_proj", "kv_a_proj")):
            gain = GAIN
        return torch.randn(shape, generator=generator) * (gain / math.sqrt(shape[1]))

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**values, "dtype": "float32"}))
    weights = {name: weight(name, shape) for name, shape in sorted(shapes.items())}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
