"""An engine in a process of its own, which is asked for one thing after another."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from lmcache_xpu.bench.jobs import MARK
from lmcache_xpu.bench.shapes import Shape
from lmcache_xpu.bench.variants import Variant

__all__ = ["Child"]

# vLLM keeps one core from its CPU worker, and with a KV connector another one: engines with and
# without would compute on different numbers of cores.
COMMON = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}

END_S = 30.0


class Child:
    """A process with an engine; a context manager.

    It starts at once, and `ask` waits until it has started.

    Args:
        variant: the engine's variant.
        shape: the model's shape.
        model: the model's directory.
        device: `cpu`, `cuda` or `xpu`.
        graphs: whether vLLM compiles graphs.
        timeout_s: seconds that the start, and each answer, may take.
        mask: the variable that chooses among the devices.
    """

    def __init__(
        self,
        variant: Variant,
        shape: Shape,
        model: str,
        device: str,
        *,
        graphs: bool,
        timeout_s: float,
        mask: Mapping[str, str] | None = None,
    ) -> None:
        self.variant = variant
        self.error: str | None = None  # why there are no more answers
        self._timeout_s = timeout_s
        values = json.dumps(variant.values(shape, model, device, graphs=graphs))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_xpu.bench.jobs", values],
            env={**os.environ, **COMMON, **(mask or {}), **variant.variables(shape, device)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._last: deque[str] = deque(maxlen=60)  # lines that are no answers
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._started = False

    def ask(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a job of `jobs.answer`; None if the engine failed, now or before."""
        if not self._started:
            self._started = self._answer() is not None
        if self.error is not None:
            return None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `_answer` says why
            self._process.stdin.write(json.dumps({"do": job, "hits": self.variant.hits}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self.error is not None:
            self._process.kill()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(END_S)

    def _answer(self) -> dict[str, Any] | None:
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            self.error = f"no answer within {self._timeout_s:.0f} s"
            return None
        if answer is None:
            self.error = _cause(list(self._last), self._process.wait())
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(MARK):
                    self._answers.put(json.loads(line.removeprefix(MARK)))
                else:
                    self._last.append(line.rstrip())
        self._answers.put(None)


def _cause(lines: list[str], code: int) -> str:
    errors = [line for line in lines if "Error" in line and "raise " not in line]
    return (errors[-1].strip() if errors else f"exit code {code}")[:300]
