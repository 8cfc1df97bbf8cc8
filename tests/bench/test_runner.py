"""`lmcache-xpu bench engine`: its figures, and the whole of it with a small engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from vllm.platforms import current_platform

from lmcache_xpu.bench import runner, shapes
from lmcache_xpu.bench.engine import _digests, at_server, lmcache_server
from lmcache_xpu.bench.report import Report
from lmcache_xpu.bench.runner import Result, _cause, device_masks, run
from lmcache_xpu.bench.shapes import SHAPES, chosen, default_name, shape_named
from lmcache_xpu.bench.variants import SERVER_URL, variants, variants_named
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.engine_arguments import vllm_arguments
from lmcache_xpu.launch.settings import Settings

SMALL = shape_named("small")
PYTHON = sys.executable
# Of each engine, in files that others may read.
FIELDS = {"variant", "title", "error", "seconds", "exact", "link_gb_s", "rounds", "medians"}


def results() -> list[Result]:
    none = Result("none", "no connector", link_gb_s={"load": 1.0})
    none.rounds = {
        "1024": [{"recompute": 200, "own prefix": 10}],
        "2048 + 256": [{"own prefix": 50}],
    }
    ours = Result("ours", "ours", exact=1.0)
    ours.rounds = {
        "1024": [{"recompute": 204, "own prefix": 11, "tier": 40}],
        "2048 + 256": [{"own prefix": 51, "tier": 55}],
    }
    bad = Result("lmcache", "LMCache", exact=0.3165, error="AssertionError: layout")
    return [none, ours, bad]


def test_limits_and_ratios():
    """A whole prompt's limit has a copy in it, a later turn's has none: it can hide."""
    report = Report(SMALL, results())
    none, ours, bad = report.results
    copy_ms = 1024 * SMALL.model.kv_bytes_per_token / 1.0e9 * 1e3
    whole, turn = (report.figures(ours, row) for row in ("1024", "2048 + 256"))
    assert whole["limit"] == pytest.approx(10 + copy_ms)
    assert whole["tier / limit"] == pytest.approx(40 / (10 + copy_ms))
    assert whole["recompute / alone"] == pytest.approx(1.02)
    assert turn["limit"] == pytest.approx(50)
    assert turn["tier / limit"] == pytest.approx(1.1)
    assert report.figures(none, "1024") == {"recompute": 200, "own prefix": 10}
    assert report.figures(bad, "1024") == {}


def test_what_is_not_exact_or_did_not_run_is_shown():
    figures = Report(SMALL, results())
    console = Console(width=140, record=True, file=io.StringIO())
    figures.show(console)
    text = console.export_text()
    assert "ours: 100.00% of the blocks are the same, to the byte" in text
    assert "LMCache: NOT EXACT, 31.65% of the blocks" in text
    assert "LMCache: AssertionError: layout" in text
    assert text.count("LMCache") == 2  # in no table
    assert "1.1" in text
    facts = json.loads(json.dumps(figures.as_dict()))
    assert facts["results"][1]["medians"]["2048 + 256"]["limit"] == pytest.approx(50)
    assert facts["requests"]["2048 + 256"] == {"history": 2048, "new": 256, "count": 1}
    assert set(facts["results"][1]) == FIELDS


def test_without_the_plain_engine_there_are_no_limits():
    ours = results()[1]
    assert Report(SMALL, [ours]).figures(ours, "1024") == ours.medians["1024"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_variant_is_made_of_settings(shape):
    for variant in variants(shape):
        settings = Settings.load(variant.values(shape, "model", "cuda", graphs=False))
        words = " ".join(vllm_arguments(settings))
        connectors = [
            name in words for name in ("LMCacheXPUConnector", "LMCacheXPUServerConnector")
        ]
        is_layerwise = variant.name == "ours-layerwise"
        assert connectors == [is_layerwise, variant.name in ("ours", "ours-server")]
        assert ("xpu.cache" in words) is (variant.name == "ours" and not settings.is_server)


def test_of_a_server_an_engine_is_told_where_it_listens():
    [stock] = variants_named(SMALL, ["lmcache-server"])
    settings = Settings.load(stock.values(SMALL, "model", "cpu", graphs=False))
    words = " ".join(vllm_arguments(at_server(settings, "tcp://127.0.0.1:5")))
    assert '"lmcache.mp.server_urls": "tcp://127.0.0.1:5"' in words
    assert SERVER_URL not in words
    assert "LMCacheMPConnector" in words


@pytest.mark.parametrize("device", ["auto", "xpu", "cpu", "cuda"])
def test_workers_that_copy_themselves_have_shared_memory(device):
    """Without it LMCache would take pickled tensors, which are refused: nothing was stored."""
    [stock] = variants_named(SMALL, ["lmcache-server"])
    settings = Settings.load(stock.values(SMALL, "model", device, graphs=False))
    command = lmcache_server(settings, Path("/tmp/a-name/socket"))
    assert ("--shm-name a-name --no-l1-use-lazy" in " ".join(command)) is (device != "cuda")


def test_names_are_checked():
    with pytest.raises(SettingsError, match="one of none, ours"):
        variants_named(SMALL, ["theirs"])
    with pytest.raises(SettingsError, match="one of 8b, 1b, small"):
        shape_named("9b")
    assert [variant.name for variant in variants_named(SMALL, ["ours", "none"])] == ["none", "ours"]


@pytest.mark.parametrize(("device", "name"), [("cpu", "small"), ("xpu", "1b")])
def test_the_default_shape_fits_the_device(monkeypatch, device, name):
    """A Llama of 8 billion parameters and its KV cache need 27 GiB; a B60 has 24."""
    monkeypatch.setattr(shapes, "built_for", lambda: device)
    assert default_name() == name


def test_why_an_engine_ended():
    assert _cause(["x", "ValueError: no", "y"], 1) == "ValueError: no"
    assert _cause(["x"], 3) == "exit code 3"


def jobs_of(*names: str) -> dict:
    return {name: row.measure for name, row in chosen("row", SMALL.requests, names).items()}


CONNECT = """
import os, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[-1]))
"""
STAND_IN = f"""{CONNECT}
def note(what):
    with open(os.environ["NOTES"], "a") as file: file.write(what + "\\n")
