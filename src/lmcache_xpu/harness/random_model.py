"""A Llama with random weights and a trained tokenizer, made on this machine in seconds.

It answers nothing sensible, but what it says depends on every token before: with a KV cache
that is wrong in one block the greedy text differs. Random weights alone don't give that; the
usual initialisation makes attention nearly uniform and each token repeat itself. Here the
queries and keys are scaled up (`qk_gain`), so that attention picks a few tokens and the choice
depends on content and position; and differences grow from layer to layer, but by far less than
it would take to raise float32 rounding to the size of a token's effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1  # raise when the same ModelSpec gives another model

SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# Each turn only appends, so the prompt of one turn is a prefix of the next one's.
CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The description that a model is made from; equal descriptions give equal files."""

    name: str  # a word for people; part of the directory's name
    hidden: int  # width of the residual stream
    layers: int  # number of layers
    heads: int  # number of query heads; `hidden / heads` is free of `head_dim`
    kv_heads: int  # number of key and value heads
    head_dim: int = 64  # elements per head; one that vLLM's CPU attention knows
    intermediate: int  # width of the feed-forward part
    vocabulary: int = 4096  # number of tokens
    positions: int = 16384  # longest sequence, in tokens
    dtype: str = "float32"  # a torch dtype's name
    qk_gain: float  # spread of queries and keys; 1 is the usual one
    seed: int = 0  # the weights' seed

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of one token's keys and values in all layers, bytes."""
        size = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * size


# float32, so that a reused KV cache gives the same tokens as a recomputed one.
DEMO = ModelSpec(
    name="demo", hidden=512, layers=8, heads=8, kv_heads=2, intermediate=1408, qk_gain=2.0
)
EXACT = ModelSpec(
    name="exact", hidden=256, layers=4, heads=4, kv_heads=2, intermediate=512, qk_gain=3.0
)


def make_model(spec: ModelSpec, parent: Path) -> Path:
    """Return the model's directory under `parent`; makes it if it isn't there.

    It is a complete Hugging Face directory (configuration, weights, tokenizer, chat template)
    and appears at once or not at all, also with several makers at work.
    """
    text = corpus()
    key = json.dumps([FORMAT, dataclasses.asdict(spec)]) + text
    target = parent / f"{spec.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if target.exists():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=parent))
    try:
        silent = _write_tokenizer(spec, text, work)
        _write_weights(spec, silent, work)
        config = llama_config(spec)
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        work.chmod(0o755)  # mkdtemp and safetensors write for their owner only
        (work / "model.safetensors").chmod(0o644)
        try:
            work.rename(target)
        except OSError:
            if not target.exists():  # if it does, another maker was first, with the same files
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def corpus() -> str:
    """Return English text that every CPython carries."""
    from pydoc_data.topics import topics

    return "\n".join(text for _, text in sorted(topics.items()))


def llama_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the content of a Llama's `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index("<|begin|>"),
        "eos_token_id": SPECIAL.index("<|end|>"),
        "dtype": spec.dtype,
    }


def _write_tokenizer(spec: ModelSpec, text: str, directory: Path) -> list[int]:
    """Train and write the tokenizer; return the tokens that the model is not to say."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "model_max_length": spec.positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Special tokens and parts of UTF-8 sequences: no chunk of an answer shows them at once, and the
    # time to first token is that of the first chunk with text.
    return [
        token
        for token in range(tokenizer.get_vocab_size())
        if not (piece := tokenizer.decode([token])) or "\ufffd" in piece
    ]


def _write_weights(spec: ModelSpec, silent: list[int], directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)
    hidden, queries, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # Rows, columns and gain of each matrix, which keeps the spread of its input, times the gain.
    of_layers: dict[str, tuple[int, int, float]] = {
        "self_attn.q_proj": (queries, hidden, spec.qk_gain),
        "self_attn.k_proj": (keys, hidden, spec.qk_gain),
        "self_attn.v_proj": (keys, hidden, 1),
        "self_attn.o_proj": (hidden, queries, 1),
        "mlp.gate_proj": (spec.intermediate, hidden, 1),
        "mlp.up_proj": (spec.intermediate, hidden, 1),
        "mlp.down_proj": (hidden, spec.intermediate, 1),
    }
    matrices = {
        "model.embed_tokens": (spec.vocabulary, hidden, math.sqrt(hidden)),
        "lm_head": (spec.vocabulary, hidden, 1),
    }
    norms = ["model.norm"]
    for layer in (f"model.layers.{number}" for number in range(spec.layers)):
        matrices |= {f"{layer}.{name}": matrix for name, matrix in of_layers.items()}
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    weights = {f"{name}.weight": torch.ones(hidden, dtype=dtype) for name in norms}
    for name, (rows, columns, gain) in matrices.items():  # in this order they are drawn
        weight = torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))
        weights[f"{name}.weight"] = weight.to(dtype)
    weights["lm_head.weight"][silent] = 0  # never the largest of thousands
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
