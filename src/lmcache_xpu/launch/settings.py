"""The one place where this deployment is configured.

`Settings` is read from keyword values (the command line) and from `LMCACHE_XPU_*` variables, and
checked once. `engine_arguments` turns it into vLLM's arguments and LMCache's configuration.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from pydantic import ValidationError, model_validator

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.fields import CPU_BLOCK_TOKENS, ENV_PREFIX, Fields

# Not settings of a deployment but switches for diagnosis, which the engine's processes read.
DIAGNOSTIC_VARIABLES = frozenset(
    ENV_PREFIX + name for name in ("STOCK", "DEVICES", "ALLOW_UNTESTED", "KERNELS_READ_HOST")
)

# What only a cache in the engine's process has, and the value that leaves it alone.
SERVER_LACKS: dict[str, object] = {"layerwise": False, "kv_events": None, "tier_dtype": "auto"}
# What LMCache has and vLLM's own offloading lacks, or has by options of its own.
OFFLOADING_LACKS: dict[str, object] = {**SERVER_LACKS, "remote_url": None}

MISSING = {"model": "the name of a model on a hub, or a model directory"}
ADDRESSES = {
    "kv_events": "tcp://*:PORT, say",
    "remote_url": "redis://HOST:PORT, or with TLS rediss://HOST:PORT?ssl_ca_certs=FILE",
    "server_url": "ipc:///DIRECTORY/SOCKET or tcp://HOST:PORT",
}
SECRETS = ("api_key", "remote_password", "remote_url")  # people put passwords in URLs


def variables(values: Mapping[str, object]) -> dict[str, str]:
    """Return the `LMCACHE_XPU_*` variables that `Settings.load` reads; None becomes empty."""
    return {ENV_PREFIX + name.upper(): _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return shlex.join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


class Settings(Fields):
    """Fields that agree; `Settings.load` reports each mistake as a SettingsError."""

    @classmethod
    def load(cls, values: Mapping[str, object]) -> Self:
        """Read `values`, then `LMCACHE_XPU_*` variables, then the defaults.

        Raises SettingsError if a key is unknown, a value is not allowed, or two contradict.
        """
        names = {ENV_PREFIX + field.upper() for field in cls.model_fields}
        for name in os.environ:
            if name.startswith(ENV_PREFIX) and name not in names | DIAGNOSTIC_VARIABLES:
                raise SettingsError(
                    f"the environment variable {name}",
                    _most_like(name, names) or f"{ENV_PREFIX} and the name of a setting",
                    "Correct or unset it; `lmcache-xpu serve --help` lists the settings.",
                )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise _failure(error) from None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse settings that are right alone and wrong together."""
        for wrong, *words in self._rules():
            if wrong:
                raise SettingsError(*words)
        return self

    def _rules(self) -> Iterator[tuple[object, str, str, str]]:
        """Yield whether a rule is broken, and the words of its error."""
        on_cpu, several, layerwise = self.device == "cpu", self.ranks > 1, self.layerwise
        block = self.block_tokens or (CPU_BLOCK_TOKENS if on_cpu else 1)
        multiple = block * max(1, round(self.chunk_tokens / block))
        staged, pipeline = self.pipeline_parallel > 1, f"pipeline_parallel={self.pipeline_parallel}"
        tier_dtype = f"tier_dtype={self.tier_dtype}"
        yield (
            on_cpu and block % 32,
            f"block_tokens={block} with device=cpu",
            "a multiple of 32",
            f"vLLM's CPU attention packs 32 tokens; use {CPU_BLOCK_TOKENS}.",
        )
        yield (
            on_cpu and staged,
            f"{pipeline} with device=cpu",
            "1: vLLM's CPU engine can't run a part of the layers",
            "Use tensor_parallel or data_parallel.",
        )
        yield (
            self.offload and self.chunk_tokens % block,
            f"chunk_tokens={self.chunk_tokens} with blocks of {block} tokens",
            "chunk_tokens to be a multiple of block_tokens",
            f"Use {multiple}.",
        )
        yield (
            (self.disk_path is None) != (not self.disk_gib),
            f"only one of disk_path={self.disk_path} and disk_gib={self.disk_gib}",
            "both, or neither (no disk tier)",
            f"Set {'disk_path' if self.disk_path is None else 'disk_gib'} as well.",
        )
        own = "LMCache's own engine stores"
        for other, name, reason in (
            (self.remote_url, "a remote_url", "The shared tier holds whole chunks only."),
            (self.tier_dtype != "auto", tier_dtype, f"{own} keys and values as they are."),
            (staged, pipeline, f"{own} what came of a load that failed in another stage."),
        ):
            yield layerwise and other, f"layerwise with {name}", "one of the two", reason
        yield (
            self.loads == "step" and several and not layerwise,
            f"loads=step with an engine of {self.ranks} devices",
            "auto or async",
            "What came of a load that failed on one of them could be stored by others.",
        )
        yield (
            self.server_url is not None and self.cache != "server",
            f"server_url={self.server_url} with cache={self.cache}",
            "cache=server",
            "An engine asks a server that runs already only where cache says so.",
        )
        yield (
            on_cpu and self.is_vllm,
            "cache=vllm with device=cpu",
            "xpu or cuda: vLLM's own offloading refuses CPU engines",
            "Use cache=in-process.",
        )
        yield (
            self.offload and any(arg.startswith("--kv-offloading") for arg in self.extra_args),
            "--kv-offloading options in extra_args",
            "none: vLLM would take its own connector in place of this package's",
            "Use cache=vllm, or offload=false to serve with vLLM's alone.",
        )
        yield (
            several and self.is_local,
            f"cache={self.cache} with an engine of {self.ranks} devices",
            "cache=server, or auto",
            "Its workers have processes of their own: they share a server beside them.",
        )
        lacks = OFFLOADING_LACKS if self.is_vllm else SERVER_LACKS if self.is_server else {}
        for name, without in lacks.items():
            yield (
                (value := getattr(self, name)) not in (without, None),
                f"{name}={value} with cache={self.cache}, which has no such choice",
                f"{name} unset",
                "Leave it out: an engine of several devices needs the server."
                if several and not layerwise
                else "Leave it out, or use cache=in-process.",
            )
        for name in ("disk_path", "remote_url"):
            yield (
                self.server_url is not None and getattr(self, name) is not None,
                f"{name} with server_url={self.server_url}",
                "one of the two: a server that runs has tiers of its own, or none",
                "Give that server the option --l2-adapter, or leave server_url out.",
            )


