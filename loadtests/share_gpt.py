"""Files of conversations in ShareGPT's format."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Talk", "read_share_gpt"]

# Question, answer, and the answer's length in tokens, of each round.
Talk = list[tuple[str, str, int]]
TOKENS_PER_WORD = 1.5  # where the file doesn't count tokens; in most languages there are fewer


def read_share_gpt(path: Path, rounds: int) -> list[Talk]:
    """The conversations of a file, each up to so many rounds.

    Raises:
        ValueError: it can't be read, or has none.
    """
    try:
        entries = json.loads(path.read_text())
        talks = [_rounds(entry.get("conversations", [])) for entry in entries]
        what = "no conversation"
    except OSError as error:
        talks, what = [], str(error.strerror)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        talks, what = [], f"{type(error).__name__}: {error}"
    if not (talks := [talk[:rounds] for talk in talks if talk]):
        raise ValueError(
            f"found --conversations {path}, {what}; expected a list of "
            '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}'
        )
    return talks


def _rounds(messages: list[dict[str, Any]]) -> Talk:
    exchanges = []
    for question, answer in pairwise(messages):
        if question.get("from") in ("human", "user") and answer.get("from") in ("gpt", "assistant"):
            words = len(answer["value"].split())
            tokens = int(answer.get("num_tokens") or words * TOKENS_PER_WORD)
            exchanges.append((str(question["value"]), str(answer["value"]), max(1, tokens)))
    return exchanges
