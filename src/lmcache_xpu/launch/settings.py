"""The one place where this deployment is configured.

`Settings` is read from keyword values (the command line) and from `LMCACHE_XPU_*` variables, and
checked once. `engine_arguments` turns it into vLLM's arguments and LMCache's configuration.

Sizes are in GiB (2**30 bytes) and lengths in tokens; the unit ends each name.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.settings_errors import unknown_variable, validation_failure

ENV_PREFIX = "LMCACHE_XPU_"
# Not settings of a deployment but switches for diagnosis, which the engine's processes read.
DIAGNOSTIC_VARIABLES = frozenset(
    ENV_PREFIX + name for name in ("STOCK", "DEVICES", "ALLOW_UNTESTED", "KERNELS_READ_HOST")
)

# What vLLM takes on CPU when it isn't told: 92 % of the machine's memory, which leaves
# LMCache's CPU tier no room.
CPU_KV_CACHE_GIB = 4.0
CPU_BLOCK_TOKENS = 128

# What only a cache in the engine's process has, and the value that leaves it alone.
SERVER_LACKS: dict[str, object] = {"layerwise": False, "kv_events": None}
# What LMCache has and vLLM's own offloading lacks, or has by options of its own.
OFFLOADING_LACKS: dict[str, object] = {"layerwise": False, "kv_events": None, "remote_url": None}
Cache = Literal["auto", "in-process", "server", "vllm"]
# Beginnings of vLLM's options for secrets (argparse takes a part of a name), and where those go.
SECRET_OPTIONS = {"--api-k": f"{ENV_PREFIX}API_KEY", "--hf-t": "HF_TOKEN"}


def _split(value: object) -> object:
    """Let a variable hold arguments as a shell would write them."""
    return shlex.split(value) if isinstance(value, str) else value


def variables(values: Mapping[str, object]) -> dict[str, str]:
    """Return the `LMCACHE_XPU_*` variables that `Settings.load` reads; None becomes empty."""
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

    @classmethod
    def load(cls, values: Mapping[str, object]) -> Self:
        """Read `values`, then `LMCACHE_XPU_*` variables, then the defaults.

        Raises:
            SettingsError: a key is unknown, a value is not allowed, or two contradict.
        """
        names = {ENV_PREFIX + field.upper() for field in cls.model_fields}
        for name in os.environ:
            if name.startswith(ENV_PREFIX) and name not in names | DIAGNOSTIC_VARIABLES:
                raise unknown_variable(name, names, ENV_PREFIX)
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise validation_failure(error, cls.model_fields) from None

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
        if self.device == "cpu" and self.pipeline_parallel > 1:
            raise SettingsError(
                f"pipeline_parallel={self.pipeline_parallel} with device=cpu",
                "1: vLLM's CPU engine can't run a part of the layers",
                "Use tensor_parallel or data_parallel.",
            )
        if self.pipeline_parallel > 1 and self.loads == "step":
            raise SettingsError(
                f"loads=step with pipeline_parallel={self.pipeline_parallel}",
                "auto or async",
                "What came of a load that failed on one rank could be stored by others.",
            )
        if self.offload and block is not None and self.chunk_tokens % block:
            raise SettingsError(
                f"chunk_tokens={self.chunk_tokens} with blocks of {block} tokens",
                "chunk_tokens to be a multiple of block_tokens",
                f"Use {block * max(1, round(self.chunk_tokens / block))}.",
            )
        if (self.disk_path is None) != (not self.disk_gib):
            unset = "disk_path" if self.disk_path is None else "disk_gib"
            raise SettingsError(
                f"only one of disk_path={self.disk_path} and disk_gib={self.disk_gib}",
                "both, or neither (no disk tier)",
                f"Set {unset} as well.",
            )
        if self.remote_url is not None and self.layerwise:
            raise SettingsError(
                "layerwise with a remote_url",
                "one of the two",
                "The shared tier holds whole chunks only.",
            )
        if self.pipeline_parallel > 1 and self.layerwise:
            raise SettingsError(
                f"layerwise with pipeline_parallel={self.pipeline_parallel}",
                "one of the two",
                "LMCache's own engine stores what came of a load that failed in another stage.",
            )
        self._agree_on_the_server()
        return self

    def _agree_on_the_server(self) -> None:
        if self.cache != "server" and self.server_url is not None:
            raise SettingsError(
                f"server_url={self.server_url} with cache={self.cache}",
                "cache=server",
                "An engine asks a server that runs already only where cache says so.",
            )
        if self.is_vllm:
            self._agree_on_vllm()
        if self.offload and any(arg.startswith("--kv-offloading") for arg in self.extra_args):
            raise SettingsError(
                "--kv-offloading options in extra_args",
                "none: vLLM would take its own connector in place of this package's",
                "Use cache=vllm, or offload=false to serve with vLLM's alone.",
            )
        if self.is_local and self.ranks > 1:
            raise SettingsError(
                f"cache={self.cache} with an engine of {self.ranks} devices",
                "cache=server, or auto",
                "Its workers have processes of their own: they share a server beside them.",
            )
        if not self.is_server:
            return
        for name, without in SERVER_LACKS.items():
            if getattr(self, name) in (without, None):
                continue
            raise SettingsError(
                f"{name}={getattr(self, name)} with LMCache as a server",
                f"{name} unset: the connector to LMCache's server has no such choice",
                "Leave it out, or use cache=in-process."
                if self.ranks == 1 or self.layerwise
                else "Leave it out: an engine of several devices needs the server.",
            )
        if self.loads == "step" and self.tensor_parallel > 1:
            raise SettingsError(
                f"loads=step with LMCache as a server and tensor_parallel={self.tensor_parallel}",
                "auto or async",
                "What came of a load that failed on one rank would be stored by others.",
            )
        for name in ("disk_path", "remote_url"):
            if self.server_url is not None and getattr(self, name) is not None:
                raise SettingsError(
                    f"{name} with server_url={self.server_url}",
                    "one of the two: a server that runs has tiers of its own, or none",
                    "Give that server the option --l2-adapter, or leave server_url out.",
                )

    def _agree_on_vllm(self) -> None:
        if self.device == "cpu":
            raise SettingsError(
                "cache=vllm with device=cpu",
                "xpu or cuda: vLLM's own offloading refuses CPU engines",
                "Use cache=in-process.",
            )
        for name, without in OFFLOADING_LACKS.items():
            if (value := getattr(self, name)) != without:
                raise SettingsError(
                    f"{name}={value} with cache=vllm",
                    f"{name} unset: it is LMCache's",
                    "Leave it out, or use cache=in-process.",
                )

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
