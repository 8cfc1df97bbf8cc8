"""What is checked before any load is sent, so that a mistake costs a second and no result."""

from __future__ import annotations

import tempfile
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import orjson
from geventhttpclient.client import HTTPClient
from locust.env import Environment

from loadtests.options import Options, parsed
from loadtests.slo import Slo
from loadtests.workloads import WORKLOADS, Plan

__all__ = ["check_output", "check_run", "check_slo", "served_models", "with_scheme", "workload_of"]

ANSWER_S = 10.0


def check_run(environment: Environment) -> None:
    """Check a run's options against each other, its files, and the server.

    Raises:
        ValueError: an option or a file is not as it has to be.
        RuntimeError: the server does not answer, or lacks the model.
    """
    options = Options.of(environment)
    workload = workload_of(environment)
    check_slo(options.slo)
    if options.report_dir is not None:
        check_output(options.report_dir, "--report-dir")
    users = int(parsed(environment).num_users or 1)
    next(WORKLOADS[workload](Plan(options=options, users=users, salt="")), None)
    served_models(str(environment.host), options)


def with_scheme(host: str | None) -> str | None:
    """Return a server's address with `http://` where it has no scheme."""
    return f"http://{host}" if host and "://" not in host else host


def workload_of(environment: Environment) -> str:
    """Return the one workload that --tags names.

    Raises:
        ValueError: there is no such workload, or more than one.
    """
    tags = parsed(environment).tags or []
    if len(tags) != 1 or tags[0] not in WORKLOADS:
        raise ValueError(
            f"found --tags {' '.join(tags) or '(none)'}; expected one of {', '.join(WORKLOADS)}."
        )
    return str(tags[0])


def check_slo(path: Path) -> None:
    """Check a file of thresholds.

    Raises:
        ValueError: it can't be read, or is not as it has to be.
    """
    try:
        Slo.load(path)
    except OSError as error:
        raise ValueError(f"found --slo {path}, {error.strerror}; expected a TOML file.") from error
    except ValueError as error:
        first = str(error).splitlines()
        raise ValueError(
            f"found --slo {path}, which says: {' '.join(line.strip() for line in first[:3])}; "
            "expected a file like loadtests/slo.toml."
        ) from error


def check_output(directory: Path, option: str) -> None:
    """Make a directory for results, and write into it.

    Raises:
        ValueError: it can't be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"found {option} {directory}, {error.strerror}; expected a directory that can be "
            "written."
        ) from error


def served_models(host: str, options: Options) -> list[str]:
    """Return the names of the models that a server has, the one that is asked for among them.

    Raises:
        RuntimeError: it does not answer, is no OpenAI-style server, or lacks the model.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        http = HTTPClient.from_url(host, connection_timeout=ANSWER_S, network_timeout=ANSWER_S)
        response = http.get(f"{urlsplit(host).path.rstrip('/')}/v1/models", headers=headers)
        page = response.read()
        if response.status_code in (401, 403):
            raise RuntimeError(
                f"found that {host} asks for a key (HTTP {response.status_code}); expected it in "
                "LOCUST_API_KEY."
            )
        names = [str(model["id"]) for model in orjson.loads(page)["data"]]
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"found no list of models at {host}/v1/models ({error}); expected an OpenAI-style "
            "server. Check HOST: `curl HOST/v1/models` shows what answers."
        ) from error
    if not names or (options.model and options.model not in names):
        raise RuntimeError(
            f"found {', '.join(names) or 'no model'} at {host}/v1/models; expected "
            f"{options.model or 'a model'}."
        )
    return names