def _failure(error: ValidationError) -> SettingsError:
    """Return the error that says which setting is wrong, what it is, and what it may be."""
    item = error.errors(include_url=False)[0]
    if isinstance(contradiction := item.get("ctx", {}).get("error"), SettingsError):
        return contradiction  # it says it all; pydantic wraps any ValueError
    name, fix = str(item["loc"][0]) if item["loc"] else "settings", ""
    value = f"{name} (not shown)" if name in SECRETS else f"{name}={item['input']!r}"
    words = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    expected = f"{words[0].lower()}{words[1:]}"
    if item["type"] == "missing":
        value, expected = f"no {name}", MISSING.get(name, "a value")
    elif item["type"] == "extra_forbidden":
        expected = f"{_most_like(name, Fields.model_fields) or 'no setting'} instead of {name}"
    elif item["type"] == "string_pattern_mismatch":
        expected = ADDRESSES[name]
    if name == "remote_url":
        fix = "A password goes into remote_password."
    elif name == "port" and str(item["input"]).startswith("tcp://"):
        fix = (
            "Kubernetes made this variable for a service named lmcache-xpu: set "
            "enableServiceLinks: false on the pod."
        )
    return SettingsError(value, expected, fix)


def _most_like(name: str, names: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, names, n=1)), "")
