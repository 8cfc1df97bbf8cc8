"""A soak of LMCache's server: hits under load while it is killed, started again and stopped.

Run by `PYTHONPATH=src:tests python -m support.server_soak`. One engine on CPU asks for batches with
an empty cache of its own, so what it does not compute comes from the server. Each answer is
compared with the recomputed one, and of some prompts every block. The exit status is 1 where
anything differs, nothing comes back, or a batch takes more than `soak_report.AT_MOST_S` longer than
one that is computed.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from support.cache_server import CacheServer
from support.real_engine import BLOCK, CHUNK, Engine, prompt
from support.server_asks import asked, make
from support.server_workers import answers, busy, counted, half, on_next, on_next_layer, wait_for
from support.soak_report import Tally, table, verdict

from lmcache_xpu.harness.random_model import EXACT, make_model

BATCH, PROMPTS, TOKENS = 8, 32, 8
LENGTHS = (CHUNK + 20, 4 * CHUNK)
BACK_S = 60.0  # that hits may take to come back after the server listens
BYTES_EACH = 20  # batches


class Soak:
    """Asks, compares, and lets the server fail.

    Args:
        engine: which asks.
        server: which runs.
        seed: of all that is chosen.
        loads: the engine's, `async` or `step`.
    """

    def __init__(self, engine: Engine, server: CacheServer, seed: int, loads: str) -> None:
        self.loads = loads
        self.engine, self.server, self.tally = engine, server, Tally()
        self._random = random.Random(seed)
        lengths = list(range(*LENGTHS))
        self._random.shuffle(lengths)
        self._lengths: Iterator[int] = iter(lengths * 20)
        self._salts = count()
        self._answers: dict[int, list[int]] = {}
        self._trouble: threading.Thread | None = None
        self._waits_for_hits: float | None = None

    def begin(self) -> None:
        """Compute the first prompts, which also tells how long a batch takes without hits."""
        for _ in range(PROMPTS // BATCH):
            fresh = [next(self._lengths) for _ in range(BATCH)]
            begin = time.monotonic()
            for length, (answer, _) in zip(fresh, self._compute(fresh), strict=True):
                self._answers[length] = answer
            self.tally.computed_s.append(time.monotonic() - begin)

    def step(self) -> None:
        """Ask for a batch of what was asked before, beside the computing of one prompt more."""
        tally = self.tally
        if tally.batches % BYTES_EACH == BYTES_EACH - 1:
            self._compare_bytes()
        lengths = self._random.sample(sorted(self._answers), BATCH)
        new = next(self._lengths)
        self.engine.forget()
        begin = time.monotonic()
        *results, (answer, _) = self._ask(
            [*({"prompt_token_ids": prompt(n)} for n in lengths), self._salted(new)]
        )
        tally.seconds.append(time.monotonic() - begin)
        tally.batches += 1
        tally.requests += BATCH + 1
        for length, (tokens, hit) in zip(lengths, results, strict=True):
            tally.hits += hit > 0
            tally.tokens += hit
            if tokens != self._answers[length]:
                self._differs(lengths, length, tokens)
        if self._waits_for_hits is not None and any(hit for _, hit in results):
            tally.back_s.append(time.monotonic() - self._waits_for_hits)
            self._waits_for_hits = None
        self._answers.pop(self._random.choice(sorted(self._answers)))
        self._answers[new] = answer

    @property
    def in_trouble(self) -> bool:
        """Whether the server fails, or has not been hit since."""
        ended = self._trouble is None or not self._trouble.is_alive()
        return not ended or self._waits_for_hits is not None

    def check(self) -> None:
        """Raise where hits don't come back."""
        waits = self._waits_for_hits
        if waits is not None and time.monotonic() - waits > BACK_S:
            raise TimeoutError(f"no hit {BACK_S} s after the server was there again")

    def fail(self, way: str) -> None:
        """Let the server fail; it is there again some seconds later."""
        self.tally.faults[way] += 1
        if way in ("load", "store"):
            if way == "load" and self.loads == "step":
                self.engine.llm.collective_rpc(on_next_layer, args=(self.server.kill,))
            else:
                self.engine.llm.collective_rpc(on_next, args=(way, self.server.kill))
            self._run(self._start_again)
        elif way == "kill":
            self._run(self._kill)
        else:
            self._run(self._hang)

    def _run(self, way: Callable[[], None]) -> None:
        def do() -> None:
            way()
            self._waits_for_hits = time.monotonic()

        self._trouble = threading.Thread(target=do, daemon=True)
        self._trouble.start()

    def _kill(self) -> None:
        time.sleep(self._random.uniform(0, 0.5))
        self.server.kill()
        self._start_again()

    def _start_again(self) -> None:
        while self.server.runs:
            time.sleep(0.02)
        time.sleep(self._random.uniform(0, 2))
        self.server.start()

    def _hang(self) -> None:
        time.sleep(self._random.uniform(0, 0.5))
        self.server.hang()
        time.sleep(self._random.uniform(0.3, 4))
        self.server.go_on()

    def _salted(self, length: int) -> dict[str, Any]:
        """A prompt under a key that nothing has: it is computed."""
        salt = f"computed {next(self._salts)}"
        return {"prompt_token_ids": prompt(length), "cache_salt": salt}

    def _compute(self, lengths: list[int]) -> list[tuple[list[int], int]]:
        self.engine.forget()
        return self._ask([self._salted(length) for length in lengths])

    def _ask(self, prompts: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
        """Return each answer, and the tokens that came from the server."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        outputs = self.engine.llm.generate(prompts, sampling, use_tqdm=False)
        return [(list(out.outputs[0].token_ids), out.num_cached_tokens or 0) for out in outputs]

    def _differs(self, lengths: list[int], length: int, tokens: list[int]) -> None:
        """Tell a tie of two tokens, which goes as the batch does, from a wrong answer."""
        again = dict(zip(lengths, self._compute(lengths), strict=True))[length][0]
        if again == tokens:
            self.tally.ties += 1
        else:
            self.tally.different.append(f"{length}: {tokens}, recomputed {again}")

    def _compare_bytes(self) -> None:
        """Store a prompt that is computed alone, and hit it: other batches have other roundings."""
        length, salt = self._random.choice(sorted(self._answers)), f"alone {next(self._salts)}"
        self.engine.forget()
        answer = self.engine.ask(prompt(length), cache_salt=salt)
        reference = {"answer": answer, "cold": self.engine.blocks()}
        wait_for(self.engine, busy, until=False)
        facts = asked(self.engine, reference, length, cache_salt=salt)
        whole = min(length // CHUNK * CHUNK, length - 1) // BLOCK
        if facts["hit"]:
            self.tally.compared += whole
        if not facts["same"] or facts["restored"] < whole:
            self.tally.different.append(f"bytes of {length}: {facts}")


def load_wrong(worker) -> None:
    """Let every load leave zeros in the blocks that it fills."""
    [copies] = half().transfers.groups

    for name in ("load", "beside_layers"):
        move = getattr(copies, name)
        setattr(copies, name, functools.partial(_of_zeros, move))


def _of_zeros(move: Callable[..., Any], chunks: Any, objects: Any, *rest: Any) -> Any:
    return move(chunks, [torch.zeros_like(each) for each in objects], *rest)


def soak(engine: Engine, server: CacheServer, wanted: argparse.Namespace) -> dict[str, Any]:
    kills = (("kill", "store", "load", "kill")[n % 4] for n in range(wanted.kills))
    ways = [*kills, *["hang"] * wanted.hangs]
    random.Random(wanted.seed).shuffle(ways)
    begin, run = time.monotonic(), Soak(engine, server, wanted.seed, wanted.loads)
    run.begin()
    if wanted.wrong:
        engine.llm.collective_rpc(load_wrong)
    every = wanted.hits // (len(ways) + 1)
    failed = 0
    while run.tally.hits < wanted.hits or run.in_trouble or ways:
        if time.monotonic() - begin > wanted.seconds:
            break
        run.step()
        run.check()
        if ways and not run.in_trouble and run.tally.hits >= every * (failed + 1):
            failed += 1
            run.fail(ways.pop())
    wait_for(engine, busy, until=False)
    return {
        "tally": run.tally,
        "seconds": time.monotonic() - begin,
        "errors": engine.llm.collective_rpc(counted)[0],
        "answers": wait_for(engine, answers, until=True),
        "left": ways,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m support.server_soak")
    parser.add_argument("--hits", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hangs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loads", choices=["async", "step"], default="async")
    parser.add_argument("--wrong", action="store_true", help="load wrong bytes: it has to fail")
    wanted = parser.parse_args()
    with TemporaryDirectory() as directory:
        server = CacheServer(Path(directory) / "server.log")
        server.start()
        try:
            model = str(make_model(EXACT, Path(directory)))
            look = functools.partial(soak, server=server, wanted=wanted)
            report = make(model, server.url, wanted.loads).close_after(look)
        finally:
            server.kill()
    broken = verdict(report)
    print("\n" + table(report, broken), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except BaseException:  # whatever it is: threads of LMCache would keep a failed process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
