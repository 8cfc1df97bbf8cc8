"""Where the load test hooks into Locust's events."""

from __future__ import annotations

import argparse
import logging
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner
from pydantic import ValidationError

from loadtests import run as runs
from loadtests.options import Options, parsed
from loadtests.preflight import check_run, with_scheme

__all__: list[str] = []

_results: list[Callable[[], None]] = []  # to be shown in the end

LOG = logging.getLogger("loadtests")
FAILED, REFUSED = 1, 2  # exit codes: thresholds missed or run cut short; nothing measured


@events.init_command_line_parser.add_listener
def _options(parser: argparse.ArgumentParser, **_: Any) -> None:
    Options.add_to(parser)
    parser.set_defaults(tags=["multi-round"])


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    """Refuse bad options before anything starts; and let SIGTERM end a run as Ctrl-C does.

    Locust's own handler for it comes only after a headless run with a shape has ended.
    """
    is_worker = isinstance(environment.runner, WorkerRunner)
    environment.host = with_scheme(environment.host)
    try:
        Options.of(environment)
        # The web page may still change everything: what it starts is checked when it starts.
        if parsed(environment).headless and not is_worker:
            check_run(environment)
    except (ValueError, RuntimeError) as error:
        LOG.error("%s", _short(error))
        raise SystemExit(REFUSED) from None
    if not is_worker:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    environment.host = with_scheme(environment.host)  # the web page may have changed it
    try:
        runs.start(environment)
    except Exception as error:  # whatever it is, without a run the users would wait for ever
        expected = isinstance(error, (ValueError, RuntimeError, OSError))
        LOG.error("%s", _short(error), exc_info=None if expected else error)
        environment.process_exit_code = REFUSED
        assert environment.runner is not None
        environment.runner.quit()


@events.test_stop.add_listener
def _stop(environment: Environment, **_: Any) -> None:
    """The web page's stop, after which there may be another run.

    Not for headless runs: their workers send their last rows later than this.
    """
    if not parsed(environment).headless:
        _finish(environment)
        _show()


@events.quitting.add_listener
def _quitting(environment: Environment, **_: Any) -> None:
    _finish(environment)


@events.report_to_master.add_listener
def _report(data: dict[str, Any], **_: Any) -> None:
    run = runs.current()
    if run is not None and run.is_worker:
        data["rows"] = run.recorder.take()


@events.worker_report.add_listener
def _receive(data: dict[str, Any], **_: Any) -> None:
    run = runs.current()
    if run is not None and (rows := data.get("rows")):
        run.recorder.put(rows)


@events.quit.add_listener
def _quit(**_: Any) -> None:
    """The last of all, after Locust's own tables."""
    _show()


def _show() -> None:
    while _results:
        _results.pop()()


def _finish(environment: Environment) -> None:
    run = runs.current()
    if run is None or not run.active or isinstance(environment.runner, WorkerRunner):
        return
    run.close()
    # Here, because it brings pandas and matplotlib, which workers don't need, and which would
    # take seconds from the start.
    from loadtests.report import report_run

    try:
        verdict = report_run(run.directory, run.options.slo)
    except (OSError, ValueError) as error:  # no room, or --slo was edited meanwhile
        LOG.error(
            "found that the report can't be written (%s); expected room in %s, where the rows are. "
            "Later: make loadtest-compare ARGS='--again %s'",
            _short(error),
            run.directory,
            run.directory,
        )
        environment.process_exit_code = FAILED
        return
    _results.append(partial(verdict.show, run.directory / "report.html"))
    if not verdict.holds or not run.complete:
        environment.process_exit_code = FAILED
    if run.workload == "trace":
        from loadtests.traces.summary import summarise

        LOG.info("%s", summarise(run.directory, run.options))


def _short(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    mistakes = []
    for item in error.errors():
        option = "".join(f"--{name}".replace("_", "-") + ": " for name in item["loc"])
        value = f", found {item['input']!r}" if item["loc"] else ""
        mistakes.append(f"{option}{item['msg']}{value}")
    return "; ".join(mistakes)
