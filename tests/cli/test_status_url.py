"""`lmcache-xpu status --url`: a running engine, and everything else that may answer there."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_xpu.cli import app
from tests.helm.stub_server import Stub

PAGES = Path(__file__).parents[1] / "harness" / "pages"
MODELS = {"data": [{"id": "rec"}]}


@pytest.fixture
def serve():
    """Start a server that answers by path; returns its address."""
    servers = []

    def start(page: str | list[str], models: object = MODELS, status: int = 200) -> str:
        pages = [page] if isinstance(page, str) else page

        def answer(path: str) -> object:
            if path == "/metrics":
                return pages.pop(0) if len(pages) > 1 else pages[0]
            return models

        servers.append(Stub(answer, lambda body: status))
        return f"http://127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def recorded(name: str) -> str:
    return (PAGES / f"{name}.prom").read_text()


def status(*options: object, **variables: str):
    words = ["status", *map(str, options)]
    return CliRunner().invoke(
        app, words, catch_exceptions=False, env={"COLUMNS": "80", **variables}
    )


def test_an_engine_whose_cache_works(serve):
    done = status("--url", serve(recorded("hits")) + "/v1")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].endswith("serves rec; since it started:")
    assert "disk tier 16,384 57%" in lines
    assert "computed 10,168 36%" in lines
    assert any(line.startswith("The cache works: 57%") for line in lines)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_span(serve):
    done = status("--url", serve([recorded("fits"), recorded("hits")]), "--since", 1)
    assert done.exit_code == 0
    assert "in 1 seconds" in done.stdout
    assert "26,400" in done.stdout


def test_json_has_everything(serve):
    url = serve(recorded("hits"))
    answer = json.loads(status("--url", url, "--json").stdout)
    assert (answer["ok"], answer["models"], answer["url"]) == (True, ["rec"], url)
    assert answer["use"]["disk_tokens"] == 16_384
    assert answer["advice"][0]["outcome"] == "ok"


def test_something_that_has_to_be_mended_ends_with_1(serve):
    broken = recorded("hits").replace(
        'lmcache_xpu_errors_total{direction="load",reason="corrupt",tier="disk"} 0.0',
        'lmcache_xpu_errors_total{direction="load",reason="corrupt",tier="disk"} 2.0',
    )
    done = status("--url", serve(broken))
    assert done.exit_code == 1
    assert "2 times a load failed in the disk tier, corrupt" in done.stdout


def test_the_key_is_sent_and_never_shown(serve):
    url = serve(recorded("hits"), {"error": "no"})
    done = status("--url", url, LMCACHE_XPU_API_KEY="s3cret-key")
    assert done.exit_code == 0
    assert "s3cret-key" not in done.output
    assert "models that this key may not see" in done.stdout.replace("\n", " ")


def test_it_imports_neither_torch_nor_vllm(serve):
    """They take most of ten seconds to import."""
    program = (
        "import sys\n"
        "from lmcache_xpu.cli import app\n"
        "try: app(['status', '--url', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "sys.exit(str({'torch', 'vllm', 'lmcache'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, serve(recorded("hits"))], capture_output=True, text=True
    )
    assert done.stderr == "set()\n"


def test_who_else_may_answer_is_told_in_one_line(serve):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    vllm = "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total 5.0\n"
    for url, words in (
        (f"http://127.0.0.1:{closed}", "no answer from"),
        (serve("<html>hello</html>"), "no metrics of vLLM"),
        (serve('{"detail": "x"}', status=404), "no metrics of vLLM (404)"),
        (serve("no", status=401), "LMCACHE_XPU_API_KEY"),
        (serve(vllm), "nothing of lmcache-xpu"),
        (serve(vllm).replace("http", "https"), "no answer from https"),
        ("127.0.0.1:8000", "the address of an engine"),
        ("http://host:99999", "the address of an engine"),
        ("http://", "the address of an engine"),
    ):
        done = status("--url", url)
        assert done.exit_code == 2, url
        assert words in done.stderr, url
        assert done.stderr.count("\n") == 1, url
        assert done.stdout == "", url


def test_a_span_needs_an_engine():
    done = status("--since", 5)
    assert (done.exit_code, "--url" in done.stderr) == (2, True)
    for value in ("0", "nan", "-1", "1e9"):
        assert status("--url", "http://x", "--since", value).exit_code == 2
