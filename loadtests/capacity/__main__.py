"""The command: `make capacity`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from lmcache_xpu.errors import LMCacheXPUError
from loadtests.capacity.chat import ENGINES, HERE, SERVERS, Chat
from loadtests.capacity.result import RESULT, verdict, write
from loadtests.capacity.runner import BrokenStepError, judge, run_step
from loadtests.capacity.search import search
from loadtests.capacity.step import Limits, Step
from loadtests.facts import facts_of
from loadtests.recorder import META
from loadtests.servers import Compose, LocalEngines, Servers, Urls
from loadtests.slo import Slo
from loadtests.variants import VARIANTS

__all__ = ["Capacity", "app"]

REFUSED = 2  # the exit code when nothing was measured
app = typer.Typer(add_completion=False)
SLO = Path(__file__).parents[1] / "slo.toml"


class Capacity:
    """The sweep over all variants; what is measured is written after every step.

    Args:
        servers: where the variants run.
        chat: what a user does.
        limits: what has to be kept.
        directory: for the result and the rows.
        facts: for the result.
    """

    def __init__(
        self,
        servers: Servers,
        chat: Chat,
        limits: Limits,
        *,
        directory: Path,
        facts: dict[str, Any],
    ) -> None:
        self._servers, self._chat, self._limits = servers, chat, limits
        self._directory, self._facts = directory, facts
        self._console = Console(stderr=True, soft_wrap=True)
        self._begin = time.monotonic()
        self._salt = "k" + secrets.token_hex(4)
        self.sweep: dict[str, list[Step]] = {}

    def measure(self, names: list[str], *, most: int, within: float, arguments: list[str]) -> None:
        """Search each variant's number of users.

        Raises:
            BrokenStepError: a step measured nothing; what was measured before it is written.
            LMCacheXPUError: an engine did not start.
        """
        for name in names:
            steps = self.sweep.setdefault(name, [])
            self._say(f"starting: {VARIANTS[name].about}")
            with self._servers.running(VARIANTS[name]) as url:

                def fits(
                    users: int, name: str = name, url: str = url, steps: list[Step] = steps
                ) -> bool:
                    # Every variant gets the same texts, and no step the texts of another.
                    step = run_step(
                        self._chat,
                        users,
                        url=url,
                        salt=f"{self._salt}{users}",
                        limits=self._limits,
                        directory=self._directory / "rows" / f"{name}-{users}",
                        arguments=arguments,
                    )
                    steps.append(step)
                    self.write()
                    p95 = "" if step.ttft_p95_s is None else f", TTFT p95 {step.ttft_p95_s:.2f} s"
                    said = "fits" if step.fits else f"does not fit: {'; '.join(step.misses)}"
                    self._say(f"{name}, {users} users: {said} (n = {step.requests}{p95})")
                    return step.fits

                search(
                    fits,
                    start=self._chat.start,
                    most=most,
                    within=within,
                    allowed=self._chat.spreads,
                )

    def read(self) -> None:
        """Judge the steps that an earlier sweep left in the directory, instead of measuring."""
        paths = self._directory.glob(f"rows/*/{META}")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime):
            name = path.parent.name.rpartition("-")[0]
            self.sweep.setdefault(name, []).append(judge(path.parent, self._limits))

    def write(self) -> None:
        """Write what there is."""
        write(self.sweep, self._limits, self._facts, self._directory)

    def _say(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._begin:5.0f} s  {line}", highlight=False)


@app.command()
def main(
    url: Annotated[
        list[str] | None, typer.Option(help="variant=http://...; repeat it for each variant")
    ] = None,
    compose: Annotated[Path | None, typer.Option(help="Compose file, instead of engines")] = None,
    service: Annotated[str, typer.Option(help="The engine's service in it")] = "engine-xpu",
    compose_url: Annotated[str, typer.Option(help="Its address")] = "http://127.0.0.1:8000",
    variants: Annotated[str, typer.Option(help="Comma separated; the first is the base")] = "",
    gap_s: Annotated[float | None, typer.Option(min=0.1, help="Between a user's sends")] = None,
    rounds: Annotated[int | None, typer.Option(min=2, help="Questions per user")] = None,
    shared_words: Annotated[int | None, typer.Option(min=0, help="That all users share")] = None,
    history_words: Annotated[int | None, typer.Option(min=0, help="Of a user's context")] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer")] = None,
    requests: Annotated[
        int | None, typer.Option(min=20, help="Per step, at the least; fewer have no p95")
    ] = None,
    start: Annotated[int | None, typer.Option(min=1, help="Users to begin with")] = None,
    most: Annotated[int, typer.Option(min=1, help="Users to end with at the latest")] = 4096,
    within: Annotated[float, typer.Option(min=0, help="Share by which the answer may err")] = 0.1,
    slo: Annotated[Path, typer.Option(help="Thresholds; [goodput] and [[run]] count")] = SLO,
    report_dir: Annotated[Path | None, typer.Option(help="Default: reports/<time>")] = None,
    work: Annotated[Path, typer.Option(help="Model, logs and disk tier of engines")] = Path(
        ".demo"
    ),
    again: Annotated[
        Path | None, typer.Option(help="Only judge again, of a directory with rows")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="More for Locust: --seed=2")] = None,
) -> None:
    """Search how many users fit within the thresholds, for one variant after another."""
    urls = _urls(url or [])
    names = variants.split(",") if variants else list(urls) or ["none", "cpu"]
    if unknown := [name for name in names if name not in VARIANTS]:
        _refuse(f"found variants {unknown}; expected some of {', '.join(VARIANTS)}.")
    if urls and (absent := set(names) - urls.keys()):
        _refuse(f"found no --url for {sorted(absent)}; expected one for each variant.")
    if restarted := [name for name in names if VARIANTS[name].restarted]:
        _refuse(f"found variant {restarted}, which is about restarts; expected none, cpu, ...")
    if compose is not None and not compose.is_file():
        _refuse(f"found no compose file {compose}; expected one that names {service}.")
    try:
        limits = Limits.of(Slo.load(slo))
    except (OSError, ValidationError, ValueError) as error:
        _refuse(f"found --slo {slo}: {error}; expected a file like loadtests/slo.toml.")
    values: dict[str, Any] = {
        "gap_s": gap_s,
        "rounds": rounds,
        "shared_words": shared_words,
        "history_words": history_words,
        "answer_tokens": answer_tokens,
        "requests": requests,
        "start": start,
    }
    chat = dataclasses.replace(
        SERVERS if urls or compose else HERE,
        **{name: value for name, value in values.items() if value is not None},
    )
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H-%M-%S")
    directory = again or report_dir or Path("reports", stamp)
    if again is not None and not (again / RESULT).is_file():
        _refuse(f"found no {RESULT} in {again}; expected the directory of an earlier sweep.")
    if again is None and (directory / "rows").exists():
        _refuse(f"found an earlier run in {directory}; expected an empty directory.")
    try:
        for path in (directory, work):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(f"found a directory that can't be made: {error}; expected one to write to.")
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: stop, and write
    if again is not None:
        facts = json.loads((again / RESULT).read_text())["facts"]
    else:
        facts = facts_of(["make", "capacity", f"ARGS={' '.join(sys.argv[1:])}"])
        facts["a user"] = chat.facts()
    broken = ""
    with tempfile.TemporaryDirectory(prefix="capacity-disk-", dir=work) as disk:
        servers: Servers
        if again is not None or urls:
            servers = Urls(urls)
        elif compose is not None:
            servers = Compose(compose, service=service, url=compose_url, work=work)
        else:
            servers = LocalEngines(ENGINES, work=work.resolve(), disk=Path(disk).resolve())
        capacity = Capacity(servers, chat, limits, directory=directory.resolve(), facts=facts)
        try:
            if again is not None:
                capacity.read()
            else:
                capacity.measure(names, most=most, within=within, arguments=option or [])
        except (BrokenStepError, LMCacheXPUError) as error:
            broken = str(error)
        except KeyboardInterrupt:
            broken = "interrupted"
    if broken:
        facts["cut short"] = broken
        print(f"capacity: {broken}", file=sys.stderr)
    if not any(capacity.sweep.values()):
        _refuse("nothing was measured.")
    capacity.write()
    print(verdict(capacity.sweep) + (" (cut short)" if broken else ""))
    print(f"Result: {directory / RESULT}, capacity.md and capacity.png beside it")
    raise typer.Exit(1 if broken else 0)


def _urls(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        name, equals, address = pair.partition("=")
        if name not in VARIANTS or not equals or "://" not in address:
            _refuse(f"found --url {pair}; expected variant=http://..., with a variant's name.")
    return dict(pair.split("=", 1) for pair in pairs)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _refuse(reason: str) -> NoReturn:
    print(f"capacity: {reason}", file=sys.stderr)
    raise typer.Exit(REFUSED)


if __name__ == "__main__":
    app()
