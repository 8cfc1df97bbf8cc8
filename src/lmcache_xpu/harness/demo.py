"""The demo: conversations with a real engine, and the place that each prompt's KV cache came from.

Each user's conversation starts with a long text of their own. The engine's own KV cache holds two
of these conversations; the CPU tier and the disk tier hold all. So:

1. everybody asks a first question (nothing is cached: recompute) and, at once, a second one
   (the engine's own prefix cache);
2. everybody asks a third one: the others have pushed their KV out of the engine (CPU tier);
3. the engine is started anew and everybody asks the third one again (disk tier).

At the end of 2 and 3 the first questions are put again: the answers must be, token for token,
those that were computed without a cache. The disk tier stays until the next demo, for the engine
that a reader starts by hand.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.harness.client import Answer, CacheCounts, Client, Message
from lmcache_xpu.harness.demo_result import Row, figures, table
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.outputs import check_file, make_directory
from lmcache_xpu.harness.random_model import DEMO, corpus, make_model
from lmcache_xpu.launch.preflight import check_port
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers.disk.lock import DirectoryLock

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


class _Conversations:
    """The conversations of all users so far, with one engine after another."""

    def __init__(self) -> None:
        text = corpus()
        self._texts = [text[i * TEXT_CHARACTERS :][:TEXT_CHARACTERS] for i in range(USERS)]
        self._answers: list[dict[int, Answer]] = [{} for _ in range(USERS)]

    def messages(self, user: int, turn: int) -> list[Message]:
        """Return a user's conversation up to question number `turn`."""
        messages: list[Message] = [{"role": "system", "content": self._texts[user]}]
        for earlier in range(turn):
            messages.append({"role": "user", "content": QUESTIONS[earlier]})
            messages.append({"role": "assistant", "content": self._answers[user][earlier].text})
        messages.append({"role": "user", "content": QUESTIONS[turn]})
        return messages

    def ask(self, client: Client, user: int, turn: int) -> tuple[Answer, CacheCounts]:
        """Put a user's question number `turn` after the earlier ones; returns its cost, too."""
        before = client.counts()
        answer = client.chat(self.messages(user, turn), max_tokens=ANSWER_TOKENS)
        self._answers[user].setdefault(turn, answer)
        return answer, client.counts() - before

    def first_and_second(self, client: Client) -> list[Row]:
        """Put two questions of each user, one right after the other."""
        first, second = [], []
        for user in range(USERS):
            first.append(self.ask(client, user, 0))
            second.append(self.ask(client, user, 1))
        return [
            Row.of("recomputed and stored", first, lambda c: c.prefix_hits + c.external_hits),
            Row.of("engine's own cache", second, lambda c: c.prefix_hits),
        ]

    def third(self, client: Client, source: str) -> Row:
        """Put the third question of each user."""
        third = [self.ask(client, user, 2) for user in range(USERS)]
        return Row.of(source, third, lambda c: c.external_hits)

    def same_as_before(self, client: Client) -> int:
        """Put the first questions again; counts the same answers that came from LMCache's tiers."""
        same = 0
        for user, answers in enumerate(self._answers):
            answer, counts = self.ask(client, user, 0)
            same += counts.external_hits > 0 and answer.token_ids == answers[0].token_ids
        return same

    def first_answer(self) -> str:
        """Return the text of the first user's first answer, which was computed without a cache."""
        return self._answers[0][0].text


