"""Processes that begin with vLLM imported, which is most of the CPU time of an engine's start.

    python -m support.forks

A process that has imported vLLM, and done nothing else, forks one for each program it is asked for.
All of them have its hash seed: what other seeds could change needs an interpreter of its own, and
so does what happens while vLLM is imported.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class Forks:
    """The process that forks, which ends with this one; it is asked for one program at a time.

    Args:
        env: variables of the process and of its forks.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._asked = threading.Lock()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], env=env, stdin=pipe, stdout=pipe, text=True
        )

    def run(
        self, program: Sequence[str], timeout: float, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program and return how its process ended.

        Args:
            program: what follows `python` on its command line, which is `-m MODULE` or `-c CODE`,
                and its arguments.
            timeout: seconds after which the process is killed.
            variables: more of them, and others than all forks have.

        Raises:
            subprocess.TimeoutExpired: the process was killed.
        """
        with tempfile.TemporaryDirectory() as name, self._asked:
            files = [Path(name, "out"), Path(name, "err")]
            asked = {"program": program, "files": list(map(str, files)), "variables": variables}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(asked | {"timeout": timeout}) + "\n")
            self._process.stdin.flush()
            status = json.loads(self._process.stdout.readline())
            out, err = (file.read_text(errors="replace") for file in files)
        if status is None:
            raise subprocess.TimeoutExpired(list(program), timeout, out, err)
        return subprocess.CompletedProcess(list(program), status, out, err)


def _run(program: list[str], files: list[str], variables: dict[str, str]) -> NoReturn:
    """Become the process of a program."""
    status = 1
    try:
        for number, name in enumerate((os.devnull, *files)):
            new = os.open(name, os.O_RDWR | os.O_CREAT)
            os.dup2(new, number)
            os.close(new)
        os.environ.update(variables)
        kind, what, *rest = program
        sys.argv = [what if kind == "-m" else kind, *rest]
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(process: int, timeout: float) -> int | None:
    """Return a process's exit status; None for one that was killed after so many seconds."""
    descriptor = os.pidfd_open(process)
    try:
        in_time, _, _ = select.select([descriptor], [], [], timeout)
    finally:
        os.close(descriptor)
    if not in_time:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def main() -> None:
    """Fork for each line on standard input, and answer with the exit status of the fork."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    from vllm import LLM  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        if not (process := os.fork()):
            os.close(answers)
            _run(asked["program"], asked["files"], asked["variables"])
        os.write(answers, f"{json.dumps(_ended(process, asked['timeout']))}\n".encode())


if __name__ == "__main__":
    main()
