"""The settings, each with its bounds and what it is; `settings` has what holds between them.

Sizes are in GiB (2**30 bytes) and lengths in tokens; the unit ends each name.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from lmcache_xpu.errors import SettingsError

ENV_PREFIX = "LMCACHE_XPU_"
# What vLLM takes on CPU when it isn't told: 92 % of the machine's memory, which leaves
# LMCache's CPU tier no room.
CPU_KV_CACHE_GIB = 4.0
CPU_BLOCK_TOKENS = 128

Cache = Literal["auto", "in-process", "server", "vllm"]
TierDtype = Literal["auto", "fp8"]
# Beginnings of vLLM's options for secrets (argparse takes a part of a name), and where those go.
SECRET_OPTIONS = {"--api-k": f"{ENV_PREFIX}API_KEY", "--hf-t": "HF_TOKEN"}


def _split(value: object) -> object:
    """Let a variable hold arguments as a shell would write them."""
    return shlex.split(value) if isinstance(value, str) else value


class Fields(BaseSettings):
    """What to serve, on which device, and where the KV cache goes; see `Settings`."""

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
    api_key: SecretStr | None = Field(
        None, description="Key that clients have to send, but to /health and /metrics"
    )
    served_model_name: str | None = Field(None, description="Model name in the API")
    show_cached_tokens: bool | None = Field(
        None,
        description="Whether answers say how many of their prompt's tokens a cache had; unset: "
        "where the API has no key, as it tells one tenant what others asked",
    )
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
    pipeline_parallel: int = Field(
        1, ge=1, description="Groups of devices that have some of the layers each; not on CPU"
    )
    data_parallel: int = Field(
        1,
        ge=1,
        description="Engines that share the requests, each with devices of its own",
    )
    prefix_caching: bool = Field(True, description="The engine's own prefix cache")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Tokens per engine step")
    max_num_seqs: int | None = Field(None, ge=1, description="Requests per engine step")
    enforce_eager: bool = Field(False, description="No compilation and no graphs")

    # Where the KV cache goes.
    offload: bool = Field(True, description="LMCache; without it this is plain vLLM")
    cache: Cache = Field(
        "auto",
        description="Where the cache lives. in-process: inside the engine; server: in a process of "
        "its own, which several engines of this machine can share; auto: in-process for an engine "
        "on one device, server on several; vllm: vLLM's own offloading, without LMCache, with the "
        "disk tier of this package",
    )
    server_url: str | None = Field(
        None,
        pattern=r"^(ipc:///.+|tcp://[^@/]+:\d+)$",
        description="LMCache's server, ipc:///DIRECTORY/SOCKET, with cache=server; tcp://HOST:PORT "
        "only where nobody else reaches it; unset: one is started with the engine",
    )
    server_timeout_s: float = Field(
        1.0, gt=0, description="Seconds that LMCache's server has for an answer; then it is a miss"
    )
    chunk_tokens: int = Field(256, ge=1, description="Tokens per stored chunk")
    cpu_gib: float = Field(5.0, gt=0, description="CPU tier per device, GiB, allocated at start")
    disk_gib: float | None = Field(
        None, ge=0, description="Disk tier per device, GiB; unset or 0: no disk tier"
    )
    disk_path: Path | None = Field(None, description="Directory of the disk tier")
    remote_url: str | None = Field(
        None,
        pattern=r"^(rediss?://[^@/?]+(/\d+)?|rediss://[^@/?]+(/\d+)?\?ssl_ca_certs=/[^&#]+)$",
        description="A Valkey or Redis that engines share, redis://HOST:PORT, with TLS "
        "rediss://HOST:PORT?ssl_ca_certs=FILE (without it the system's authorities); unset: off",
    )
    tier_dtype: TierDtype = Field(
        "auto",
        description="Type of keys and values in the tiers. auto: as the engine has them, exactly; "
        "fp8: float8_e4m3fn without scales, half the bytes of bfloat16, and hits that are not "
        "exact; with cache=in-process",
    )
    remote_password: SecretStr | None = Field(None, description="Password of that server")
    layerwise: bool = Field(False, description="Load and store layer by layer")
    loads: Literal["auto", "always", "step", "async"] = Field(
        "auto",
        description="When cached tokens of a prompt are loaded. auto: where that is likely to be "
        "faster than computing them again; always: each time; step: each time, and other requests "
        "wait for it; async: each time, and other requests go on",
    )
    staging_mib: int | None = Field(
        None, ge=2, description="Device memory that copies go through, MiB; unset: by the device"
    )
    save_decode: bool = Field(False, description="Store the KV of answers too, not only prompts")
    kv_events: str | None = Field(
        None,
        pattern=r"^(tcp|ipc|inproc)://.+",
        description="Where routers hear of blocks that come and go, e.g. tcp://*:5557; unset: off",
    )

    extra_args: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        (), description="More arguments for vLLM, verbatim and last"
    )

    @field_validator("disk_path")
    @classmethod
    def _no_disk_tier_of_0_gib(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return None if info.data.get("disk_gib") == 0 else path

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key and not re.fullmatch("[!-~]([ -~]*[!-~])?", key.get_secret_value()):
            raise ValueError("printable ASCII without a space or a line end at its ends")
        return key

    @field_validator("extra_args")
    @classmethod
    def _hold_no_secret(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        for option in (arg.partition("=")[0].replace("_", "-") for arg in args):
            for beginning, variable in SECRET_OPTIONS.items():
                if option.startswith(beginning):
                    raise SettingsError(
                        f"{option} in extra_args",
                        f"the variable {variable}",
                        "Every user of the machine can read arguments.",
                    )
        return args

    @property
    def ranks(self) -> int:
        """Count the devices of one engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def is_server(self) -> bool:
        """Whether LMCache runs as a server."""
        return self.cache == "server" or (
            self.cache == "auto" and self.ranks > 1 and not self.layerwise
        )

    @property
    def is_local(self) -> bool:
        """Whether LMCache's cache is in the engine's process, without LMCache's engine."""
        return not (self.is_server or self.is_vllm or self.layerwise)

    @property
    def is_vllm(self) -> bool:
        """Whether the KV cache goes through vLLM's own offloading, without LMCache."""
        return self.cache == "vllm"

    @property
    def devices(self) -> int:
        """Count the devices of all engines; sizes of tiers are per device."""
        return self.ranks * self.data_parallel
