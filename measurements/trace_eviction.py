"""What the order of eviction is worth to an engine: a load test replays a trace.

    PYTHONPATH=.:measurements python measurements/trace_eviction.py TRACES --out FOLDER

TRACES is a folder of coding agents' sessions. A vLLM on CPU with the demo's model serves them with
a CPU tier of half of what `lmcache-xpu size --agents` advises, once as it is, and once with an
eviction that takes the beginning of a prompt first (`head_first.py`), then both again in the other
order. Prints hit tokens, computed tokens and TTFT of each run; FOLDER gets logs and rows. With
`--shape 8b` a GPU serves the shape of Llama 3 8B, whose weights vLLM makes up.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lmcache_xpu.bench.runner import COMMON
from lmcache_xpu.bench.shapes import shape_named
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.random_model import DEMO, ModelSpec, llama_config, make_model
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.launch.sizing import AGENT_TOKENS

ORDERS = "tail head head tail"
# Tokens of whole prompts, before they are scaled: the engine's own cache, and the longest prompt.
ENGINE_TOKENS, LONGEST = 168_000, 155_648
# By shape, the settings besides those of all.
SETTINGS: dict[str, dict[str, Any]] = {
    "demo": {"device": "cpu", "dtype": "float32", "chunk_tokens": 128},
    "8b": {"dtype": "bfloat16", "chunk_tokens": 256, "extra_args": ["--load-format", "dummy"]},
}
LOCUST = ["-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--only-summary"]
os.environ.update(COMMON)


def main(
    traces: Annotated[Path, typer.Argument(help="Folder of agents' sessions")],
    out: Annotated[Path, typer.Option(help="For logs, rows and figures")],
    agents: Annotated[int, typer.Option(help="Sessions at once")] = 4,
    length_scale: Annotated[float, typer.Option(help="Of prompts and answers")] = 1 / 16,
    time_scale: Annotated[float, typer.Option(help="Of all gaps")] = 0.02,
    share: Annotated[float, typer.Option(help="Of the tokens that the rule advises")] = 0.5,
    orders: Annotated[str, typer.Option(help="Tail or head first, a run for each")] = ORDERS,
    shape: Annotated[str, typer.Option(help="demo or 8b")] = "demo",
) -> None:
    """Replay the trace, and print a line of JSON for each run."""
    out.mkdir(parents=True, exist_ok=True)
    spec, model = model_of(shape, out / "models")
    tokens = AGENT_TOKENS * agents * share
    gib_per_token = spec.kv_bytes_per_token * length_scale / 2**30
    for order in orders.split():
        values: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            "port": free_port(),
            "max_model_len": round(LONGEST * length_scale),
            "kv_cache_gib": round(ENGINE_TOKENS * gib_per_token, 3),
            "cpu_gib": round(tokens * gib_per_token, 3),
            "extra_args": [],
            **SETTINGS[shape],
        }
        if order == "head":
            head_first = ["--worker-extension-cls", "head_first.Worker"]
            values["extra_args"] = values["extra_args"] + head_first
        label = f"{len(list(out.glob('*-load.log')))}-{order}"
        with EngineProcess(Settings.load(values), out / f"{label}.log") as engine:
            options: dict[str, Any] = {
                "--host": engine.url,
                "--tags": "trace",
                "--trace": traces,
                "--trace-format": "agents",
                "--length-scale": length_scale,
                "--time-scale": time_scale,
                "--max-tokens": values["max_model_len"] - 1,
                "--chunk-tokens": values["chunk_tokens"],
                "--salt": "s",
                "--users": agents,
                "--report-dir": out / label,
            }
            words = [str(word) for pair in options.items() for word in pair]
            with (out / f"{label}-load.log").open("w") as log:
                subprocess.run(
                    [sys.executable, *LOCUST, *words], stdout=log, stderr=log, check=False
                )
        line = {"order": order, "cpu_gib": values["cpu_gib"], **figures(out / label)}
        print(json.dumps(line), flush=True)


def model_of(shape: str, parent: Path) -> tuple[ModelSpec, Path]:
    """Return a model's description and directory, of the shape 8b without weights."""
    demo = make_model(DEMO, parent)
    if shape == "demo":
        return DEMO, demo
    spec = replace(shape_named(shape).model, vocabulary=DEMO.vocabulary)
    model = parent / shape
    shutil.copytree(demo, model, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    (model / "config.json").write_text(json.dumps(llama_config(spec)))
    return spec, model


def figures(directory: Path) -> dict[str, Any]:
    """Return what was reused in a run, and its times."""
    trace = json.loads((directory / "trace.json").read_text())
    rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]
    answered = [row for row in rows if row["outcome"] == "ok"]
    ttft_s = [row["ttft_s"] for row in answered]
    reused, tokens = trace["reused"], trace["reused"]["prompt_tokens"]
    share = reused["device_share"] + reused["external_share"]
    return {
        "requests": len(answered),
        "others": len(rows) - len(answered),
        "prompt_tokens": round(tokens),
        "own_tokens": round(tokens * reused["device_share"]),
        "hit_tokens": round(tokens * reused["external_share"]),
        "computed_tokens": round(tokens * (1 - share)),
        "best_share": round(trace["best"]["reusable_share"], 4),
        "ttft_mean_s": round(float(np.mean(ttft_s)), 3),
        **{f"ttft_p{p}_s": round(float(np.percentile(ttft_s, p)), 3) for p in (50, 95)},
        "seconds": round(max(row["ended_s"] for row in rows)),
    }


if __name__ == "__main__":
    typer.run(main)
