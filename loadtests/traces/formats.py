"""Files of traces: Mooncake's, vLLM's timed traces, and sessions of coding agents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loadtests.traces.trace import Request, Trace

__all__ = ["FORMATS", "has_arrivals", "read_trace"]

MOONCAKE_TOKENS, TIMED_TOKENS, AGENT_TOKENS = 512, 16, 64  # of a block
LINE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(path: Path, name: str) -> Trace:
    """Read a file, or a folder of sessions.

    Args:
        path: of it.
        name: of the format; `auto` to find out.

    Raises:
        ValueError: no such format or file, or the place in the file that can't be read.
    """
    if name not in FORMATS:
        raise ValueError(f"found --trace-format {name}; expected one of {', '.join(FORMATS)}.")
    try:
        trace = FORMATS[name](path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"found no trace at {path} ({error}); expected a file.") from error
    if not trace.sessions:
        raise ValueError(f"found no request in {path}; expected a trace.")
    return trace


def has_arrivals(path: Path) -> bool:
    """Whether it says when requests arrive, by its name; sessions of agents don't."""
    return not path.is_dir() and path.suffix != ".json"


def _detect(path: Path) -> Trace:
    if not has_arrivals(path):
        return _agents(path)
    block_tokens = next(
        (
            -(-entry["input_length"] // len(entry["hash_ids"]))
            for _, entry in _entries(path)
            if len(entry["hash_ids"]) > 1
        ),
        MOONCAKE_TOKENS,
    )
    # The mean over a request's blocks, of which the last may be short.
    return _timed(path) if block_tokens <= TIMED_TOKENS else _mooncake(path)


def _mooncake(path: Path) -> Trace:
    return _arrivals(path, block_tokens=MOONCAKE_TOKENS, unit_s=1e-3)


def _timed(path: Path) -> Trace:
    return _arrivals(path, block_tokens=TIMED_TOKENS, unit_s=1.0)


def _arrivals(path: Path, *, block_tokens: int, unit_s: float) -> Trace:
    requests = []
    for place, entry in _entries(path):
        if len(entry["hash_ids"]) > -(-entry["input_length"] // block_tokens):
            raise ValueError(
                f"{place}: found {len(entry['hash_ids'])} hash_ids for {entry['input_length']} "
                f"tokens; expected one for each {block_tokens}."
            )
        requests.append(
            Request(
                at_s=entry["timestamp"] * unit_s,
                input_tokens=entry["input_length"],
                output_tokens=max(1, entry["output_length"]),
                blocks=tuple(entry["hash_ids"]),
            )
        )
    requests.sort(key=lambda request: request.at_s)
    return Trace(sessions=tuple((r,) for r in requests), block_tokens=block_tokens, timed=True)


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file, checked, each with its place."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            place = f"line {number} of {path}"
            if not line.strip():
                continue
            entry = _parsed(line, place)
            _check(entry, LINE_FIELDS[:1], _is_number, "a number of at least 0", place)
            _check(entry, LINE_FIELDS[1:2], _is_positive, "a whole number above 0", place)
            _check(entry, LINE_FIELDS[2:3], _is_count, "a whole number of at least 0", place)
            _check(entry, LINE_FIELDS[3:], _is_names, "a list of whole numbers", place)
            yield place, entry


def _agents(path: Path) -> Trace:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    sessions, sizes = [], set()
    for file in files:
        session = _parsed(file.read_text(), str(file))
        _check(session, ("requests",), _is_list, "a list of requests", str(file))
        sizes.add(session.get("block_size", AGENT_TOKENS))
        scope = "" if session.get("hash_id_scope") == "global" else file.name
        requests = list(_steps(session["requests"], str(file), scope, 0.0))
        sessions.append(tuple(sorted(requests, key=lambda request: request.at_s)))
    if len(sizes) > 1 or not all(_is_positive(size) for size in sizes):
        raise ValueError(f"found block_size {sizes} in {path}; expected the same in all sessions.")
    return Trace(
        sessions=tuple(filter(None, sessions)),
        block_tokens=sizes.pop() if sizes else AGENT_TOKENS,
        timed=False,
    )


def _steps(entries: Iterable[Any], file: str, scope: str, begin_s: float) -> Iterator[Request]:
    """The requests of an agent, with those of the agents that it calls: it waits for them."""
    for number, entry in enumerate(entries, 1):
        place = f"request {number} of {file}"
        if not isinstance(entry, dict):
            raise ValueError(f"{place}: found {entry!r}; expected an object.")
        _check(entry, ("t",), _is_number, "seconds", place)
        if entry.get("type") == "subagent":
            _check(entry, ("requests",), _is_list, "a list of requests", place)
            within = f"{scope} {begin_s} {number}" if scope else scope
            yield from _steps(entry["requests"], place, within, begin_s + entry["t"])
            continue
        _check(entry, ("in",), _is_positive, "a whole number above 0", place)
        _check(entry, ("out",), _is_count, "a whole number of at least 0", place)
        _check(entry, ("hash_ids",), _is_names, "a list of whole numbers", place)
        yield Request(
            at_s=begin_s + entry["t"],
            input_tokens=entry["in"],
            output_tokens=max(1, entry["out"]),
            blocks=tuple((scope, name) for name in entry["hash_ids"]),
        )


FORMATS: Mapping[str, Callable[[Path], Trace]] = {
    "auto": _detect,
    "mooncake": _mooncake,
    "timed-trace": _timed,
    "agents": _agents,
}


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: found no JSON ({error.msg}); expected an object.") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: found {text.strip()[:40]!r}; expected an object.")
    return entry


def _check(
    entry: Mapping[str, Any],
    names: Iterable[str],
    holds: Callable[[Any], bool],
    expected: str,
    place: str,
) -> None:
    for name in names:
        if name not in entry:
            raise ValueError(f"{place}: found no {name}; expected {expected}.")
        if not holds(entry[name]):
            raise ValueError(f"{place}: found {name}={entry[name]!r:.40}; expected {expected}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_names(value: Any) -> bool:
    return _is_list(value) and all(isinstance(name, int) for name in value)
