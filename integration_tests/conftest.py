"""Options, engines and the table of promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from breaks import PARTS
from engine import Engine
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from stack import Compose, Kept, Processes, Stack, Url
from xdist.scheduler import LoadScopeScheduling

from lmcache_xpu.harness.random_model import EXACT, make_model

MODES = ["standard"]  # layerwise is LMCache's own engine: tests/engine/test_stock.py
DISK_GIB = 64 / 1024


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stack under test")
    group.addoption("--stack", choices=("processes", "compose", "url"), default="processes")
    group.addoption("--url", help="with --stack url: where the engine or its router answers")
    group.addoption("--api-key", help="with --stack url: its key")
    group.addoption(
        "--break",
        default="",
        choices=("", *PARTS),
        help="run the tests that must fail without this part of the product, without it",
    )
    group.addoption("--requests", type=int, default=40, help="of the exactness test, per mode")
    group.addoption("--soak-s", type=float, default=0, help="length of a mode's soak; 0: none")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(name): which promise a test checks")
    config.addinivalue_line(
        "markers",
        "fails_without(*parts, mode=None): that --break may name; of one mode alone",
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(EXACT, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """What `--stack` chose."""
    chosen = request.config.getoption("--stack")
    if chosen == "url":
        if not (url := request.config.getoption("--url")):
            raise pytest.UsageError("--stack url needs --url")
        return Url(url, request.config.getoption("--api-key"))
    make = Compose if chosen == "compose" else Processes
    return make(
        tmp_path_factory.mktemp("stack"),
        request.getfixturevalue("model"),
        request.config.getoption("--break"),
    )


@pytest.fixture(scope="session")
def starts(stack: Stack) -> Stack:
    """A stack that starts engines with settings that a test chooses."""
    if isinstance(stack, Url):
        pytest.skip("needs an engine with settings of its own; this one is given by --url")
    return stack


@pytest.fixture(scope="session", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def disk(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk tier's directory of the shared engine."""
    return tmp_path_factory.mktemp(f"disk-{mode}")


@pytest.fixture(scope="session")
def kept(stack: Stack, mode: str, disk: Path) -> Iterator[Kept]:
    """The engine of a mode: small CPU tier, small disk tier."""
    if mode == "layerwise" and isinstance(stack, Url):
        pytest.skip("a given engine has one mode; it is tested as the standard one")
    # Two of the model's eight layers at once: left to itself, they would be one object.
    how = {"layerwise": True} if mode == "layerwise" else {}
    with Kept(stack, **how, disk_path=disk, disk_gib=DISK_GIB) as kept:
        yield kept


@pytest.fixture
def engine(kept: Kept) -> Engine:
    """The engine of a mode, running."""
    return kept.engine()


@pytest.fixture
def small(engine: Engine) -> Engine:
    """As `engine`, where a few prompts fill its tiers."""
    if not engine.small:
        pytest.skip("needs tiers of a few MiB, to fill them; this engine is given by --url")
    return engine


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """A measured value, for the table and the JUnit file."""
    return record_property


class ByEngine(LoadScopeScheduling):
    """With pytest-xdist: the tests of an engine, or of a file, go to one worker.

    It gives a worker its next ones while two are left: long tests come first in a file.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, rest = nodeid.partition("::")
        parameters = rest.partition("[")[2]
        return next((mode for mode in MODES if parameters.startswith(mode)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEngine:
    config.option.loadscopereorder = False  # not by their numbers of tests: by what they take
    return ByEngine(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test names a part that it fails without; with --break, run those that name it."""

    def named(item: pytest.Item) -> bool:
        return any(item.iter_markers("fails_without")) or any(item.iter_markers("xfail"))

    if nameless := [item.name for item in items if not named(item)]:
        raise pytest.UsageError(f"{nameless}: expected the mark fails_without; see breaks.py")
    if part := config.getoption("--break"):
        chosen = [item for item in items if part in _needs(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        for item in chosen:
            item.add_marker(pytest.mark.xfail(strict=True, reason=f"without: {PARTS[part]}"))
        items[:] = chosen
    # The longest first: five engines, one after another.
    items.sort(key=lambda item: item.path.name != "test_8_other_engines.py")


def _needs(item: pytest.Item) -> set[str]:
    """The parts that a test fails without, in its mode."""
    mode = item.callspec.params.get("mode") if hasattr(item, "callspec") else None
    return {
        part
        for marker in item.iter_markers("fails_without")
        for part in marker.args
        if marker.kwargs.get("mode") in (None, mode)
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report = yield
    if marker := item.get_closest_marker("promise"):
        report.promise = marker.args[0]
    if item.config.getoption("--break") and hasattr(report, "wasxfail"):
        assert call.excinfo is not None
        if report.when != "call" or "an engine that answers" in str(call.excinfo.value):
            report.outcome = "failed"  # no engine: that says nothing about the test
            del report.wasxfail
    return report


WORDS = {"passed": "kept", "failed": "BROKEN", "error": "ERROR", "skipped": "skipped"}
WORDS_OF_BREAKS = {**WORDS, "failed": "NOT SEEN", "xfailed": "seen"}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The promises, and what was measured for each."""
    part = config.getoption("--break")
    words = WORDS_OF_BREAKS if part else {**WORDS, "xfailed": "known limit"}
    rows: dict[tuple[str, str], list[tuple[str, pytest.TestReport]]] = {}
    for outcome in words:
        for report in terminalreporter.stats.get(outcome, ()):
            if not isinstance(report, pytest.TestReport):
                continue  # of a file that could not be collected
            if outcome != "passed" or report.when == "call":
                name = report.nodeid.rpartition("::")[2].partition("[")[0]
                key = getattr(report, "promise", ""), name.removeprefix("test_").replace("_", " ")
                rows.setdefault(key, []).append((outcome, report))
    title = f"Without: {PARTS[part]}" if part else "Promises"
    table = Table("promise", "test", "outcome", "s", "figures", title=title)
    for (promise, name), reports in sorted(rows.items()):
        outcomes = Counter(words[outcome] for outcome, _ in reports)
        figures = [
            f"{report.nodeid.partition('[')[2].rstrip(']')}: "
            + ", ".join(f"{key} {value}" for key, value in report.user_properties)
            for _, report in reports
            if report.user_properties
        ]
        table.add_row(
            promise,
            name,
            ", ".join(f"{count} {word}" for word, count in outcomes.items()),
            f"{sum(report.duration for _, report in reports):.0f}",
            escape("\n".join(figures)),
        )
    Console(width=150).print(table)
