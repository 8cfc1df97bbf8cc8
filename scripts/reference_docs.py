"""Make the pages of docs/reference that follow from the code: `make docs` runs it.

A page is made as a whole, or between two comments where people write the rest of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from lmcache_xpu import metrics
from lmcache_xpu.cache_engine.options import EXTRA, OPTIONS, VLLM, Option, Verdict
from lmcache_xpu.cli import app
from lmcache_xpu.cli.exit_codes import BAD_NEWS, MEANINGS
from lmcache_xpu.launch.settings import DIAGNOSTIC_VARIABLES, ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs/reference"

sys.path.insert(0, str(ROOT / "helm"))
from chart_schema import CHARTS_OWN  # noqa: E402  # no package

# Where a setting begins, and the heading of those that follow it.
CHAPTERS = {"model": "The server", "device": "The engine", "offload": "The tiers"}
UNITS = {"gib": "GiB", "mib": "MiB", "s": "seconds", "tokens": "tokens"}
TOKENS = {"max_model_len", "max_num_batched_tokens"}
# Of settings that came after 0.1.0.
SINCE: dict[str, str] = {}
# How Compose and the chart name a setting whose name is another there.
ELSEWHERE = {
    "host": ("always 0.0.0.0", "`settings.host`, default 0.0.0.0"),
    "port": ("`API_PORT`, on the host", "`service.port`"),
    "device": ("`LMCACHE_XPU_DEVICE`", "`settings.device`; `auto` follows `gpu.kind`"),
    "disk_path": ("`KV_DIR`, on the host", "`disk`"),
    "api_key": ("`LMCACHE_XPU_API_KEY`", "`apiKeySecret`"),
    "remote_password": ("`LMCACHE_XPU_REMOTE_PASSWORD`", "`remotePasswordSecret`"),
}
DIAGNOSIS = {
    "STOCK": "`1`: the name of LMCache's stock connector keeps LMCache's own connector",
    "DEVICES": "Device types that this package serves; default `xpu,cpu`",
    "ALLOW_UNTESTED": "`1`: go on with versions that were not tested",
    "KERNELS_READ_HOST": "`0`: no kernel reads or writes host memory, everything is copied",
}
# Metrics of others that the dashboard or the alerts use.
OTHERS = {
    "vllm:num_requests_running": "Requests that the engine computes",
    "vllm:num_requests_waiting": "Requests in its queue",
    "vllm:num_preemptions_total": "Requests that lost their blocks and are computed again",
    "vllm:kv_cache_usage_perc": "Part of the engine's own KV cache in use, 0 to 1",
    "vllm:prefix_cache_queries_total": "Prompt tokens that the engine's own cache was asked for",
    "vllm:prefix_cache_hits_total": "Of these, tokens that it had",
    "vllm:external_prefix_cache_queries_total": "Tokens that the tiers were asked for",
    "vllm:external_prefix_cache_hits_total": "Of these, tokens that a tier had",
    "vllm:prompt_tokens_total": "Tokens of prompts",
    "vllm:prompt_tokens_by_source_total": "The same by `source`: computed, device or external hit",
    "vllm:generation_tokens_total": "Tokens of answers",
    "vllm:request_success_total": "Requests that ended, by `finished_reason`",
    "vllm:time_to_first_token_seconds": "From a request's arrival to its first token",
    "vllm:inter_token_latency_seconds": "Between two tokens of an answer",
    "vllm:e2e_request_latency_seconds": "From a request's arrival to its end",
    "vllm:request_queue_time_seconds": "Time in the queue",
    "vllm:request_prefill_time_seconds": "Time from the queue to the first token",
    "lmcache:num_lookup_tokens_total": "Tokens that LMCache was asked for",
    "lmcache:num_lookup_hits_total": "Of these, tokens that it had",
    "lmcache:num_stored_tokens_total": "Tokens that LMCache stored",
    "lmcache:local_cache_usage": "Bytes in the CPU tier",
    "lmcache_mp_l1_usage_ratio": "Part of the memory of LMCache's server in use, 0 to 1",
    "lmcache_mp_lookup_requested_tokens_total": "Tokens that the server was asked for",
    "lmcache_mp_lookup_hit_l1_tokens_total": "Of these, tokens that it had in memory",
    "lmcache_mp_lookup_hit_l2_tokens_total": "Of these, tokens that it had on its disk",
    "lmcache_mp_l1_evicted_chunks_total": "Chunks that its memory had no more room for",
    "lmcache_mp_l1_allocation_failure_chunks_total": "Chunks that found no room in its memory",
    "hw_gpu_utilization_ratio": "Utilisation of a GPU, from Intel's exporter",
    "hw_memory_usage_bytes": "Memory of a GPU in use, from Intel's exporter",
    "hw_power_watts": "Power of a GPU, from Intel's exporter",
    "hw_temperature_celsius": "Temperature of a GPU, from Intel's exporter",
    "hw_errors_total": "Errors that a GPU reports, from Intel's exporter",
    "up": "1 while Prometheus reaches the engine, the router or LMCache's server",
}
METRIC = re.compile(
    r"\b(?:vllm:|lmcache:|lmcache_mp_)\w+|\bhw_\w+_(?:ratio|bytes|watts|celsius|total)|\bup(?=\{)"
)


def rows(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    names = list(head)
    lines = [names, ["---"] * len(names), *body]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return text.replace("\n", " ").replace("|", "\\|")


# Settings


def kind(field: FieldInfo) -> str:
    """What a setting's value is: its type or its choices."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    names = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}
    names |= {Path: "directory", SecretStr: "text, secret"}
    return names.get(annotation, "arguments")