def tell(json_file: Path | None, *, work: Path, port: int | None = None) -> list[Row]:
    """Run the demo, print its table, and say how to go on by hand.

    Args:
        json_file: write the figures there, too.
        work: directory for the model, the logs, the disk tier and a question; all are kept, and
            the next demo empties the disk tier.
        port: the engine's, on the loopback interface; None takes a free one.

    Raises:
        SettingsError: an output can't be written, there is no space, the port is taken, or
            another engine uses the disk tier of an earlier demo.
        EngineError: the engine did not come up, broke off, or gave a wrong answer.
    """
    console = Console()
    settings = _settings("demo", work / "disk", free_port() if port is None else port)
    _check(json_file, work, settings)
    begin = time.monotonic()

    @contextmanager
    def doing(step: str) -> Iterator[Callable[[float], None]]:
        """Show one step while it lasts; the function it yields takes the seconds so far."""
        if not console.is_terminal:
            console.print(f"{step} ...")
        with console.status(f"{step} ...") as status:
            yield lambda seconds: status.update(f"{step} ... {seconds:.0f} s")
        console.print(f"[dim]{time.monotonic() - begin:4.0f} s[/dim]  {step}: done")

    @contextmanager
    def engine(log: Path) -> Iterator[Client]:
        with ExitStack() as stack:
            with doing(f"starting vLLM with LMCache (log: {log})") as progress:
                engine = stack.enter_context(EngineProcess(settings, log, on_wait=progress))
                client = stack.enter_context(Client(engine.url, model="demo"))
                # The first request also pays for what is set up on first use; it is nobody's.
                client.complete(corpus()[-TEXT_CHARACTERS:], max_tokens=2)
            yield client

    with doing("making a small Llama and its tokenizer"):
        model = make_model(DEMO, work / "models")
    settings = settings.model_copy(update={"model": str(model)})
    talk = _Conversations()
    with engine(work / "engine-1.log") as client:
        with doing(f"{USERS} conversations, two questions each"):
            rows = talk.first_and_second(client)
        with doing("a third question each, after the others'"):
            rows.append(talk.third(client, "CPU tier"))
            same = talk.same_as_before(client)
    with (
        engine(work / "engine-2.log") as client,
        doing("the third question again, after the restart"),
    ):
        rows.append(talk.third(client, "disk tier after a restart"))
        same += talk.same_as_before(client)
    try:
        if json_file is not None:
            json_file.write_text(
                json.dumps(figures(rows, equal=same, checked=2 * USERS), indent=2) + "\n"
            )
    finally:  # what was measured is shown, whatever became of the file
        console.print(table(rows, USERS))
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
    _go_on(console, settings, talk, work)
    return rows


def _settings(model: str, disk: Path, port: int) -> Settings:
    return Settings.load(
        {
            "model": model,
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


def _check(json_file: Path | None, work: Path, settings: Settings) -> None:
    """Refuse what would fail minutes later, and empty the disk tier of an earlier demo."""
    if json_file is not None:
        check_file(json_file, "--json")
    make_directory(work, "--work")
    check_port(settings.host, settings.port)
    for lock in (work / "disk").rglob("lock"):
        DirectoryLock(lock.parent, 0).release()  # an engine that was started by hand may use it
    shutil.rmtree(work / "disk", ignore_errors=True)
    free = shutil.disk_usage(work).free / 2**30
    if free < FREE_GIB:
        raise SettingsError(
            f"{free:.1f} GiB free in {work}", f"{FREE_GIB:g} GiB", "Free some, or name another."
        )


def _go_on(console: Console, settings: Settings, talk: _Conversations, work: Path) -> None:
    """Say how to start the same engine by hand, and how to see that it finds what is on disk."""
    question = work / "question.json"
    body = {
        "model": "demo",
        "messages": talk.messages(0, 0),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
    }
    question.write_text(json.dumps(body, indent=1) + "\n")
    url = f"http://{settings.host}:{Settings.model_fields['port'].default}/v1/chat/completions"
    header = "Content-Type: application/json"
    lines = [
        "",
        f"The same engine by hand. It finds this run's conversations on disk, in {work / 'disk'}:",
        f"    {serve_command(settings)}",
        "When it answers, put the first question to it again, from another terminal:",
        f"    {shlex.join(['curl', '-s', url, '-H', header, '-d', f'@{question}'])}",
        f"It was answered with: {json.dumps(talk.first_answer(), ensure_ascii=False)}",
    ]
    for line in lines:  # as they are: a line that is cut or folded can't be copied
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def serve_command(settings: Settings) -> str:
    """Return the `lmcache-xpu serve` that has these settings, and listens on the default port."""
    program, here = Path(sys.executable).parent / "lmcache-xpu", Path.cwd()
    if shutil.which(program.name) == str(program):
        program = Path(program.name)
    elif program.is_relative_to(here):
        program = program.relative_to(here)
    words = [str(program), "serve", settings.model]
    for name in sorted(settings.model_fields_set - {"model", "port"}):
        value = getattr(settings, name)
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return shlex.join(words)
