"""Compare variants under the same load, and judge: `make loadtest-compare`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from lmcache_xpu.errors import LMCacheXPUError
from loadtests.compare_options import more_of, refuse, urls_of, versions_of
from loadtests.comparison import Arm
from loadtests.facts import facts_of
from loadtests.figures import load
from loadtests.preflight import check_output, check_slo
from loadtests.recorder import ENDS, META
from loadtests.report import report_run, write_report
from loadtests.servers import Compose, LocalEngines, Servers, Urls
from loadtests.variants import PROFILES, VARIANTS, Profile, Variant

__all__ = ["Comparison"]

HERE = Path(__file__).parent
STOP_S = 60.0


class CutShortError(Exception):
    """A run ended before its time."""


class Comparison:
    """The runs of a comparison, and their report.

    Args:
        servers: where the variants run.
        profile: the load.
        directory: for the report and the rows.
        slo: the file of thresholds.
        arguments: more options for every run.
    """

    def __init__(
        self,
        servers: Servers,
        profile: Profile,
        *,
        directory: Path,
        slo: Path,
        arguments: list[str],
    ) -> None:
        self._servers, self._profile, self._directory = servers, profile, directory
        self._slo, self._arguments = slo, arguments
        self._console = Console(stderr=True, soft_wrap=True)
        self._begin = time.monotonic()
        self._salt = "c" + secrets.token_hex(4)
        names = dict.fromkeys(profile.order)
        self.arms = {name: Arm(name=name, about=VARIANTS[name].about) for name in names}

    def measure(self) -> None:
        """All runs, in their order.

        Raises:
            CutShortError: a run failed; what was measured before it stays.
            LMCacheXPUError: an engine did not start.
        """
        times: dict[str, int] = {}
        for name in self._profile.order:
            times[name] = times.get(name, 0) + 1
            self._variant(VARIANTS[name], times[name])

    def report(self, facts: dict[str, Any]) -> bool:
        """Write the report over what was measured; whether all thresholds hold."""
        arms = [arm for arm in self.arms.values() if arm.runs]
        verdict = write_report(arms, self._directory, self._slo, facts=facts)
        verdict.show(self._directory / "report.html")
        return verdict.holds

    def read(self) -> None:
        """Take the runs that an earlier comparison left in the directory, instead of measuring."""
        for path in sorted(self._directory.glob(f"rows/*/{META}")):
            name, _, part = path.parent.name.partition("-")
            _, _, kind = part.partition("-")
            arm = self.arms.setdefault(name, Arm(name=name, about=VARIANTS[name].about))
            if kind in ("", "no-reuse"):  # else of the engine before a restart
                (arm.control if kind else arm.runs).append(load(path.parent))

    def _variant(self, variant: Variant, repeat: int) -> None:
        """All runs of a variant's turn. Every variant gets the same texts in the same repeat."""
        profile, arm = self._profile, self.arms[variant.name]
        salt = f"{self._salt}{repeat}"
        label = f"{variant.name}-{repeat}"
        if variant.restarted:
            with self._server(variant) as url:
                self._run(url, f"{label}-before", self._load(salt, restarted=True))
        with self._server(variant) as url:
            options = self._load(salt, restarted=variant.restarted)
            arm.runs.append(load(self._run(url, label, options)))
            if profile.control_s and variant.control:
                options = self._control(salt)
                arm.control.append(load(self._run(url, f"{label}-no-reuse", options)))

    def _server(self, variant: Variant) -> Any:
        self._say(f"starting: {variant.about}")
        return self._servers.running(variant)

    def _run(self, url: str, label: str, options: dict[str, object]) -> Path:
        self._say(f"load: {label}")
        directory = self._directory / "rows" / label
        directory.mkdir(parents=True)
        with (directory / "locust.log").open("w") as log:
            command = self._command({"--host": url, "--report-dir": directory, **options})
            log.write(shlex.join(command) + "\n")
            log.flush()
            locust = subprocess.Popen(command, stdout=log, stderr=log, cwd=HERE.parent)
            try:
                code = locust.wait()
            except BaseException:  # Ctrl-C too: Locust ends with us, and reports
                # What a shell puts in the background ignores SIGINT, and so would Locust.
                locust.send_signal(signal.SIGTERM)
                locust.wait(STOP_S)
                raise
        if not (directory / META).exists() or code not in (0, 1):
            why = _cause(Path(log.name).read_text()) or f"exit code {code}"
            raise CutShortError(f"run {label} did not begin: {why} ({log.name})")
        ended_by = json.loads((directory / META).read_text())["ended_by"]
        if ended_by not in ENDS:
            raise CutShortError(f"run {label} was cut short: {ended_by}; see {log.name}")
        return directory

    def _load(self, salt: str, *, restarted: bool) -> dict[str, object]:
        profile = self._profile
        return {
            "--tags": "multi-round",
            "--salt": salt,
            "--users": profile.users,
            "--qps": profile.qps,
            "--num-rounds": profile.rounds,
            "--shared-system-prompt": profile.shared_words,
            "--user-history-prompt": profile.history_words,
            "--duration-s": profile.restart_duration_s if restarted else profile.duration_s,
        }

    def _control(self, salt: str) -> dict[str, object]:
        profile = self._profile
        return {
            "--tags": "no-reuse",
            "--salt": salt,
            "--users": 1,
            "--qps": 0,
            "--shared-system-prompt": 0,
            "--user-history-prompt": profile.control_words,
            "--duration-s": profile.control_s,
        }

    def _command(self, options: dict[str, object]) -> list[str]:
        everywhere = {"--slo": self._slo, "--answer-len": self._profile.answer_tokens}
        words = [str(word) for pair in (everywhere | options).items() for word in pair]
        start = [sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py")]
        return [*start, "--headless", "--only-summary", "--canned", *words, *self._arguments]

    def _say(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._begin:5.0f} s  {line}")


def main(
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}")] = "long",
    url: Annotated[
        list[str] | None, typer.Option(help="variant=http://...; repeat it for each variant")
    ] = None,
    compose: Annotated[Path | None, typer.Option(help="Compose file, instead of engines")] = None,
    service: Annotated[str, typer.Option(help="The engine's service in it")] = "engine-xpu",
    compose_url: Annotated[str, typer.Option(help="Its address")] = "http://127.0.0.1:8000",
    order: Annotated[str, typer.Option(help="Variants, comma separated; repeats allowed")] = "",
    slo: Annotated[Path | None, typer.Option(help="Thresholds; default: the profile's")] = None,
    report_dir: Annotated[Path | None, typer.Option(help="Default: reports/<time>")] = None,
    work: Annotated[Path, typer.Option(help="Model, logs and disk tier of engines")] = Path(
        ".demo"
    ),
    again: Annotated[
        Path | None, typer.Option(help="Only write the report again, of a directory with rows")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="More for Locust: --qps=2")] = None,
) -> None:
    """Run each variant under the same load, one after another, and write a report."""
    if profile not in PROFILES:
        refuse(f"found profile {profile}; expected one of {', '.join(PROFILES)}.")
    plan = PROFILES[profile]
    if again is not None and (again / META).exists():  # of one server: make loadtest
        _again(again, slo)
    if again is not None and not list(again.glob(f"rows/*/{META}")):
        refuse(f"found no rows in {again}; expected a directory that a load test wrote.")
    if compose is not None and not compose.is_file():
        refuse(f"found no file {compose}; expected a compose file.")
    urls = urls_of(url or [])
    if names := order.split(",") if order else list(urls):
        if unknown := [name for name in names if name not in VARIANTS]:
            refuse(f"found variants {unknown}; expected some of {', '.join(VARIANTS)}.")
        plan = dataclasses.replace(plan, order=tuple(names))
    if urls and (absent := set(plan.order) - urls.keys()):
        refuse(f"found no --url for {sorted(absent)}; expected one for each variant.")
    if restarted := [name for name in urls if VARIANTS[name].restarted]:
        refuse(f"found --url for {restarted}, which needs a restart; expected --compose for that.")
    slo = slo or next(p for p in (HERE / f"slo-{profile}.toml", HERE / "slo.toml") if p.exists())
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H-%M-%S")
    directory = again or report_dir or Path("reports", stamp)
    try:
        check_slo(slo)
        check_output(directory, "--report-dir")
        check_output(work, "--work")
    except ValueError as error:
        refuse(str(error))
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: stop, and report
    command = ["make", "loadtest-compare", f"PROFILE={profile}"]
    if more := shlex.join(more_of(sys.argv[1:])):
        command.append(f"ARGS={more}")
    facts = facts_of(command) | {"order": list(plan.order)}
    if urls:
        facts["servers' vLLM"] = versions_of(urls)
    with tempfile.TemporaryDirectory(prefix="loadtest-disk-", dir=work) as disk:
        servers: Servers
        if again is not None:
            servers = Urls({})
        elif compose is not None:
            servers = Compose(compose, service=service, url=compose_url, work=work)
        elif urls:
            servers = Urls(urls)
        else:
            servers = LocalEngines(plan, work=work.resolve(), disk=Path(disk).resolve())
        comparison = Comparison(
            servers, plan, directory=directory.resolve(), slo=slo, arguments=option or []
        )
        broken = ""
        try:
            if again is None:
                comparison.measure()
            else:
                summary = again / "summary.json"
                facts = json.loads(summary.read_text())["facts"] if summary.exists() else {}
                comparison.read()
        except (CutShortError, LMCacheXPUError) as error:
            broken = str(error)
        except KeyboardInterrupt:
            broken = "interrupted"
    if broken:
        facts["cut short"] = broken
        print(f"loadtest-compare: {broken}", file=sys.stderr)
    if not any(arm.runs for arm in comparison.arms.values()):
        refuse("nothing was measured.")
    holds = comparison.report(facts)
    raise typer.Exit(0 if holds and not broken else 1)


def _cause(log: str) -> str:
    """Return why Locust refused: the last line that our checks, or its parser of options, said."""
    marks = ("/ERROR/loadtests: ", ": error: ")
    said = [line.partition(mark)[2] for line in log.splitlines() for mark in marks if mark in line]
    return said[-1] if said else ""


def _again(directory: Path, slo: Path | None) -> NoReturn:
    """Write the report of one server's run again, from its rows."""
    verdict = report_run(directory, slo or HERE / "slo.toml")
    verdict.show(directory / "report.html")
    raise typer.Exit(0 if verdict.holds else 1)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
