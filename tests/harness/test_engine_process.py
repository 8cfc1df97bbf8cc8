"""Starting and stopping an engine, with small programs in the engine's place."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.harness import engine_process
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.launch.settings import Settings

HEALTHY = """
    import http.server, sys, os

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    def serve():
        http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""
CHILD = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", CHILD_PROGRAM])
    print("child", child.pid, flush=True)
"""
SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.fixture
def settings():
    return Settings.load({"model": "no/model", "port": free_port(), "offload": False})


@pytest.fixture
def start(settings, tmp_path):
    """An EngineProcess that runs the given Python program; short times."""

    def make(*parts, start_s=10.0, stop_s=5.0, child="", **options):
        names = f"PORT = {settings.port}\nCHILD_PROGRAM = {child!r}\n"
        program = names + "\n".join(textwrap.dedent(part) for part in parts)
        return EngineProcess(
            settings,
            tmp_path / "logs" / "engine.log",
            start_s=start_s,
            stop_s=stop_s,
            argv=[sys.executable, "-c", program],
            **options,
        )

    return make


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def child_of(process):
    line = next(line for line in process.log.read_text().splitlines() if line.startswith("child"))
    return int(line.split()[1])


def test_it_waits_until_the_engine_answers_and_stops_it(start):
    begin = time.monotonic()
    process = start(HEALTHY, "import time; time.sleep(1); serve()")
    with process:
        pid = process.pid
        assert time.monotonic() - begin > 1
        assert running(pid)
        assert os.getpgid(pid) == pid != os.getpgid(0)  # Ctrl-C here is not Ctrl-C there
    assert not running(pid)
    assert process.pid is None


def test_stopping_again_does_nothing(start):
    process = start(HEALTHY, "serve()")
    with process:
        process.stop()
    process.stop()


def test_an_engine_that_dies_is_reported_with_its_cause_and_last_words(start):
    process = start(
        """
        print("(EngineCore pid=3) ERROR 01-01 00:00:00 [core.py:1] ValueError: no memory")
        for number in range(50):
            print("line", number)
        raise SystemExit(3)
        """
    )
    with pytest.raises(EngineError) as caught, process:
        pass
    message = str(caught.value)
    assert "with code 3" in message
    assert "ValueError: no memory" in message
    assert "line 49" in message
    assert "line 10\n" not in message  # the last ones only
    assert str(process.log) in message


def test_an_engine_that_never_answers_is_stopped(start):
    process = start("print('child', __import__('os').getpid(), flush=True)", SLEEP, start_s=1.0)
    with pytest.raises(EngineError, match=r"no answer from http://127\.0\.0\.1:\d+/health for 1 s"):
        process.__enter__()
    assert not running(child_of(process))


def test_an_engine_that_answers_with_an_error_is_not_up(start):
    with (
        pytest.raises(EngineError, match="no answer"),
        start(HEALTHY.replace("200 if", "503 if"), "serve()", start_s=1.0),
    ):
        pass


def test_one_that_ignores_sigterm_is_killed(start, monkeypatch):
    monkeypatch.setattr(engine_process, "KILL_S", 2.0)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with start(HEALTHY, deaf, "serve()", stop_s=0.5) as process:
        pid = process.pid
    assert not running(pid)


def test_ctrl_c_waits_for_no_engine_that_is_slow_to_stop(start):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process = start(HEALTHY, deaf, "serve()", stop_s=60)
    process.__enter__()
    pid, begin = process.pid, time.monotonic()
    process.__exit__(KeyboardInterrupt)
    assert time.monotonic() - begin < 5
    assert not running(pid)


@pytest.mark.parametrize("child", [SLEEP, DEAF], ids=["sleeping", "deaf"])
def test_children_do_not_survive(start, child, monkeypatch):
    """vLLM's EngineCore is such a child."""
    monkeypatch.setattr(engine_process, "KILL_S", 2.0)
    with start(HEALTHY, CHILD, "serve()", child=child, stop_s=0.5) as process:
        pid = child_of(process)
        assert running(pid)
    assert not running(pid)


def test_children_of_one_that_died_do_not_survive(start):
    process = start("import sys", CHILD, "raise SystemExit(1)", child=SLEEP, stop_s=0.5)
    with pytest.raises(EngineError, match="with code 1"), process:
        pass
    assert not running(child_of(process))


def test_the_server_is_asked_first_and_alone(start):
    """A group-wide SIGTERM would end the EngineCore under a server that still drains."""
    child = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit()))\n"
        "time.sleep(600)"
    )
    polite = """
        import signal
        def end(*_):
            child.kill()
            child.wait()
            print("ended", flush=True)
            os._exit(0)
        signal.signal(signal.SIGTERM, end)
        serve()
    """
    with start(HEALTHY, CHILD, polite, child=child) as process:
        time.sleep(0.3)
    assert "ended" in process.log.read_text()
    assert "told" not in process.log.read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_while_waiting_stops_it(start, error, monkeypatch):
    process = start("print('child', __import__('os').getpid(), flush=True)", SLEEP)
    sleep, waits = time.sleep, iter([None] * 3)

    def interrupted(seconds):
        sleep(seconds)
        if next(waits, error) is error:
            monkeypatch.undo()
            raise error

    monkeypatch.setattr(engine_process.time, "sleep", interrupted)
    with pytest.raises(error):
        process.__enter__()
    assert not running(child_of(process))


def test_a_second_ctrl_c_while_stopping_still_leaves_nothing(start, monkeypatch):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process = start(HEALTHY, deaf, "serve()", stop_s=60)
    process.__enter__()
    pid = process.pid
    real, calls = engine_process._ended, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(engine_process, "_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.stop()
    assert not running(pid)


def test_it_does_not_outlive_a_parent_that_is_killed(settings, tmp_path):
    """Nothing of ours runs after SIGKILL; the kernel tells the engine."""
    program = f"""
        import sys, time
        from pathlib import Path
        from lmcache_xpu.harness.engine_process import EngineProcess
        from lmcache_xpu.launch.settings import Settings
        settings = Settings.load({{"model": "no/model", "port": {settings.port}, "offload": False}})
        program = {f"PORT = {settings.port}" + textwrap.dedent(HEALTHY) + "serve()"!r}
        with EngineProcess(
            settings, Path({str(tmp_path)!r}) / "log", argv=[sys.executable, "-c", program]
        ) as process:
            print(process.pid, flush=True)
            time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    assert running(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 5
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)


def test_a_taken_port_is_told_before_anything_starts(start, settings, tmp_path):
    with start(HEALTHY, "serve()"):
        second = EngineProcess(settings, tmp_path / "second.log", argv=["/bin/true"])
        with pytest.raises(SettingsError, match=f"127.0.0.1:{settings.port} not available"):
            second.__enter__()
    assert not (tmp_path / "second.log").exists()


def test_the_engine_gets_the_settings_environment(start, monkeypatch):
    with start(HEALTHY, "print(os.environ['PYTHONHASHSEED'], flush=True)\nserve()") as process:
        pass
    assert process.log.read_text().startswith("0\n")


def test_without_a_program_it_runs_what_serve_runs(settings, tmp_path):
    from lmcache_xpu.launch.serve import command, resolve_device

    process = EngineProcess(settings, tmp_path / "log")
    assert process._argv == command(resolve_device(settings))


def test_an_address_of_version_6_is_written_as_one():
    settings = Settings.load({"model": "m", "host": "::1", "port": 8000, "offload": False})
    assert EngineProcess(settings, Path("log")).url == "http://[::1]:8000"
