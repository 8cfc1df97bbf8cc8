"""Makes what the tests of stored chunks read: the model, and what an engine stores of it.

    PYTHONPATH=SOURCE:tests .venv/bin/python tests/stored_by/make.py VERSION

SOURCE is the `src` of a checkout of that version.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from probe import CASES
from safetensors.torch import save_file

HERE = Path(__file__).parent
HIDDEN, LAYERS, VOCABULARY = 32, 3, 128  # one head, the smallest that vLLM's CPU attention knows
GAIN = 2.0  # of queries and keys: what is said depends on what was said before


def make_model(directory: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, gain: float = 1.0) -> torch.Tensor:
        weight = torch.randn(rows, HIDDEN, generator=generator) * (gain / math.sqrt(HIDDEN))
        return weight.to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, math.sqrt(HIDDEN)),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": normal(VOCABULARY),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "post_attention_layernorm.weight": ones.clone(),
            prefix + "self_attn.q_proj.weight": normal(HIDDEN, GAIN),
            prefix + "self_attn.k_proj.weight": normal(HIDDEN, GAIN),
        }
        names = ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
        for name in (*names, "mlp.down_proj"):
            weights[f"{prefix}{name}.weight"] = normal(HIDDEN)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def make(directory: Path) -> None:
    print(f"stored by {find_spec('lmcache_xpu').origin}")
    for case in CASES:
        done = subprocess.run(
            [sys.executable, HERE / "probe.py", "store", case],
            cwd=directory,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        print(case, done.stdout.splitlines()[-1])
    for file in directory.rglob("*"):
        if file.is_file() and file.parent.name == "kv-worker-0" and file.suffix != ".lmxkv":
            file.unlink()  # the directory's lock


if __name__ == "__main__":
    target = HERE / sys.argv[1]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    make_model(target / "model")
    make(target)
