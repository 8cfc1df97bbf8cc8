"""Random cases against an oracle; short and always the same ones here, longer with `make fuzz`."""

from __future__ import annotations

import os
import time

import campaign
import copy_faults
import disk_faults
import pytest
import step_faults
from fault import Fault
from hypothesis.errors import Flaky
from oracle import MismatchError

EXAMPLES, SECONDS = (int(os.environ.get(f"FUZZ_{name}") or 0) for name in ("EXAMPLES", "SECONDS"))
FAULTS = [*copy_faults.FAULTS, *step_faults.FAULTS, *disk_faults.FAULTS]
LONG = bool(EXAMPLES or SECONDS)


@pytest.mark.parametrize("target", campaign.SHORT)
def test_every_byte_is_what_the_oracle_says(target: str):
    begin = time.monotonic()
    if LONG:
        cases = campaign.long(target, EXAMPLES, SECONDS / len(campaign.SHORT))
    else:
        cases = campaign.short(target)
    print(f"\n{target}: {cases} cases in {time.monotonic() - begin:.0f} s")
    assert cases >= campaign.SHORT[target][0]


@pytest.mark.tools
@pytest.mark.skipif(LONG, reason="faults are planted in the short form")
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_planted_fault_is_seen(fault: Fault):
    with fault.planted(), pytest.raises((MismatchError, Flaky)):
        campaign.seen(fault.target)
