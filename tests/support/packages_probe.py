"""One engine on CPU with packages laid over the environment: hits, and what they were made with.

Run by engine/test_packages.py, with the arguments MODEL DISK PACKAGE ... and the packages'
directory first on PYTHONPATH. Prints a JSON object last.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata

from support.probes import end_with
from support.real_engine import LENGTHS, Engine, hit, prompt
from support.server_workers import busy, wait_for

MODULES = ("google.protobuf", "grpc", "numpy", "opentelemetry.sdk.trace", "prometheus_client")


def hits(engine: Engine) -> dict:
    """Each prompt recomputed, and then hit in the CPU tier with the engine's cache at zero."""
    report = {}
    for name, length in LENGTHS.items():
        engine.forget()
        answer = engine.ask(prompt(length))
        wait_for(engine, busy, until=False)
        report[name] = {"recompute": answer, **hit(engine, prompt(length), engine.blocks())}
    return report


def look(model: str, disk: str, packages: list[str]) -> dict:
    return {
        "hits": hits(Engine(model, disk, "standard")),
        "from": [import_module(name).__file__ for name in MODULES],
        "versions": {name: metadata.version(name) for name in packages},
    }


if __name__ == "__main__":
    model, disk, *packages = sys.argv[1:]
    end_with(lambda: look(model, disk, packages))
