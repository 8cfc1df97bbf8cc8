"""One engine on CPU with packages laid over the environment: hits, and what they were made with.

Run by engine/test_packages.py, with the arguments MODEL DISK PACKAGE ... and the packages'
directory first on PYTHONPATH. Prints a JSON object last.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module, metadata

from support.engine_probe import LENGTHS, Engine, hit, prompt

MODULES = ("google.protobuf", "grpc", "numpy", "opentelemetry.sdk.trace", "prometheus_client")


def hits(engine: Engine) -> dict:
    """Each prompt recomputed, and then hit in the CPU tier with the engine's cache at zero."""
    found = {}
    for name, length in LENGTHS.items():
        engine.forget()
        answer = engine.ask(prompt(length))
        found[name] = {"recompute": answer, **hit(engine, prompt(length), engine.blocks())}
    return found


if __name__ == "__main__":
    model, disk, *packages = sys.argv[1:]
    status = 1
    try:
        result = {"hits": hits(Engine(model, disk, "standard"))}
        result["from"] = [import_module(name).__file__ for name in MODULES]
        result["versions"] = {name: metadata.version(name) for name in packages}
        print("\n" + json.dumps(result), flush=True)
        status = 0
    except Exception:  # whatever it is: LMCache's threads would keep a failed process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
