from __future__ import annotations

import pytest

from lmcache_xpu.cache.object_slots import ObjectSlots
from lmcache_xpu.errors import TransferError

A, B = ({"offset": 64 * n, "length": 32, "shape": [1, 1, 32]} for n in range(2))


def test_objects_are_sorted_by_group():
    slots = ObjectSlots.of_rows([(1, 2, 0, 32), (0, 0, 64, 32), (1, 3, 128, 32)], 2)
    assert slots
    assert (slots.of_group(0), slots.chunks(0)) == ([(64, 32)], [0])
    assert (slots.of_group(1), slots.chunks(1)) == ([(0, 32), (128, 32)], [2, 3])
    assert slots.nbytes == 96


def test_one_group_is_not_named_and_all_chunks_need_no_numbers():
    slots = ObjectSlots.read({"slots": [A, B]})
    assert (slots.of_group(0), slots.chunks(0)) == ([(0, 32), (64, 32)], [0, 1])


def test_no_objects_are_nothing_to_move():
    assert not ObjectSlots.read({"slots": [], "chunk_indices": []})


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"slots": None},
        {"slots": [A], "chunk_indices": []},
        {"slots": [{"offset": 0}]},
    ],
    ids=["nothing", "no list", "too few numbers", "no length"],
)
def test_an_answer_of_another_form_is_refused(context):
    with pytest.raises(TransferError):
        ObjectSlots.read(context)


def test_objects_of_groups_that_the_engine_lacks_are_refused():
    with pytest.raises(TransferError, match="groups"):
        ObjectSlots.of_rows([(2, 0, 0, 32)], 2)
