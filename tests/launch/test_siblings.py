"""Descriptors of a sibling: taken where the kernel allows it, refused under a seccomp filter."""

from __future__ import annotations

import subprocess
import sys

import pytest

FILTERED = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of BPF; the first word of what is filtered is the call
ERRNO, ALLOW, EPERM = 0x50000, 0x7FFF0000, 1
rules = [(LOAD, 0, 0, 0)]
for number in map(int, sys.argv[1:]):
    rules += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | EPERM)]
rules.append((RETURN, 0, 0, ALLOW))
code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
held = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(held))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges: then a filter needs no rights
assert libc.prctl(22, 2, program) == 0
from lmcache_xpu.launch.siblings import refusal
print(refusal())
"""
PIDFD_OPEN, PIDFD_GETFD, KCMP = "434", "438", "312"


def refusal(*calls: str) -> str:
    """Where these system calls are refused, as Docker's seccomp profile refuses them."""
    program = [sys.executable, "-c", FILTERED, *calls]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("others", [(), (KCMP,)])
def test_a_sibling_gives_its_descriptor(others):
    assert refusal(*others) == ""


@pytest.mark.parametrize("call", [PIDFD_GETFD, PIDFD_OPEN])
def test_what_a_filter_refuses_is_told_in_the_systems_words(call):
    assert refusal(call).endswith("Operation not permitted")
