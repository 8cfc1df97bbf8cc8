"""The clients: how each one is run, and where it writes what it measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from loadtests.client import OK
from loadtests.recorder import REQUESTS

__all__ = ["Client", "Load", "clients"]

ROOT = Path(__file__).parents[2]
# Not the command `vllm`: in the wheel for CPU, which has another name, it does not start.
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What all clients are told.

    Args:
        url: of the server.
        model: its name there.
        tokenizer: a name or a directory.
        users: at a time.
        rounds: questions of each.
        qps: of multi-round QA.
        shared: words of the shared prompt.
        history: words, or tokens, of a user's own.
        answer: tokens of an answer.
        seconds: of multi-round QA.
    """

    url: str
    model: str
    tokenizer: str
    users: int
    rounds: int
    qps: float
    shared: int
    history: int
    answer: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Client:
    """A way to measure a server.

    Args:
        name: for people.
        command: that runs it, with the directory for its files.
        read: gives the number of requests and their mean time to first token, in seconds.
        warm_up: requests that it sends first and doesn't count.
        missing: where to get it; empty when it is here.
        folder: where it has to run.
    """

    name: str
    command: Callable[[Path], Sequence[str]]
    read: Callable[[Path], tuple[int, float]]
    warm_up: int = 0
    missing: str = ""
    folder: Path = ROOT


def clients(load: Load, *, multi_round_qa: Path | None, aiperf: str | None) -> list[Client]:
    """Return all clients, also those that are not installed."""
    texts = ["--shared-system-prompt", load.shared, "--user-history-prompt", load.history]
    rounds = ["--num-rounds", load.rounds, "--qps", load.qps, "--answer-len", load.answer]
    ours = [
        *(sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"),
        *("--only-summary", "--host", load.url, "--model", load.model, "--users", load.users),
        *(*texts, *rounds, "--duration-s", load.seconds, "--warm-up", 0, "--no-ignore-eos"),
    ]
    script = multi_round_qa or Path("multi-round-qa.py")
    lmcache = [
        *(sys.executable, script.name, "--num-users", load.users, *texts, *rounds),
        *("--model", load.model, "--base-url", f"{load.url}/v1", "--time", load.seconds),
    ]
    vllm = [
        *(sys.executable, "-c", VLLM_BENCH, "--backend", "openai", "--base-url", load.url),
        *("--model", load.model, "--tokenizer", load.tokenizer, "--max-concurrency", 1),
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", load.users),
        *("--prefix-repetition-prefix-len", load.history),
        *("--prefix-repetition-suffix-len", 64, "--prefix-repetition-output-len", load.answer),
        *("--num-prompts", 3 * load.users, "--ready-check-timeout-sec", 0, "--save-result"),
    ]
    perf = [
        *(aiperf, "profile", "--url", load.url, "--model", load.model, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", load.tokenizer, "--concurrency", 1, "--ui", "none"),
        *("--conversation-num", load.users, "--conversation-turn-mean", 3),
        *("--isl", load.history // 3, "--osl", load.answer),
    ]
    return [
        Client("this load test", lambda d: _words(*ours, "--report-dir", d), _read_ours),
        Client(
            "LMCache multi-round-qa",
            lambda d: _words(*lmcache, "--output", d / "summary.csv"),
            _read_multi_round,
            warm_up=10,
            missing="" if script.is_file() else "--multi-round-qa FILE: LMCache's repository",
            folder=script.resolve().parent,
        ),
        Client(
            "vllm bench serve",
            lambda d: _words(*vllm, "--result-dir", d, "--result-filename", "result.json"),
            _read_vllm,
            missing="" if find_spec("vllm") else "pip install vllm",
        ),
        Client(
            "AIPerf",
            lambda d: _words(*perf, "--artifact-dir", d),
            _read_aiperf,
            missing="" if aiperf else "--aiperf COMMAND: pip install aiperf, in its own venv",
        ),
    ]


def _words(*words: object) -> list[str]:
    return [str(word) for word in words]


def _read_ours(directory: Path) -> tuple[int, float]:
    rows = pd.read_json(directory / REQUESTS, lines=True)
    answered = rows[rows["outcome"] == OK]
    return len(answered), float(answered["ttft_s"].mean())


def _read_multi_round(directory: Path) -> tuple[int, float]:
    rows = pd.read_csv(directory / "summary.csv")
    return len(rows), float(rows["ttft"].mean())


def _read_vllm(directory: Path) -> tuple[int, float]:
    result = json.loads((directory / "result.json").read_text())
    return int(result["completed"]), result["mean_ttft_ms"] / 1e3


def _read_aiperf(directory: Path) -> tuple[int, float]:
    [path] = directory.rglob("profile_export_aiperf.json")
    result = json.loads(path.read_text())
    return int(result["request_count"]["avg"]), result["time_to_first_token"]["avg"] / 1e3
