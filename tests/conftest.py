"""With pytest-xdist: a core for each worker and for what its tests start.

Threads of two engines on one core wait for each other's time slices at every barrier.
"""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("support")

if worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})
