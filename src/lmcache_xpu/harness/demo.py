"""The demo: conversations with a real engine, and the place that each prompt's KV cache came from.

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

import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.harness.client import Answer, CacheCounts, Client, Message
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.random_model import DEMO, corpus, make_model
from lmcache_xpu.launch.preflight import check_directory, check_port
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers.disk.lock import DirectoryLock

USERS = 5
TEXT_CHARACTERS = 24_000  # about 6,000 tokens
MAX_MODEL_LEN = 8_192
ENGINE_TOKENS = 14_336  # two conversations, not three
ANSWER_TOKENS = 16
FREE_GIB = 2.0  # model, disk tier, logs, and room to breathe
QUESTIONS = (
    "What is this text about?",
    "Which part of it matters most, and why?",
    "How would you explain it to a beginner?",
)

ABOUT = (
    "A real vLLM and a real LMCache serve a small model of random weights. Its words mean nothing; "
    "what counts is that they are the same with and without the cache."
)
MEANING = (
    "A prompt that a tier holds is loaded instead of computed, so its first token comes sooner. "
    "The engine's own cache is faster still, as nothing has to be moved, but it holds 2 of these "
    f"{USERS} conversations."
)
NEXT = (
    "Next: docs/guides/first-hit-on-an-intel-gpu.md for a GPU, docs/guides/loadtest.md for your "
    "own traffic."
)


class Row(NamedTuple):
    """One line of the result."""

    source: str  # the place that the KV cache of most of the prompt came from
    median_s: float  # the middle time to first token
    prompt_tokens: int  # tokens of all prompts, as the server counted
    hit_tokens: int  # tokens that came from `source`, as the server counted

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the source."""
        return self.hit_tokens / self.prompt_tokens

    @classmethod
    def of(cls, source: str, asked: Sequence[tuple[Answer, CacheCounts]], *places: str) -> Row:
        """Sum up answers, what each has changed of the server's counters, and hits in places."""
        return cls(
            source,
            statistics.median(answer.ttft_s for answer, _ in asked),
            sum(counts.prompt for _, counts in asked),
            sum(getattr(counts, place) for _, counts in asked for place in places),
        )


class _Conversations:
    """The conversations of all users so far, with one engine after another."""

    def __init__(self) -> None:
        text = corpus()
        self._texts = [text[i * TEXT_CHARACTERS :][:TEXT_CHARACTERS] for i in range(USERS)]
        self.answers: list[dict[int, Answer]] = [{} for _ in range(USERS)]

    def messages(self, user: int, turn: int) -> list[Message]:
        """Return a user's conversation up to question number `turn`."""
        messages: list[Message] = [{"role": "system", "content": self._texts[user]}]
        for earlier in range(turn):
            messages.append({"role": "user", "content": QUESTIONS[earlier]})
            messages.append({"role": "assistant", "content": self.answers[user][earlier].text})
        messages.append({"role": "user", "content": QUESTIONS[turn]})
        return messages

    def ask(self, client: Client, user: int, turn: int) -> tuple[Answer, CacheCounts]:
        """Put a user's question number `turn` after the earlier ones; returns its cost, too."""
        before = client.counts()
        answer = client.chat(self.messages(user, turn), max_tokens=ANSWER_TOKENS)
        self.answers[user].setdefault(turn, answer)
        return answer, client.counts() - before

    def same_as_before(self, client: Client) -> int:
        """Put the first questions again; counts the same answers that came from LMCache's tiers."""
        same = 0
        for user, answers in enumerate(self.answers):
            answer, counts = self.ask(client, user, 0)
            same += counts.external_hits > 0 and answer.token_ids == answers[0].token_ids
        return same