name = "none" if "kv-transfer" not in str(sys.argv) and '"offload": false' in str(sys.argv) else "x"
while True:
    try: job = connection.recv()
    except EOFError: break
    job = getattr(job, "func", job).__name__
    note(f"{{name}} {{job}}")
    rounds = [{{"own prefix": 500}}, {{"own prefix": 250}}]
    connection.send({{"exactness": 1.0, "link_gb_s": {{"load": 1.0}}}}.get(job, rounds))
note(f"{{name}} ended")
"""


def run_small(monkeypatch, script, names, **options):
    """The bench, with a program in place of the engines."""
    monkeypatch.setattr(sys, "executable", _stand_in(script))
    how = {"repeats": 1, "timeout_s": 60, "save": lambda _: None} | options
    jobs = how.pop("jobs", jobs_of())
    return run(SMALL, variants_named(SMALL, names), jobs, console=Console(quiet=True), **how)


def test_results_are_saved_after_each_row(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    saved = []

    def save(results):
        saved.append([len(result.rounds) for result in results])

    run_small(monkeypatch, STAND_IN, ["none", "ours"], save=save)
    rows = range(len(SMALL.requests) + 1)
    assert saved == [[row] for row in rows] + [[rows[-1], row] for row in rows]


def test_some_rows_alone_are_timed_in_their_usual_order(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    whole, turn = "1024", "2048 + 256"
    (result,) = run_small(monkeypatch, STAND_IN, ["ours"], jobs=jobs_of(turn, whole))
    assert list(result.rounds) == [whole, turn]
    with pytest.raises(SettingsError, match=r"row '7'.*expected one of 1024, 2048"):
        jobs_of("7")


@pytest.mark.parametrize(
    ("script", "timeout_s", "error"),
    [
        ("print('RuntimeError: broken'); raise SystemExit(4)", 60, "RuntimeError: broken"),
        ("import time; time.sleep(60)", 1, "no answer within 1 s"),
        (CONNECT + "connection.recv(); raise SystemExit(5)", 60, "exit code 5"),
    ],
    ids=["fails", "hangs", "ends later"],
)
def test_an_engine_that_hangs_or_fails_is_a_result(monkeypatch, script, timeout_s, error):
    (result,) = run_small(monkeypatch, script, ["ours"], timeout_s=timeout_s)
    assert result.error == error
    assert not result.rounds


@pytest.mark.parametrize("error", [None, "ValueError: no room"])
def test_jobs_are_done_in_the_engines_process(monkeypatch, error):
    """Of which vLLM's engine alone is imitated here."""
    program = f"""
from lmcache_xpu.bench import engine
class Engine:
    def __init__(self, settings, hits): self.hits = hits
    def prompt(self, length): return [length]
    def forget(self): {'raise ValueError("no room")' if error else "pass"}
    def seconds(self, *prompts): return sum(map(sum, prompts)) / 1000
engine.Engine = Engine
engine.main()
"""
    monkeypatch.setattr(runner, "PROGRAM", program)
    (result,) = run(
        replace(SMALL, loaded=True),  # nothing is compared
        variants_named(SMALL, ["ours"]),
        jobs_of("1024", "2048 + 256"),
        repeats=1,
        timeout_s=60,
        console=Console(quiet=True),
        save=lambda _: None,
    )
    assert result.error == error
    if error is None:
        assert result.medians["1024"]["recompute"] == result.medians["1024"]["tier"] == 1024
        assert result.medians["2048 + 256"]["own prefix"] == 2304


