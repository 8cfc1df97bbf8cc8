"""Two engines and a shared tier that comes and goes, alone and behind a router."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import redis
from engine import CHUNK, Engine
from hits import CPU_CHUNKS, counted, fill, hit
from leftovers import CLEAN, leaks
from prompts import tokens, whole
from stack import Processes, Stack

from lmcache_xpu.harness.engine_process import free_port

pytestmark = [pytest.mark.promise("3 sharing"), pytest.mark.timeout(600)]

PASSWORD = "only for this test"
AWAY_S = 3.5  # engines leave a server alone after an error; a little less, see hooks/planted.py


class Server:
    """A Redis or Valkey on loopback that can be stopped and started."""

    def __init__(self, directory: Path) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("needs redis-server or valkey-server (apt-get install redis-server)")
        self.port = free_port()
        self._directory = directory
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def values(self) -> dict[bytes, bytes]:
        """All that it holds."""
        with redis.Redis(port=self.port, password=PASSWORD) as client:
            return {name: client.get(name) for name in client.scan_iter()}

    def set(self, name: bytes, value: bytes) -> None:
        with redis.Redis(port=self.port, password=PASSWORD) as client:
            client.set(name, value)

    def start(self, password: str = PASSWORD) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._process = subprocess.Popen(
            [self._program, *options, "--requirepass", password, "--dir", str(self._directory)],
            stdout=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pair(stack: Stack, server: Server) -> Iterator[tuple[Engine, Engine]]:
    if not isinstance(stack, Processes):
        pytest.skip("needs two engines beside a server, as processes here; containers have theirs")
    settings = {"remote_url": server.url, "remote_password": PASSWORD}
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as running:
        # Both at once, by threads that live as long as the engines do (see EngineProcess).
        starts = [stack.start(**settings) for _ in range(2)]
        first, second = threads.map(running.enter_context, starts)
        yield first, second


def shared_hit(pair: tuple[Engine, Engine], seed: str) -> int:
    """Stored by the one, found by the other; checked against recomputing."""
    first, second = pair
    prompt = tokens(seed, 4 * CHUNK + 77)
    expected = first.ask(prompt).token_ids
    time.sleep(1)  # until it is sent
    before = second.counts()
    assert second.ask(prompt).token_ids == expected
    return (second.counts() - before).external_hits


@contextlib.contextmanager
def away(server: Server) -> Iterator[None]:
    """Without the server; afterwards it is there, and no engine leaves it alone any more."""
    server.stop()
    try:
        yield
    finally:
        server.stop()
        server.start()
        time.sleep(AWAY_S)


@pytest.mark.fails_without("shared", "blocks")
def test_what_one_engine_stored_the_other_finds(pair: tuple[Engine, Engine]):
    """Seen to fail with look-ups that ask no server, and with loads that leave out a block."""
    assert shared_hit(pair, "shared") == 4 * CHUNK


@pytest.mark.promise("2 tiers")
@pytest.mark.fails_without("roomy")
def test_without_another_tier_what_was_evicted_is_computed_again(
    pair: tuple[Engine, Engine], server: Server
):
    """No disk tier, and no server. Seen to fail with a CPU tier that does not evict."""
    engine, prompt = pair[0], tokens("no other tier", 4 * CHUNK + 77)
    with away(server):
        engine.ask(prompt)
        assert hit(engine, prompt) == (4 * CHUNK, 0)
        fill(engine, "no other tier", CPU_CHUNKS)
        assert hit(engine, prompt) == (0, 0)


@pytest.mark.fails_without("shared")
def test_a_server_that_dies_and_comes_back(pair: tuple[Engine, Engine], server: Server):
    """Answers stay right and come without waiting; afterwards it is used again.

    Seen to fail with look-ups that ask no server.
    """
    with away(server):
        begin = time.monotonic()
        assert shared_hit(pair, "without a server") == 0
        assert time.monotonic() - begin < 10
        own = tokens("without a server", 4 * CHUNK + 77)
        assert hit(pair[0], own)[0] == whole(len(own))  # its own CPU tier
    assert shared_hit(pair, "with a server again") == 4 * CHUNK


@pytest.mark.fails_without("away")
def test_a_wrong_password_is_a_server_that_is_away(pair: tuple[Engine, Engine], server: Server):
    """Said once, not with every request; and nobody reads the password in a log.

    Seen to fail with a server that is asked again and again.
    """
    with away(server):
        server.start("another")
        assert shared_hit(pair, "wrong password") == 0
        assert all(engine.alive() for engine in pair)
        assert any("left alone" in engine.runner.log() for engine in pair)
        assert all(PASSWORD not in engine.runner.log() for engine in pair)
    assert shared_hit(pair, "right password") == 4 * CHUNK


def corrupt(engine: Engine) -> float:
    return engine.metrics().sum("lmcache_xpu_errors_total", tier="shared", reason="corrupt")


@pytest.mark.fails_without("counters")
@pytest.mark.parametrize(
    "damage", [pytest.param("flipped", marks=pytest.mark.fails_without("checksum")), "cut"]
)
def test_a_damaged_value_is_computed_again_and_heals(
    pair: tuple[Engine, Engine], server: Server, damage: str
):
    """`flipped`: one bit, of an exponent.

    Seen to fail with errors that are not counted; `flipped` also without the checksum.
    """
    first, second = pair
    prompt = tokens(("damage", damage), 4 * CHUNK + 77)
    expected = first.recompute(prompt).token_ids
    time.sleep(1)  # until it is sent
    others = server.values()
    assert first.ask(prompt).token_ids == expected
    time.sleep(1)
    own = {name: value for name, value in server.values().items() if name not in others}
    assert len(own) == 4
    name, value = next(iter(own.items()))
    damaged = value[:-1] + (bytes([value[-1] ^ 0x40]) if damage == "flipped" else b"")
    server.set(name, damaged)
    before = corrupt(second)
    assert second.ask(prompt).token_ids == expected
    assert corrupt(second) == before + 1
    time.sleep(1)  # until what it computed is sent
    assert server.values()[name] != damaged
    fill(first, ("damage", damage), CPU_CHUNKS)
    first.forget()
    before_hit = first.counts()
    assert first.ask(prompt).token_ids == expected
    assert (first.counts() - before_hit).external_hits == 4 * CHUNK
    assert corrupt(first) == 0
    assert leaks(first) == leaks(second) == CLEAN


@contextlib.contextmanager
def router(pair: tuple[Engine, Engine], log: Path) -> Iterator[Engine]:
    port, prometheus = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("vllm-router")), "--port", str(port)]
    command += ["--policy", "round_robin", "--prometheus-port", str(prometheus)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--worker-urls", *(engine.url for engine in pair)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                if answer.is_success:
                    break
            time.sleep(0.2)
        with contextlib.closing(Engine(f"http://127.0.0.1:{port}")) as engine:
            yield engine
    finally:
        process.terminate()
        process.wait()


@pytest.mark.fails_without("shared")
def test_behind_a_router_it_does_not_matter_who_answers(
    pair: tuple[Engine, Engine], tmp_path: Path, figure: Callable[[str, object], None]
):
    """Round robin, the worst of its policies for a cache: both engines see each prompt.

    Seen to fail with look-ups that ask no server.
    """
    prompts = [tokens(("router", number), 4 * CHUNK + 77) for number in range(5)]
    before = [engine.counts() for engine in pair]
    with router(pair, tmp_path / "router.log") as behind:
        first = []
        for prompt in prompts:
            first.append(behind.ask(prompt).token_ids)
        time.sleep(1)
        for _ in range(2):
            assert [behind.ask(prompt).token_ids for prompt in prompts] == first
    spent = [engine.counts() - past for engine, past in zip(pair, before, strict=True)]
    assert all(counts.prompt > 0 for counts in spent)
    hits = sum(counts.external_hits for counts in spent)
    figure("found in the shared tier", f"{hits} tokens")
    assert hits >= 4 * CHUNK


@pytest.mark.fails_without("reset")
def test_a_reset_engine_finds_nothing_of_before_and_the_other_one_all(pair: tuple[Engine, Engine]):
    """The last one here: engines that were reset share with nobody any more.

    Seen to fail with a reset that vLLM's connectors may leave out.
    """
    first, second = pair
    assert shared_hit(pair, "reset") == 4 * CHUNK
    prompt = tokens("reset", 4 * CHUNK + 77)
    expected = first.recompute(prompt).token_ids

    def hit_tokens(engine: Engine) -> int:
        answer, hits, _ = counted(engine, prompt)
        assert answer.token_ids == expected
        return hits

    first.reset()
    assert hit_tokens(first) == 0
    assert hit_tokens(second) == 4 * CHUNK
    second.reset()
    assert hit_tokens(second) == 0
    assert [hit_tokens(engine) for engine in pair] == [4 * CHUNK] * 2  # of their own
