"""Models' published configurations, as far as sizes depend on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def write(directory: Path, config: dict[str, Any]) -> str:
    """Write a model's configuration into its directory, and return that."""
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