@pytest.mark.parametrize("in_turn", [False, True])
def test_engines_are_asked_one_after_another_or_in_turn(monkeypatch, tmp_path, in_turn):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    none, ours = run_small(monkeypatch, STAND_IN, ["none", "ours"], in_turn=in_turn, repeats=2)
    assert (none.error, ours.error, ours.exact, none.link_gb_s) == (None, None, 1.0, {"load": 1.0})
    assert none.medians["4096"] == ours.medians["4 x (1024 + 128)"] == {"own prefix": 375}
    notes = (tmp_path / "notes").read_text().splitlines()
    rows = [note for note in notes if note.endswith("measure")]
    each = ["none", "x"] * 12 if in_turn else ["none"] * 12 + ["x"] * 12
    assert [note.split()[0] for note in rows] == each
    assert (notes.index("none ended") > notes.index("x measure")) == in_turn


@pytest.mark.parametrize(
    ("before", "count", "masks"),
    [
        ("", 1, ["0", "1", "2"]),
        ("", 2, ["0,1"]),
        ("4,6", 1, ["4", "6"]),
        ("4", 2, [None]),
    ],
    ids=["all", "two each", "chosen before", "too few"],
)
def test_engines_share_the_devices_out(monkeypatch, before, count, masks):
    monkeypatch.setattr(current_platform, "device_control_env_var", "MASK", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setenv("MASK", before)
    assert [mask.get("MASK") for mask in device_masks("xpu", count)] == masks
    assert device_masks("cpu", count) == [{}]


def _stand_in(script: str) -> str:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "python"
    path.write_text(f"#!{PYTHON}\n{script}\n")
    path.chmod(0o755)
    return str(path)


class Worker:
    """As `_digests` sees it: two layers of 8 blocks."""

    def __init__(self) -> None:
        self.model_runner = self.compilation_config = self
        self.kv_caches = [torch.randn(8, 2, 4, 6), torch.randn(2, 8, 4, 6)]
        self.static_forward_context = {
            str(number): SimpleNamespace(kv_cache=cache)
            for number, cache in enumerate(self.kv_caches)
        }

    def digests(self) -> torch.Tensor:
        [digests] = _digests(self, [(["0", "another rank's", "1"], [1, 5])], 8)
        return digests


def test_digests_see_every_byte_and_its_place():
    worker = Worker()
    before = worker.digests()
    assert before.shape == (2, 2)
    assert torch.equal(before, worker.digests())
    assert not torch.equal(before[0], before[0].flip(0))
    worker.kv_caches[0][5, 1, 3, 5] += 1
    after = worker.digests()
    assert (before == after).tolist() == [[True, False], [True, True]]
    first, second = worker.kv_caches[1][0, 1, 0, :2].tolist()
    worker.kv_caches[1][0, 1, 0, :2] = torch.tensor([second, first])  # swapped
    assert (after == worker.digests()).tolist() == [[True, True], [False, True]]


@pytest.mark.engine
@pytest.mark.tools
@pytest.mark.timeout(400)
def test_a_hit_is_exact_and_beats_recomputing(tmp_path: Path):
    figures = tmp_path / "figures.json"
    command = ["bench", "engine", "--shape", "small", "--repeats", "1", "--in-turn"]
    command += ["--json", str(figures)]
    wanted = ["--variant", "none", "--variant", "ours"]
    program = Path(sys.executable).with_name("lmcache-xpu")
    done = subprocess.run(
        [str(program), *command, *wanted], capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    none, ours = json.loads(figures.read_text())["results"]
    assert ours["exact"] == 1
    for row in ("2048", "4096"):
        assert ours["medians"][row]["tier"] < 0.6 * none["medians"][row]["recompute"]
