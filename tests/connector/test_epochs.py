"""After a reset nothing is found that was stored before."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
from lmcache_xpu.connector.epochs import Epochs


class Pool:
    """vLLM's blocks; one of them is never used."""

    def __init__(self, *, cached: int = 0, used: int = 0) -> None:
        self.num_gpu_blocks = 10
        self.cached_block_hash_to_block = dict.fromkeys(range(cached))
        self.used = used

    def get_num_free_blocks(self) -> int:
        return 9 - self.used


def test_the_first_epoch_has_no_name_and_each_later_one_another():
    epochs = Epochs()
    epochs.admit("first", 0)
    names = [epochs.of("first")]
    for number in range(3):
        epochs.begin()
        epochs.admit(f"later {number}", 0)
        names.append(epochs.of(f"later {number}"))
    assert names[0] == ""
    assert len(set(names)) == 4


def test_a_request_that_runs_through_a_reset_is_not_stored_until_it_begins_anew():
    epochs = Epochs()
    epochs.admit("r", 0)
    assert epochs.is_only("r")
    epochs.begin()
    assert not epochs.is_only("r")
    epochs.admit("r", 0)
    assert epochs.is_only("r")


@pytest.mark.parametrize("pool", [None, Pool(cached=1), Pool(used=1)])
def test_what_vllm_kept_of_an_earlier_epoch_is_not_stored(pool):
    epochs = Epochs()
    epochs.pool = pool
    epochs.begin()
    epochs.admit("new", 0)
    epochs.admit("kept", 16)
    assert [epochs.is_only(name) for name in ("new", "kept")] == [True, False]
    epochs.pool = Pool()  # all is given back
    epochs.admit("later", 16)
    epochs.pool = Pool(cached=3, used=2)  # of this epoch
    epochs.admit("at last", 16)
    assert epochs.is_only("later")
    assert epochs.is_only("at last")


def test_names_of_an_epoch_go_with_their_requests():
    epochs = Epochs()
    epochs.admit("r", 0)
    epochs.begin()
    assert epochs.of("r") != epochs.current.name
    assert not epochs.is_only("r")
    assert not epochs.is_only("never heard of")
    epochs.finished("r")
    assert epochs.of("r") == epochs.current.name