def bounds(field: FieldInfo) -> str:
    """What a setting's value has to keep to."""
    signs = {"ge": "from {}", "gt": "above {}", "le": "up to {}", "lt": "below {}"}
    limits = []
    for item in field.metadata:
        for name, text in signs.items():
            if hasattr(item, name):
                limits.append(text.format(f"{getattr(item, name):g}"))
        if getattr(item, "min_length", None):
            limits.append("not empty")
        if pattern := getattr(item, "pattern", None):
            limits.append(f"`{cell(pattern)}`")
    return ", ".join(limits)


def unit(name: str) -> str:
    """The unit of a setting, which ends its name."""
    return "tokens" if name in TOKENS else UNITS.get(name.rpartition("_")[2], "")


def default(field: FieldInfo) -> str:
    """What holds when a setting is not set."""
    if field.is_required():
        return "required"
    if field.default in (None, ()):
        return "unset"
    value = field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def option(name: str, field: FieldInfo) -> str:
    """How a setting is written on the command line of `serve`."""
    if SecretStr in get_args(field.annotation):
        return "none: others could read it"
    if name in ("model", "extra_args"):
        return {"model": "`MODEL`", "extra_args": "`-- ...`"}[name]
    flag = name.replace("_", "-")
    return f"`--{flag}`, `--no-{flag}`" if field.annotation is bool else f"`--{flag}`"


