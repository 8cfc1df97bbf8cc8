"""A program in which a process takes a descriptor of its sibling, as oneCCL's processes do."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

GETFD = 438  # pidfd_getfd, on every architecture
PR_SET_PTRACER, ANYONE = 0x59616D61, ctypes.c_ulong(-1)


def refusal() -> str:
    """Return the error with which the system refuses it; empty: it does not."""
    program = [sys.executable, "-I", __file__]  # as a process with threads should not fork
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip().rpartition("\n")[2]


if __name__ == "__main__":
    libc = ctypes.CDLL(None, use_errno=True)
    ready, begin = os.pipe()
    if not (holder := os.fork()):
        # As Intel's driver does: without it Yama (kernel.yama.ptrace_scope=1) keeps siblings apart.
        libc.prctl(PR_SET_PTRACER, ANYONE, 0, 0, 0)
        os.write(begin, b".")
        time.sleep(60)
    os.read(ready, 1)
    if os.fork():
        os.wait()
        os.kill(holder, signal.SIGKILL)
    elif libc.syscall(GETFD, os.pidfd_open(holder), 0, 0) < 0:
        print(os.strerror(ctypes.get_errno()))
