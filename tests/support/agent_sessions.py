"""Sessions of coding agents, made up: `python -m support.agent_sessions FOLDER`.

They share a system prompt and grow with each tool's result. Some are compacted: all but the system
prompt is replaced by a summary. Some call another agent, which has a system prompt of its own.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

BLOCK, SYSTEM, CALLED, LONGEST = 64, 128, 64, 640  # tokens, and blocks of 64 tokens


def write(folder: Path, *, sessions: int = 24, seed: int = 1) -> Path:
    """Write a file for each session, in the format of kv-cache-tester's traces."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn, names = random.Random(seed), count(SYSTEM + CALLED)
    for number in range(sessions):
        steps = list(_steps(drawn, names, list(range(SYSTEM)), drawn.randint(6, 40)))
        session = {"block_size": BLOCK, "hash_id_scope": "global", "requests": steps}
        (folder / f"{number:03}.json").write_text(json.dumps(session))
    return folder


def _steps(
    drawn: random.Random, names: Iterator[int], system: list[int], length: int
) -> Iterator[dict[str, Any]]:
    at_s, blocks = 0.0, list(system)
    for number in range(length):
        blocks = [*blocks, *(next(names) for _ in range(drawn.randint(2, 40)))]
        if len(blocks) > LONGEST:
            blocks = [*system, *(next(names) for _ in range(32))]
        tokens = len(blocks) * BLOCK - drawn.randrange(BLOCK)
        yield {"t": at_s, "type": "s", "in": tokens, "out": 100, "hash_ids": blocks}
        at_s += drawn.lognormvariate(3, 1.2)  # seconds: half of them are under 20, some are hours
        if len(system) == SYSTEM and number % 7 == 6:
            called = list(range(SYSTEM, SYSTEM + CALLED))
            steps = list(_steps(drawn, names, called, drawn.randint(2, 6)))
            yield {"t": at_s, "type": "subagent", "requests": steps}
            at_s += steps[-1]["t"]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