def setting(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The row of a setting."""
    since = SINCE.get(name)
    return (
        f"{option(name, field)}<br>`{ENV_PREFIX}{name.upper()}`",
        cell(field.description or "") + (f" (since {since})" if since else ""),
        default(field),
        unit(name),
        "; ".join(filter(None, [kind(field), bounds(field)])),
    )


def settings(text: str) -> str:
    """docs/reference/settings.md."""
    head = ("option, variable", "what it is", "default", "unit", "values")
    assert ELSEWHERE.keys() >= CHARTS_OWN
    lines = [
        "# Settings",
        "",
        "What can be set, how, and within which bounds?",
        "",
        "An option of `lmcache-xpu serve` wins over its variable, and that over the default. An",
        "empty variable counts as unset. A misspelt variable ends the start with a message. Sizes",
        "are in GiB (2**30 bytes), and per device. All settings are there since 0.1.0, if their",
        "row does not say otherwise.",
        "",
        "`--cpu-gib` is the variable `LMCACHE_XPU_CPU_GIB`, the same line in Compose's `.env`, and",
        "`settings.cpu_gib` in the Helm chart. [Below](#other-names) are the exceptions.",
    ]
    body: list[tuple[str, ...]] = []
    for name, field in Settings.model_fields.items():
        if name in CHAPTERS:
            if body:
                lines += ["", rows(head, body)]
            lines += ["", f"## {CHAPTERS[name]}"]
            body = []
        body.append(setting(name, field))
    elsewhere = ((f"`{name}`", *names) for name, names in ELSEWHERE.items())
    lines += ["", rows(head, body), "", "## Other names", ""]
    lines += [rows(("setting", "in Compose", "in the chart"), elsewhere), ""]
    lines += ["## Switches for diagnosis", ""]
    lines += ["Not settings of a deployment. They are variables only.", ""]
    names = sorted(name.removeprefix(ENV_PREFIX) for name in DIAGNOSTIC_VARIABLES)
    lines.append(
        rows(("variable", "effect"), ((f"`{ENV_PREFIX}{n}`", DIAGNOSIS[n]) for n in names))
    )
    return "\n".join(lines) + "\n"


# Metrics


def used_metrics() -> set[str]:
    """Names of the metrics of others in the dashboard and in the alerts."""
    files = [ROOT / "monitoring/alerts.yaml", *(ROOT / "monitoring/dashboards").glob("*.json")]
    names = {name for file in files for name in METRIC.findall(file.read_text())}
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def metrics_page(text: str) -> str:
    """docs/reference/metrics.md."""
    own = []
    for collector in (*metrics._COUNTERS.values(), *(lv.gauge for lv in metrics.LEVELS.values())):
        (family,) = collector.describe()
        counter = family.type == "counter"
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        name = family.name + ("_total" if counter else "")
        own.append((f"`{name}`", family.type, labels, family.documentation))
    reasons = [
        (f"`{flow.direction}`", f"`{flow.tier}`", f"`{reason}`", f"{meaning}.")
        for flow in metrics.FLOWS
        for reason, meaning in flow.reasons.items()
    ]
    fallbacks = [(f"`{name}`", f"{text}.") for name, text in metrics.FALLBACK_REASONS.items()]
    ways = [(f"`{name}`", f"{text}.") for name, text in metrics.LOAD_WAYS.items()]
    others = [(f"`{name}`", f"{OTHERS[name]}.") for name in OTHERS if name in used_metrics()]
    return f"""# Metrics

What does `/metrics` say of the cache, and what does each `reason` mean?

`lmcache-xpu serve` puts the metrics of this package, of LMCache and of vLLM on one page:
`http://HOST:8000/metrics`. Without `serve`, set `PROMETHEUS_MULTIPROC_DIR` to an empty directory.

## This package

{rows(("metric", "type", "labels", "what it counts"), own)}

`direction` is `store` or `load`. `tier` is where the bytes go to or come from:

| `tier` | between |
|---|---|
| `cpu` | the engine's KV cache and host memory |
| `disk` | host memory and files |
| `shared` | host memory and a Valkey or Redis server |
| `server` | the engine's KV cache and memory of LMCache's server |

A load from disk or server passes host memory, so it counts in `cpu` as well. The speed of a tier
while it moves is bytes divided by seconds:
`rate(lmcache_xpu_bytes_total[5m]) / rate(lmcache_xpu_seconds_total[5m])`.

## Reasons

Of `lmcache_xpu_errors_total`. An error costs a computation, never a wrong answer.

{rows(("`direction`", "`tier`", "`reason`", "what it means, and what to do"), reasons)}

Of `lmcache_xpu_fallbacks_total`:

{rows(("`reason`", "what it means"), fallbacks)}

Of `lmcache_xpu_loads_total`, which each worker counts; see the setting `loads`:

{rows(("`way`", "what it means"), ways)}

## Of vLLM, LMCache and the GPU

Those that the dashboard and the alerts of `monitoring/` use:

{rows(("metric", "what it is"), others)}

The hit rate of the tiers is `vllm:external_prefix_cache_hits_total` divided by
`vllm:external_prefix_cache_queries_total`: of the tokens that the engine itself did not have.
"""


# Commands


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each command with its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        elif not command.hidden:
            yield f"{prefix} {name}", command


def parameter(item: Any) -> tuple[str, str, str]:
    """The row of an option or an argument."""
    if item.param_type_name == "option":
        name = ", ".join(f"`{flag}`" for flag in (*item.opts, *item.secondary_opts))
    else:
        name = f"`{(item.metavar or item.name or '').upper()}`"
    text = getattr(item, "help", None) or ""
    if item.envvar:
        text += f" Else from `{item.envvar}`."
    fallback = item.default
    if item.required:
        shown = "required"
    elif fallback is None or callable(fallback) or fallback in ((), [], "") or "(default:" in text:
        shown = ""
    else:
        shown = f"`{str(fallback).lower() if isinstance(fallback, bool) else fallback}`"
    return name, cell(text), shown


def commands_page(text: str) -> str:
    """docs/reference/commands.md."""
    root = typer.main.get_command(app)
    lines = ["# Commands", "", "What can `lmcache-xpu` do, and with which options?", ""]
    every = list(commands(root, "lmcache-xpu"))
    lines.append(
        rows(
            ("command", "what it does"),
            ((f"[`{n}`](#{n.replace(' ', '-')})", cell(first(c.help))) for n, c in every),
        )
    )
    lines += ["", "`lmcache-xpu --version` shows the version. Every command has `--help`."]
    lines += ["[Exit codes](exit-codes.md) says what a command ends with."]
    for name, command in every:
        help_text = re.sub(r"[ \n]*\n\n[ ]*", "\n\n", (command.help or "").strip())
        paragraphs = [" ".join(part.split()) for part in help_text.split("\n\n")]
        lines += ["", f"## {name}", "", "\n\n".join(paragraphs)]
        items = [item for item in command.params if item.name != "help"]
        if name.endswith(" serve"):
            lines += ["", "[Settings](settings.md) has one option for each setting. And these:"]
            items = [item for item in items if item.name not in Settings.model_fields]
        if items:
            head = ("option", "what it is", "default")
            lines += ["", rows(head, (parameter(item) for item in items))]
    return "\n".join(lines) + "\n"


def first(text: str | None) -> str:
    """The first sentence of a help text."""
    return " ".join((text or "").split("\n\n")[0].split())


# Exit codes


def exit_codes_page(text: str) -> str:
    """docs/reference/exit-codes.md."""
    codes = ((str(code), f"{meaning}.") for code, meaning in MEANINGS.items())
    news = ((f"`lmcache-xpu {name}`", f"{text}.".capitalize()) for name, text in BAD_NEWS.items())
    return f"""# Exit codes

What does a command end with, and what does that mean?

{rows(("code", "meaning"), codes)}

These commands end with 1, where:

{rows(("command", "bad news"), news)}

`lmcache-xpu serve` becomes vLLM once its checks are done: from then on the exit code is vLLM's.

`make loadtest`, `make loadtest-compare` and `make capacity` use the same codes for their programs.
make itself reports any failure as 2.
"""


# LMCache's options


def options_table(options: tuple[Option, ...]) -> str:
    """Return some options as a table; those that differ in name alone share a row."""
    body = [
        (", ".join(f"`{option.name}`" for option in options if option[1:] == what), *what)
        for verdict in get_args(Verdict)
        for what in dict.fromkeys(option[1:] for option in options if option.verdict == verdict)
    ]
    return rows(("option", "here", ""), body)


def options(text: str) -> str:
    """docs/reference/lmcache-options.md: its tables."""
    for name, table_options in {"options": OPTIONS, "extra": EXTRA, "vllm": VLLM}.items():
        begin, end = f"<!-- {name}: made by `make docs` -->\n", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}{options_table(table_options)}\n{end}{tail}"
    return text


PAGES: dict[str, Callable[[str], str]] = {
    "settings.md": settings,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "exit-codes.md": exit_codes_page,
    "lmcache-options.md": options,
}


def main() -> None:
    """Renew all pages."""
    for name, page in PAGES.items():
        path = REFERENCE / name
        path.write_text(page(path.read_text() if path.exists() else ""))


if __name__ == "__main__":
    main()