def tell(*, work: Path, port: int | None = None) -> list[Row]:
    """Run the demo, and print its table.

    The model, the logs and the disk tier are kept in `work`; the next demo empties the disk tier.
    Raises SettingsError if `work` or the port can't be used or there is no space, and EngineError
    if the engine did not come up, broke off, or gave a wrong answer.
    """
    settings = _settings(work, free_port() if port is None else port)
    _check(work, settings)
    console = Console()
    console.print(ABOUT)

    @contextmanager
    def engine(log: Path) -> Iterator[Client]:
        with ExitStack() as stack:
            with doing(console, f"starting vLLM with LMCache (log: {log})"):
                engine = stack.enter_context(EngineProcess(settings, log))
                client = stack.enter_context(Client(engine.url, model="demo"))
                # The first request also pays for what is set up on first use; it is nobody's.
                client.complete(corpus()[-TEXT_CHARACTERS:], max_tokens=2)
            yield client

    with doing(console, "making a small Llama and its tokenizer"):
        model = make_model(DEMO, work / "models")
    settings = settings.model_copy(update={"model": str(model)})
    talk = _Conversations()
    with engine(work / "engine-1.log") as client:
        with doing(console, f"{USERS} conversations, two questions each"):
            pairs = [[talk.ask(client, user, turn) for turn in (0, 1)] for user in range(USERS)]
            first, second = zip(*pairs, strict=True)
        with doing(console, "a third question each, after the others'"):
            third = [talk.ask(client, user, 2) for user in range(USERS)]
            same = talk.same_as_before(client)
    with (
        engine(work / "engine-2.log") as client,
        doing(console, "the third question again, after the restart"),
    ):
        again = [talk.ask(client, user, 2) for user in range(USERS)]
        same += talk.same_as_before(client)
    rows = [
        Row.of("recomputed and stored", first, "prefix_hits", "external_hits"),
        Row.of("engine's own cache", second, "prefix_hits"),
        Row.of("CPU tier", third, "external_hits"),
        Row.of("disk tier after a restart", again, "external_hits"),
    ]
    console.print(table(rows))
    if same != 2 * USERS:
        raise EngineError(
            f"{2 * USERS - same} of {2 * USERS} answers not from the tiers, or other tokens",
            "answers from the tiers, token for token those computed without a cache",
            f"The logs are in {work}.",
        )
    console.print(
        f"{same} of {same} answers from the CPU and disk tiers were, token for token, those "
        f"computed without a cache.\n{MEANING}\n{NEXT}"
    )
    return rows


@contextmanager
def doing(console: Console, step: str) -> Iterator[None]:
    """Name a step, and say how long it took."""
    begin = time.monotonic()
    if not console.is_terminal:
        console.print(f"{step} ...")
    with console.status(f"{step} ..."):
        yield
    console.print(f"[dim]{time.monotonic() - begin:4.0f} s[/dim]  {step}: done")


def _settings(work: Path, port: int) -> Settings:
    return Settings.load(
        {
            "model": "demo",
            "served_model_name": "demo",
            "port": port,
            "device": "cpu",
            "dtype": DEMO.dtype,
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_gib": ENGINE_TOKENS * DEMO.kv_bytes_per_token / 2**30,
            "enforce_eager": True,  # compiling takes longer than the whole demo
            "cpu_gib": 1.0,
            "disk_path": work / "disk",
            "disk_gib": 1.0,
        }
    )


def _check(work: Path, settings: Settings) -> None:
    """Refuse what would fail minutes later, and empty the disk tier of an earlier demo."""
    check_directory(work, "--work")
    check_port(settings.host, settings.port)
    for lock in (work / "disk").rglob("lock"):
        DirectoryLock(lock.parent, 0).release()  # another demo may use it
    shutil.rmtree(work / "disk", ignore_errors=True)
    free = shutil.disk_usage(work).free / 2**30
    if free < FREE_GIB:
        raise SettingsError(
            f"{free:.1f} GiB free in {work}", f"{FREE_GIB:g} GiB", "Free some, or name another."
        )


def table(rows: Sequence[Row]) -> Table:
    """Return the rows for a reader; the first one is what the others are compared with."""
    table = Table(
        title=f"Where {USERS} long prompts' KV cache came from",
        title_justify="left",
        caption="Tokens and hits by the server's counters; TTFT by the client, median.",
        caption_justify="left",
    )
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
    return table
