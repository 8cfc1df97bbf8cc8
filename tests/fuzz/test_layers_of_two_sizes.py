"""A load of layers of two sizes, whose kernels run in two streams, while a store fails."""

from __future__ import annotations

from functools import partial

import ways
from paged_layers import Layers
from running import Prompt
from steps import Steps


def test_each_stream_has_the_rows_that_its_kernels_read():
    """The kernel of the larger layers runs here before what the smaller layers' stream uploads."""
    layout = Layers(
        widths=(4, 4, 8), planes=1, blocks=24, block_tokens=1, across=False, padding=0, lead=0
    )
    way = ways.Way(order="planes", triton=False, buffer=0, buffers=2, pinned=False)
    prompt = partial(Prompt, content=0, kept=0, waits=False)
    steps = Steps()
    steps.start(layout=layout, way=way, order=(), blocks=1, ahead=1, stored=(1, 1), seed=0)
    go_on = partial(steps.go_on, crowd=0, early=False, graph=0)
    go_on(admitted=[prompt(tokens=1, stays=True)], fail=0, then=[], turns=0)
    go_on(admitted=[prompt(tokens=2, stays=False)], fail=0, then=[(0, 0)], turns=0)
    go_on(admitted=[prompt(tokens=1, stays=False)], fail=4, then=[], turns=3)
    steps.teardown()
