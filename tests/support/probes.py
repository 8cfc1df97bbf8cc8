"""How a probe begins and ends: a process with a real engine, which a test starts."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

# Options of vLLM that are JSON objects, which `LLM` takes as such.
OBJECTS = ("kv_transfer_config", "kv_events_config")


def connector_options(values: dict[str, Any]) -> dict[str, Any]:
    """Set the variables of an engine on CPU with these settings; return its connector's options.

    They are vLLM's `kv_transfer_config`, with `kv_events` `kv_events_config`, and the class of its
    scheduler, where that is not vLLM's choice.
    """
    from lmcache_xpu.launch.engine_arguments import engine_variables, vllm_arguments
    from lmcache_xpu.launch.settings import Settings

    settings = Settings.load({"device": "cpu", "disk_gib": 1, "loads": "always", **values})
    os.environ.update(engine_variables(settings))
    arguments = vllm_arguments(settings)
    flags = {name: "--" + name.replace("_", "-") for name in OBJECTS}
    options = {
        name: json.loads(arguments[arguments.index(flag) + 1])
        for name, flag in flags.items()
        if flag in arguments
    }
    if "--scheduler-cls" in arguments:
        options["scheduler_cls"] = arguments[arguments.index("--scheduler-cls") + 1]
    return options


def end_with(look: Callable[[], dict[str, Any]]) -> NoReturn:
    """Print what a function returns as a JSON object, or the error it raised, and end the process.

    The exit status is 1 after an error. The interpreter does not wait: threads of LMCache would
    keep it.
    """
    status = 1
    try:
        print("\n" + json.dumps(look()), flush=True)
        status = 0
    except Exception:  # whatever it is: the same threads would keep a failed process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
