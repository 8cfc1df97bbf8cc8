from __future__ import annotations

import pytest
from support.lending import Key

from lmcache_xpu.cache.hit_places import Hit, ObjectSlots, Rows, received, sent
from lmcache_xpu.errors import TransferError


def test_objects_are_sorted_by_group_and_chunk():
    slots = ObjectSlots.of([(1, 3, 128, 32), (0, 0, 64, 32), (1, 2, 0, 32)], 2)
    assert (slots.of_group(0), slots.chunks(0)) == ([(64, 32)], [0])
    assert (slots.of_group(1), slots.chunks(1)) == ([(0, 32), (128, 32)], [2, 3])


def test_objects_of_groups_that_the_engine_lacks_are_refused():
    with pytest.raises(TransferError, match="groups"):
        ObjectSlots.of([(2, 0, 0, 32)], 2)


def test_questions_and_answers_arrive_as_they_were_sent():
    hit = Hit.of_key(7, 3, Key(tuple(range(24)), 8, 24, cache_salt="a salt"))
    assert received(sent(hit), Hit) == hit
    assert (hit.instance_id, hit.number) == (7, 3)
    assert (hit.request_id, hit.cache_salt) == ("request", "a salt")
    assert (hit.start, hit.end, hit.worker_id) == (8, 24, 0)
    rows: Rows = [(0, 1, 0, 4096), (1, 0, 2**40, 1)]
    assert received(sent(rows), Rows) == rows
