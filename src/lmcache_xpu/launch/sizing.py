"""The size of a token's KV cache, and how many users' histories a tier holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.model_support import check_offload, read_model
from lmcache_xpu.model.kv_cache_groups import WINDOW_TOKENS
from lmcache_xpu.model.layer_kinds import LayerKinds

GIB = 2**30
# A simulation of recorded sessions of coding agents: how many times the tokens of an endless cache
# are computed, by the tokens of tier for each agent at work.
AGENT_TOKENS = 250_000
AGENT_COMPUTE = {AGENT_TOKENS: 1.15, 125_000: 1.55, 75_000: 3.3, 25_000: 13.4}
STEP_TOKENS = 2048  # of a step, after which a state is kept; vLLM's usual least
WITH_KV = ("full_attention", "attention", "sliding_attention", "hybrid", "hybrid_sliding")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The shape of one token's keys and values on one device."""

    kind: str  # MHA, GQA or MLA
    layers: int  # with a KV cache
    width: int  # elements per layer: keys and values of this device's heads, or MLA's latent
    dtype: str  # of the elements
    notes: tuple[str, ...] = ()  # for a reader
    state_bytes: int = 0  # of the states of all layers that keep one, at one place of a prompt
    window_layers: int = 0  # of the layers, those that attend to a window
    window: int = 0  # tokens
    tier_dtype: str = ""  # of the elements in the tiers; empty: as in the engine

    @property
    def token_bytes(self) -> int:
        """Bytes per token on one device, without states, in the tiers."""
        return self.layers * self.width * ITEM_BYTES[self.tier_dtype or self.dtype]

    def history_bytes(self, tokens: int, chunk_tokens: int) -> int:
        """Bytes that a tier keeps of a history of whole chunks, on one device.

        A state is kept for each step, and one below the end; see `connector.hit_ends`.
        """
        window = -(-self.window // chunk_tokens) * chunk_tokens
        kept = min(tokens, WINDOW_TOKENS + window * (tokens // WINDOW_TOKENS + 1))
        dropped = (tokens - kept) * self.token_bytes * self.window_layers // self.layers
        states = -(-tokens // max(STEP_TOKENS, chunk_tokens)) + 1
        return tokens * self.token_bytes - dropped + states * self.state_bytes

    def __str__(self) -> str:
        tiers = f" ({self.tier_dtype} in the tiers)" if self.tier_dtype else ""
        return f"{self.kind}, {self.layers} layers x {self.width} x {self.dtype}{tiers}"

    @classmethod
    def of_model(
        cls,
        model: str,
        *,
        kv_dtype: str = "auto",
        dtype: str = "auto",
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        server: bool = False,
        tier_dtype: str = "auto",
    ) -> KVShape:
        """Read a model directory, its config.json, or its configuration on a hub.

        `dtype` is the model's, `kv_dtype` its KV cache's, `tier_dtype` that of its copies in the
        tiers. `server`: the tiers are those of LMCache's server. Raises SettingsError if there is
        no such model, or its KV cache can't be offloaded.
        """
        for name in {kv_dtype, dtype} - {"auto"}:
            check_dtype(name)  # before a hub is asked
        config = read_model(model)
        kinds = check_offload(config, tier_dtype=tier_dtype)
        dtype = _dtype(config, kv_dtype, dtype)
        layers, state_bytes, notes = config.num_hidden_layers, 0, []
        if kinds.states:
            layers, state_bytes = _states(config, kinds, dtype, tensor_parallel, pipeline_parallel)
            size = f"{state_bytes / 2**20:.1f} MiB, counted once for each {STEP_TOKENS:,} tokens"
            notes.append(
                f"states of {size}, as vLLM keeps them at the end of a step, and once below the end"
                if state_bytes
                else "the states of its other layers are not counted: their size is not known here"
            )
        windows = kinds.window if kinds.whole else 0  # all of the same kind are kept whole
        window = int(getattr(config, "sliding_window", None) or 0) if windows else 0
        if windows:
            where = f"behind {WINDOW_TOKENS:,} tokens the CPU and disk tiers keep it in few places"
            kept = "LMCache's server keeps all of it" if server else where
            notes.append(f"{windows} layers attend to a window: {kept}")
        if server:
            windows = window = 0
        kind, width, copies = _layer(config, tensor_parallel)
        if copies:
            notes.append(copies)
        return cls(
            kind=kind,
            layers=-(-layers // pipeline_parallel),  # the largest group's
            width=width,
            dtype=dtype,
            notes=tuple(notes),
            state_bytes=state_bytes,
            window_layers=-(-windows // pipeline_parallel),
            window=window,
            tier_dtype="" if tier_dtype == "auto" else tier_dtype,
        )


@dataclass(frozen=True, slots=True)
class Tier:
    """The room in one tier, per device; `enough` says whether all users fit.

    With agents, `compute` is the most tokens that are computed, in those of an endless cache; None
    where it is more than `AGENT_COMPUTE` says.
    """

    gib: float
    tokens: int
    histories: int
    enough: bool
    compute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer of `lmcache-xpu size`; bytes and GiB are per device."""

    token_bytes: int
    history_tokens: int  # of one user, in whole chunks; the rest is computed again
    history_bytes: int
    needed_gib: float  # for all users' histories
    tiers: dict[str, Tier]  # they don't add up: what is on disk was in the CPU tier
    machine_gib: dict[str, float]  # by tier but the engine's: of the machine, for all devices


def fit(
    shape: KVShape,
    *,
    context_tokens: int,
    users: int,
    chunk_tokens: int,
    tiers_gib: Mapping[str, float | None],
    devices: int = 1,
    agents: bool = False,
) -> Fit:
    """Count the histories of `context_tokens` that each tier holds; leaves out a tier of None.

    With `agents`, the users are coding agents. Raises SettingsError if a history is shorter
    than a chunk.
    """
    chunks = context_tokens // chunk_tokens
    if not chunks:
        raise SettingsError(
            f"a history of {context_tokens} tokens with chunks of {chunk_tokens}",
            "at least one whole chunk",
            "Nothing shorter is stored. Lower chunk_tokens, or expect no hits.",
        )
    tokens = chunks * chunk_tokens
    history = shape.history_bytes(tokens, chunk_tokens)
    tiers = {}
    for name, gib in tiers_gib.items():
        if gib is not None:
            own = dataclasses.replace(shape, tier_dtype="").history_bytes(tokens, chunk_tokens)
            held = int(gib * GIB) / (own if name == "engine" else history)
            held_tokens = int(held * chunks) * chunk_tokens
            each = held_tokens / users if agents else 0
            compute = next((x for least, x in AGENT_COMPUTE.items() if each >= least), None)
            tiers[name] = Tier(gib, held_tokens, int(held), held >= users, compute)
    return Fit(
        token_bytes=shape.token_bytes,
        history_tokens=tokens,
        history_bytes=history,
        needed_gib=users * history / GIB,
        tiers=tiers,
        machine_gib={name: tier.gib * devices for name, tier in tiers.items() if name != "engine"},
    )


def _layer(config: Any, tensor_parallel: int) -> tuple[str, int, str]:
    """Return a layer's kind, its elements on one device, and what devices hold alike."""
    if latent := getattr(config, "kv_lora_rank", None):
        alike = f"each {tensor_parallel} devices hold the same, and one of them stores it for all"
        width: int = latent + config.qk_rope_head_dim  # every device has all of it
        return "MLA", width, alike if tensor_parallel > 1 else ""
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    fewer, more = sorted((kv_heads, tensor_parallel))
    if heads % tensor_parallel or more % fewer:
        raise SettingsError(
            f"tensor_parallel={tensor_parallel} for {heads} heads, {kv_heads} of them with "
            "keys and values",
            "a number that divides the heads, and that divides or is a multiple of those",
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    others = (getattr(config, "per_layer_config", None) or {}).values()
    more_elements = sum(layer.get("head_dim", head_dim) - head_dim for layer in others)
    head_dim += -(-more_elements // config.num_hidden_layers)  # the mean of all layers
    # vLLM repeats heads when there are more devices than heads.
    width = 2 * max(1, kv_heads // tensor_parallel) * head_dim
    copies = tensor_parallel // kv_heads
    alike = f"each {copies} devices hold the same, and each stores a copy of its own"
    return "MHA" if kv_heads == heads else "GQA", width, alike if copies > 1 else ""


def _states(
    config: Any, kinds: LayerKinds, dtype: str, tensor: int, pipeline: int
) -> tuple[int, int]:
    """Count the layers with keys and values, and the bytes of the states of all others, 0 unknown.

    A gated delta net keeps `width_k x width_v` for each of its value heads, in 32 bits where the
    configuration says so, and the last inputs of a convolution over queries, keys and values.
    """
    names = list(
        getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    )
    layers = sum(name in WITH_KV for name in names) or kinds.whole + kinds.window
    if not (key := getattr(config, "linear_key_head_dim", None)):
        return layers, 0
    heads = config.linear_num_value_heads
    inputs = 2 * config.linear_num_key_heads * key + heads * config.linear_value_head_dim
    item = ITEM_BYTES[dtype]
    wide = ITEM_BYTES.get(str(getattr(config, "mamba_ssm_dtype", None) or dtype), item)
    state = heads * key * config.linear_value_head_dim * wide
    state += (config.linear_conv_kernel_dim - 1) * inputs * item
    return layers, -(-names.count("linear_attention") // pipeline) * state // tensor


def _dtype(config: Any, kv_dtype: str, model_dtype: str) -> str:
    if kv_dtype == "auto":
        kv_dtype = _checkpoint_dtype(config) or model_dtype
    if kv_dtype == "auto":
        dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
        if dtype == "float32":  # vLLM serves it as float16 unless told otherwise
            return "float16"
        return dtype if dtype in ITEM_BYTES else "bfloat16"
    return check_dtype(kv_dtype)


def _checkpoint_dtype(config: Any) -> str:
    """Return the type of the KV cache that a quantized checkpoint asks vLLM for; empty: none."""
    quantization = getattr(config, "quantization_config", None) or {}
    inner = quantization.get("quantization") or quantization
    scheme = inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo") or ""
    if isinstance(scheme, str):
        return scheme.lower()
    return "fp8" if scheme.get("num_bits", 8) == 8 else f"{scheme.get('num_bits')} bits"


def check_dtype(kv_dtype: str) -> str:
    """Return the short name of a KV cache's type; raises SettingsError if none is counted here."""
    name = "fp8" if kv_dtype.startswith("fp8") else kv_dtype
    if name not in ITEM_BYTES:
        raise SettingsError(f"kv_dtype={kv_dtype}", f"auto, {', '.join(ITEM_BYTES)}")
    return name
