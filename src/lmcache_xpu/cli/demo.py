"""`lmcache-xpu demo`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file, too.")
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Directory for the model, the logs and the disk tier.")
    ] = Path(".demo"),
    port: Annotated[int | None, typer.Option(help="Port of the engine (default: any).")] = None,
) -> None:
    """Time conversations on this machine: recompute, prefix cache, CPU tier, disk tier."""
    from lmcache_xpu.harness.demo import tell

    # Ending by SIGTERM would skip what stops the engine.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    tell(json_file, work=work, port=port)
