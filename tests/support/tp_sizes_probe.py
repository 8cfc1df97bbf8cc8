"""An engine of some TP size on a disk that another one has filled.

Run by engine/test_tp_sizes.py, with MODEL DISK OPTIONS STEPS, where OPTIONS is a JSON object of
vLLM's, and STEPS a list. Its items: the number of a prompt, which is computed; the number and the
first token of its answer, which follows (see models_probe.hits); "leave", which empties the CPU
tier; "again", which asks the last prompt so. Prints a JSON object last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.probes import end_with
from support.ranks import disk_files, leave_disk
from support.real_engine import CHUNK, Engine, digests, prompt

CHUNKS = 4  # of a prompt


def ask(engine: Engine, number: int, said: list[int]) -> dict[str, Any]:
    """What an answer is, how many tokens came from a tier, and all blocks, by rank and layer."""
    tokens = prompt(CHUNKS * CHUNK + number)[: CHUNKS * CHUNK]
    engine.forget()
    before = engine.external_hits()
    answer = said + engine.ask(tokens + said)
    blocks = engine.llm.collective_rpc(digests)
    return {"answer": answer, "hit": engine.external_hits() - before, "blocks": blocks}


def probe(engine: Engine, disk: str, steps: list[Any]) -> dict[str, Any]:
    asked: list[dict[str, Any]] = []
    number = 0
    for step in steps:
        match step:
            case "leave":
                engine.llm.collective_rpc(leave_disk)
            case "again":
                asked.append(ask(engine, number, asked[-1]["answer"][:1]))
            case [number, first]:
                asked.append(ask(engine, number, [first]))
            case number:
                asked.append(ask(engine, number, []))
    engine.llm.collective_rpc(disk_files)  # waits until all is written
    sizes = {str(file): file.stat().st_size for file in Path(disk).glob("*/*.lmxkv")}
    return {"asked": asked, "sizes": sizes}


if __name__ == "__main__":
    model, disk, options, steps = sys.argv[1:]
    engine = Engine(model, disk, "standard", **json.loads(options))
    end_with(lambda: engine.close_after(probe, disk, json.loads(steps)))
