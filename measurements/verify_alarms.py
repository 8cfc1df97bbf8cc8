"""Whether `verify` raises a false alarm: all its cases, again and again, with other prompts.

    PYTHONPATH=src python measurements/verify_alarms.py --count 100

This package's connector runs in one engine, and an engine without it judges it. Prints a line of
JSON for each time. Other settings come from the environment, other connectors from
--kv-transfer-config, as those of `lmcache-xpu verify`.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmcache_xpu.bench.runner import machine
from lmcache_xpu.cli.verify import starter
from lmcache_xpu.harness.random_model import EXACT, make_model
from lmcache_xpu.verify import cases
from lmcache_xpu.verify.judge import Facts, Judge, all_cases, do

TIMEOUT_S = 300.0


def main(
    count: Annotated[int, typer.Option(help="How often all cases are asked")] = 100,
    minutes: Annotated[float, typer.Option(help="After so many none is begun")] = 1e9,
    seed: Annotated[int, typer.Option(help="What prompts are made from")] = 1,
    kv_transfer_config: Annotated[str | None, typer.Option(help="Of another connector")] = None,
) -> None:
    """Ask all cases as often as told, judge them, and exit with 1 for an alarm."""
    config = None if kv_transfer_config is None else json.loads(kv_transfer_config)
    begun, alarms, judged = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(EXACT, Path(directory)))
        start = starter(model, config, None, [], TIMEOUT_S, Console(quiet=True))
        times = []
        with start("connector") as child:
            facts: Facts = do(child, "start", partial(cases.begin, seed=seed))
            while len(times) < count and time.monotonic() - begun < minutes * 60:
                times.append(all_cases(child, facts))
        with start("plain") as child:
            do(child, "start without the connector", cases.begin)
            judge = Judge(facts, child, start)
            for number, pairs in enumerate(times, 1):
                results = judge.results(pairs)
                wrong = {result.case: result.different[0] for result in results if result.different}
                judged, alarms = judged + len(results), alarms + len(wrong)
                compared = sum(result.compared for result in results)
                hit = sum(result.hit for result in results)
                line = {"time": number, "cases": len(results), "blocks": compared, "hit": hit}
                print(json.dumps(line | {"alarms": wrong}), flush=True)
    seconds = round(time.monotonic() - begun)
    whole = {"times": len(times), "cases": judged, "alarms": alarms, "seconds": seconds}
    print(json.dumps(whole | {"machine": machine()}))
    raise typer.Exit(1 if alarms else 0)


if __name__ == "__main__":
    typer.run(main)
