"""Options, engines and the table of promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from stack import Compose, Engine, Processes, Stack, Url

from lmcache_xpu.demo.model import EXACT, make_model

BREAKS = (
    "guard",
    "withhold",
    "_take_back",
    "salt",
    "finished",
    "weights",
    "checksum",
    "shift",
)
MODES = ["standard", "layerwise"]
DISK_GIB = 64 / 1024


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stack under test")
    group.addoption("--stack", choices=("processes", "compose", "url"), default="processes")
    group.addoption("--url", help="with --stack url: where the engine or its router answers")
    group.addoption("--api-key", help="with --stack url: its key")
    group.addoption(
        "--break",
        default="",
        choices=("", *BREAKS),
        help="take a part of the product away inside the engine: its tests must fail",
    )
    group.addoption("--requests", type=int, default=300, help="of the exactness test, per mode")
    group.addoption("--soak-s", type=float, default=0, help="length of the soak; 0: none")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(name): which promise a test checks")


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
    if chosen == "compose":
        return Compose()
    return Processes(
        tmp_path_factory.mktemp("stack"),
        request.getfixturevalue("model"),
        request.config.getoption("--break"),
    )


@pytest.fixture(scope="session", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def disk(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk tier's directory of the shared engine."""
    return tmp_path_factory.mktemp(f"disk-{mode}")


@pytest.fixture(scope="session")
def engine(stack: Stack, mode: str, disk: Path) -> Iterator[Engine]:
    """One engine for all tests of a mode: small CPU tier, small disk tier."""
    if mode == "layerwise" and isinstance(stack, Url):
        pytest.skip("a given engine has one mode; it is tested as the standard one")
    with stack.start(layerwise=mode == "layerwise", disk_path=disk, disk_gib=DISK_GIB) as started:
        started.ask([300] * 300)  # what is compiled or allocated once
        yield started


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """A measured value, for the table and the JUnit file."""
    return record_property


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One engine after the other; tests that end or wreck it come last."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if marker := item.get_closest_marker("promise"):
        report.promise = marker.args[0]
    return report


WORDS = {"passed": "kept", "failed": "BROKEN", "skipped": "skipped", "xfailed": "known limit"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The promises, and what was measured for each."""
    rows: dict[tuple[str, str], list[tuple[str, pytest.TestReport]]] = {}
    for outcome in WORDS:
        for report in terminalreporter.stats.get(outcome, ()):
            if outcome != "passed" or report.when == "call":
                name = report.nodeid.rpartition("::")[2].partition("[")[0]
                key = getattr(report, "promise", ""), name.removeprefix("test_").replace("_", " ")
                rows.setdefault(key, []).append((outcome, report))
    table = Table("promise", "test", "outcome", "s", "figures", title="Promises")
    for (promise, name), reports in sorted(rows.items()):
        outcomes = Counter(WORDS[outcome] for outcome, _ in reports)
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
