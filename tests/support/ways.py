"""Ways to run an engine, as parameters of tests: few of them each time, all in the matrix."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

Way = tuple[str, ...]


def each_way(*choices: Sequence[str], often: Collection[Way]) -> Iterator[Any]:
    """Yield each combination of choices; those that are not in `often` are for the matrix."""
    for way in itertools.product(*choices):
        marks = () if way in often else pytest.mark.matrix
        yield pytest.param(way, id="-".join(way), marks=marks)
