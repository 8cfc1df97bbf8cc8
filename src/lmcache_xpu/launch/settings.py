"""The one place where this deployment is configured.

`Settings` is read from keyword values (the command line) and from `LMCACHE_XPU_*` variables,
checked once, and then turned into the two things that read it: vLLM's arguments and LMCache's
configuration. LMCache's part travels inside vLLM's `--kv-transfer-config`, so the command
line shows everything and nothing can disagree with it.

Sizes are in GiB (2**30 bytes) and lengths in tokens; the unit ends each name.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from lmcache_xpu import versions
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.transfer import pool_memory

__all__ = ["ENV_PREFIX", "Settings", "variables"]

ENV_PREFIX = "LMCACHE_XPU_"
# Not settings of a deployment but switches for diagnosis, read inside the engine's processes by
# plugin.py, seam.py, versions.py and devices.py.
DIAGNOSTIC_VARIABLES = frozenset(
    ENV_PREFIX + name for name in ("STOCK", "DEVICES", "ALLOW_UNTESTED", "KERNELS_READ_HOST")
)

# What vLLM takes on CPU when it isn't told: 92 % of the machine's memory, which leaves
# LMCache's CPU tier no room.
CPU_KV_CACHE_GIB = 4.0
CPU_BLOCK_TOKENS = 128


def _split(value: object) -> object:
    """Let a variable hold arguments as a shell would write them."""
    return shlex.split(value) if isinstance(value, str) else value


def variables(values: Mapping[str, object]) -> dict[str, str]:
    """Settings as the `LMCACHE_XPU_*` variables that `Settings.load` reads; None is left empty."""
    return {ENV_PREFIX + name.upper(): _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return shlex.join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


class Settings(BaseSettings):
    """What to serve, on which device, and where the KV cache goes.

    Build it with `Settings.load`, which reports every mistake as a `SettingsError`.
    """

    model_config = SettingsConfigDict(
        allow_inf_nan=False,
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,  # compose and helm pass unset values as empty ones
        extra="forbid",
        frozen=True,
    )

    # The server.
    model: str = Field(min_length=1, description="Model directory, or its name on a hub")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on")
    api_key: SecretStr | None = Field(None, description="Key that clients of /v1 have to send")
    served_model_name: str | None = Field(None, description="Model name in the API")
    drain_s: int = Field(0, ge=0, description="Seconds that requests get to end on SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log level of vLLM and LMCache"
    )

    # The engine.
    device: Literal["auto", "xpu", "cpu", "cuda"] = Field(
        "auto", description="Device of the engine; auto is what the installed vLLM is built for"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of weights and activations"
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt and answer, tokens")
    block_tokens: int | None = Field(None, ge=1, description="Tokens per block of the engine")
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="The engine's own KV cache per device, GiB; unset: what memory_fraction "
        f"leaves, and {CPU_KV_CACHE_GIB:g} on CPU",
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Part of the device's memory that the engine may use"
    )
    tensor_parallel: int = Field(1, ge=1, description="Devices that share each layer")
    data_parallel: int = Field(
        1,
        ge=1,
        description="Engines that share the requests, each with devices and tiers of its own",
    )
    prefix_caching: bool = Field(True, description="The engine's own prefix cache")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Tokens per engine step")
    max_num_seqs: int | None = Field(None, ge=1, description="Requests per engine step")
    enforce_eager: bool = Field(False, description="No compilation and no graphs")

    # Where the KV cache goes.
    offload: bool = Field(True, description="LMCache; without it this is plain vLLM")
    chunk_tokens: int = Field(256, ge=1, description="Tokens per stored chunk")
    cpu_gib: float = Field(5.0, gt=0, description="CPU tier per device, GiB, allocated at start")
    disk_path: Path | None = Field(None, description="Directory of the disk tier; unset: off")
    disk_gib: float | None = Field(None, gt=0, description="Disk tier per device, GiB")
    remote_url: str | None = Field(
        None,
        pattern=r"^rediss?://[^@/]+(/\d+)?$",
        description="A Valkey or Redis that engines share, redis://HOST:PORT; unset: off",
    )
    remote_password: SecretStr | None = Field(None, description="Password of that server")
    layerwise: bool = Field(False, description="Load and store layer by layer")
    layers_at_once: int | None = Field(
        None, ge=1, description="Layers that move together with layerwise; unset: by their size"
    )
    overlap_load: bool = Field(True, description="Load beside the engine's computing of layers")
    overlap_store: bool = Field(True, description="Store beside the engine's next steps")
    staging_mib: int = Field(256, ge=2, description="Device memory that copies go through, MiB")
    save_decode: bool = Field(False, description="Store the KV of answers too, not only prompts")
    # LMCache's default is Python's hash(), which differs from process to process; then what
    # one process stored, another one never finds.
    # sha256 of a pickle takes 7 us for a chunk of 256 tokens, of CBOR 55: then hashing is most of a
    # hit's work on the engine's thread. CBOR is for tiers that several Python versions share.
    hash_algorithm: Literal["sha256", "sha256_cbor"] = Field(
        "sha256", description="Hash that names a chunk; the same in every process"
    )

    kv_events: str | None = Field(
        None,
        pattern=r"^(tcp|ipc|inproc)://.+",
        description="Where routers hear of blocks that come and go, e.g. tcp://*:5557; unset: off",
    )

    extra_args: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        (), description="More arguments for vLLM, verbatim and last"
    )

    @classmethod
    def load(cls, values: Mapping[str, object]) -> Self:
        """Settings from `values`, then `LMCACHE_XPU_*` variables, then the defaults.

        Raises:
            SettingsError: a key is unknown, a value is not allowed, or two contradict.
        """
        known = {ENV_PREFIX + name.upper() for name in cls.model_fields}
        for name in os.environ:
            if name.startswith(ENV_PREFIX) and name not in known | DIAGNOSTIC_VARIABLES:
                close = difflib.get_close_matches(name, known, n=1)
                raise SettingsError(
                    f"the environment variable {name}",
                    close[0] if close else f"{ENV_PREFIX} and the name of a setting",
                    "Correct or unset it; `lmcache-xpu serve --help` lists the settings.",
                )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise _readable(error) from None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse settings that are right alone and wrong together."""
        block = self.block_tokens or (CPU_BLOCK_TOKENS if self.device == "cpu" else None)
        if self.device == "cpu" and block is not None and block % 32:
            raise SettingsError(
                f"block_tokens={block} with device=cpu",
                "a multiple of 32",
                f"vLLM's CPU attention packs 32 tokens; use {CPU_BLOCK_TOKENS}.",
            )
        if self.offload and block is not None and self.chunk_tokens % block:
            raise SettingsError(
                f"chunk_tokens={self.chunk_tokens} with blocks of {block} tokens",
                "chunk_tokens to be a multiple of block_tokens",
                f"Use {block * max(1, round(self.chunk_tokens / block))}.",
            )
        if (self.disk_path is None) != (self.disk_gib is None):
            missing = "disk_path" if self.disk_path is None else "disk_gib"
            raise SettingsError(
                f"only one of disk_path={self.disk_path} and disk_gib={self.disk_gib}",
                "both, or neither (no disk tier)",
                f"Set {missing} as well.",
            )
        if self.remote_url is not None and self.layerwise:
            raise SettingsError(
                "layerwise with a remote_url",
                "one of the two",
                "The shared tier holds whole chunks only.",
            )
        return self

    @property
    def devices(self) -> int:
        """Devices of all engines; sizes of tiers are per device."""
        return self.tensor_parallel * self.data_parallel

    def vllm_args(self) -> list[str]:
        """The arguments of `vllm serve`, the model first."""
        kv_cache_gib = self.kv_cache_gib
        if kv_cache_gib is None and self.device == "cpu":
            kv_cache_gib = CPU_KV_CACHE_GIB
        options: dict[str, object] = {
            "--host": self.host,
            "--port": self.port,
            "--served-model-name": self.served_model_name,
            "--shutdown-timeout": self.drain_s or None,
            "--dtype": self.dtype,
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_tokens,
            "--kv-cache-memory-bytes": kv_cache_gib and int(kv_cache_gib * 2**30),
            "--gpu-memory-utilization": self.memory_fraction,
            "--tensor-parallel-size": self.tensor_parallel,
            "--data-parallel-size": self.data_parallel if self.data_parallel > 1 else None,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--max-num-seqs": self.max_num_seqs,
            "--kv-transfer-config": json.dumps(self._kv_transfer()) if self.offload else None,
            "--kv-events-config": json.dumps(self._events()) if self.kv_events else None,
        }
        args = [self.model]
        for option, value in options.items():
            if value is not None:
                args += [option, str(value)]
        args.append(
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        )
        if self.enforce_eager:
            args.append("--enforce-eager")
        return args + list(self.extra_args)

    def lmcache_config(self) -> dict[str, object]:
        """LMCache's configuration, in LMCache's names; empty without `offload`."""
        if not self.offload:
            return {}
        config: dict[str, object] = {
            "chunk_size": self.chunk_tokens,
            "local_cpu": True,
            "max_local_cpu_size": self.cpu_gib,  # in units of 2**30 bytes, whatever its docs say
            "use_layerwise": self.layerwise,
            "save_decode_cache": self.save_decode,
            # An engine's block may be packed as one piece (CPU): no part of it can be copied.
            "save_unfull_chunk": False,
            "pre_caching_hash_algorithm": self.hash_algorithm,
        }
        if self.kv_events is not None:
            config["enable_kv_events"] = True
        extra: dict[str, object] = {
            f"xpu.{name}": value
            for name in ("overlap_load", "overlap_store", "staging_mib", "layers_at_once")
            if (value := getattr(self, name)) is not None
        }
        if self.disk_path is not None:
            config["storage_plugins"] = ["disk"]
            extra |= {
                "storage_plugin.disk.module_path": "lmcache_xpu.disk.tier",
                "storage_plugin.disk.class_name": "DiskTier",
                "disk.path": str(self.disk_path),
                "disk.gib": self.disk_gib,
            }
        if self.remote_url is not None:
            config["remote_storage_plugins"] = ["shared"]
            extra |= {
                "remote_storage_plugin.shared.module_path": "lmcache_xpu.remote",
                "remote_storage_plugin.shared.class_name": "RemoteTier",
                "shared.url": self.remote_url,
            }
        return {**config, "extra_config": extra}

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables that have no argument: to be added to the engine's environment.

        Args:
            environ: that environment. What it says of PyTorch's allocator is kept and added to.
        """
        env = {
            # One hash seed for all of the engine's processes; see hash_algorithm.
            "PYTHONHASHSEED": "0",
            # vLLM and LMCache both obey this one and report nothing to their makers.
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": self.log_level.upper(),
            "LMCACHE_LOG_LEVEL": self.log_level.upper(),
        }
        if self.device == "cpu":
            # oneDNN keeps what it compiled for each of 1,024 numbers of tokens, and vLLM what it
            # needs again: half a GiB, and a heap that grows with every request, for nothing.
            env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
        if self.device == "xpu" and self.offload:
            env |= pool_memory.allocator_variables(environ, versions.installed().torch)
        if self.device == "cuda":
            env[f"{ENV_PREFIX}DEVICES"] = "cuda"  # where this package is off unless asked for
        if self.api_key is not None:
            # Not an argument: every user of the machine can read those.
            env["VLLM_API_KEY"] = self.api_key.get_secret_value()
        if self.remote_password is not None:
            # Read by `remote` in the engine's worker: LMCache logs its configuration.
            env[f"{ENV_PREFIX}REMOTE_PASSWORD"] = self.remote_password.get_secret_value()
        return env

    def _events(self) -> dict[str, object]:
        """vLLM's configuration of its publisher of KV events."""
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.kv_events}

    def _kv_transfer(self) -> dict[str, object]:
        """vLLM's KV transfer configuration, with LMCache's inside."""
        return {
            "kv_connector": "LMCacheXPUConnector",
            "kv_connector_module_path": "lmcache_xpu.vllm_connector",
            "kv_role": "kv_both",
            # A chunk may be lost between look-up and load; vLLM's default fails the request.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                f"lmcache.{key}": value for key, value in self.lmcache_config().items()
            },
        }


def _readable(error: ValidationError) -> SettingsError:
    """Say which settings are wrong, what they are, and what they may be."""
    found, expected, fix = [], [], ""
    for item in error.errors(include_url=False):
        if isinstance(own := item.get("ctx", {}).get("error"), SettingsError):
            return own  # from _agree, which says it all; pydantic wraps any ValueError
        name = str(item["loc"][0]) if item["loc"] else "settings"
        if item["type"] == "missing":
            found.append(f"no {name}")
        elif name in ("api_key", "remote_password", "remote_url"):  # people put passwords in URLs
            found.append(f"{name} (not shown)")
        else:
            found.append(f"{name}={item['input']!r}")
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, Settings.model_fields, n=1)
            expected.append(f"{close[0]} instead of {name}" if close else f"no {name}")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            expected.append(f"{name}: {message}")
        if name == "remote_url":
            fix = "redis://HOST:PORT, or rediss:// for TLS; a password goes into remote_password."
        if name == "port" and str(item["input"]).startswith("tcp://"):
            fix = (
                "Kubernetes made this variable for a service named lmcache-xpu: set "
                "enableServiceLinks: false on the pod."
            )
    return SettingsError(", ".join(found), "; ".join(expected), fix)
