"""A mistake ends with one line and exit code 2, before any load is sent."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest
from locust_process import OPTIONS, ROOT, end, locust

DEAD = "http://127.0.0.1:9"
COMPARISONS = (
    (["--url", DEAD], f"found --url {DEAD}; expected VARIANT=http://HOST:PORT"),
    (["--url", f"gpu={DEAD}"], "found --url for gpu; expected one of none, cpu"),
    (["--url", f"none={DEAD}"], f"found no answer from none={DEAD}"),
    (["--url", "none=http://["], "found no answer from none=http://["),
    (["--url", "none=127.0.0.1:9"], "expected VARIANT=http://HOST:PORT"),
    (["--again", "MISSING"], "found no rows in MISSING"),
    (["--slo", "MISSING"], "found --slo MISSING, No such file"),
    (["--report-dir", "/proc/x"], "found --report-dir /proc/x"),
    (["--work", "/proc/x"], "found --work /proc/x"),
    (["--compose", "MISSING"], "found no file MISSING"),
    (["--order", "none,gpu"], "found variants ['gpu']"),
    (["--profile", "x"], "found profile x"),
)
# All in one process, because importing takes longer than refusing.
COMPARE = """
import json, sys
import typer
from typer.testing import CliRunner
from loadtests.compare import main

app = typer.Typer()
app.command()(main)
runner = CliRunner()
done = [runner.invoke(app, arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[each.exit_code, each.output, repr(each.exception)] for each in done]))
"""


def test_of_a_comparison_nothing_starts(tmp_path):
    where = ["--profile", "short", "--report-dir", str(tmp_path / "r"), "--work", str(tmp_path)]
    cases = json.dumps([[*where, *arguments] for arguments, _ in COMPARISONS])
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, cases],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for (code, output, error), (arguments, says) in zip(results, COMPARISONS, strict=True):
        assert code == 2, (arguments, output, error)
        assert says in output, arguments
        assert "starting" not in output, arguments
        assert error == "SystemExit(2)", arguments
    assert not (ROOT / "MISSING").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"--tags": "nonsense"}, "found --tags nonsense; expected one of multi-round"),
        ({"--num-rounds": 1}, "expected at least 1 user, at least 2 rounds"),
        ({"--silence-s": -1}, "--silence-s: Input should be greater than 0, found -1"),
        ({"--stages": "9:2"}, "found --stages with --qps 4; expected --qps 0"),
        ({"--tags": "conversations"}, "expected --conversations FILE"),
        (
            {"--tags": "conversations", "--conversations": "MISSING"},
            "found --conversations MISSING, No such file or directory; expected a list",
        ),
        (
            {"--tags": "conversations", "--conversations": "README.md"},
            "found --conversations README.md, JSONDecodeError",
        ),
        ({"--report-dir": "/proc/x"}, "found --report-dir /proc/x, No such file or directory"),
        ({"--slo": "MISSING"}, "found --slo MISSING, No such file or directory; expected a TOML"),
        ({"--slo": "README.md"}, "found --slo README.md, which says: "),
        ({"--model": "other"}, "found stub, stub-stall"),
        ({"--model": "stub-http-503"}, "warm-up requests failed (first: HTTP 503"),
        ({"--host": "http://127.0.0.1:9"}, "found no list of models at http://127.0.0.1:9"),
        ({"--host": "127.0.0.1:9"}, "found no list of models at http://127.0.0.1:9"),
    ],
)
def test_what_can_not_be_run_is_refused(stub, tmp_path, options, says):
    with locust(stub.url, tmp_path / "r", **options) as process:
        code, said = end(process)
    assert code == 2, said
    assert says in said
    assert "Traceback" not in said
    refused = next((line for line in said.splitlines() if says in line), "")
    # Refused before anything starts, but for a server that fails: without Locust's empty tables.
    assert "Aggregated" not in said or "warm-up" in refused


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b""])
def test_a_port_that_is_not_http_is_refused(tmp_path, answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=speak, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with locust(url, tmp_path / "r") as process:
            code, said = end(process)
    assert code == 2, said
    assert f"found no list of models at {url}" in said
    assert "Traceback" not in said
    assert not (tmp_path / "r" / "rows.jsonl").exists()


def test_a_bug_at_the_start_ends_the_run_instead_of_hanging(stub, tmp_path):
    """An error that nobody expects: the users would wait for a run that never begins."""
    code = "import loadtests.run as r; r.Run.client = None; from locust.main import main; main()"
    command = [sys.executable, "-c", code, "-f", "loadtests/locustfile.py", "--headless"]
    options = OPTIONS | {"--host": stub.url, "--report-dir": tmp_path / "r"}
    command += [str(word) for pair in options.items() for word in pair]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert done.returncode == 2, done.stderr
    assert "TypeError" in done.stderr
