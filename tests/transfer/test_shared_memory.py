"""Memory of several processes: what one writes the others read; no name, and no trace of it."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest
import torch

from lmcache_xpu.transfer.pool_memory import Place, SharedMemory

SIZE = 3 * 4096
SPAWN = multiprocessing.get_context("spawn")


def other(place: Place, answers) -> None:
    memory = SharedMemory.open(place)
    answers.put(memory.tensor[:3].tolist())
    memory.tensor[5] = 77
    memory.number(4096).value = 2**40 + 1
    answers.put("written")


def make(answers) -> None:
    memory = SharedMemory.make(SIZE)
    memory.tensor[0] = 9
    answers.put(memory.place)
    signal.pause()


def test_two_processes_have_the_same_bytes():
    memory = SharedMemory.make(SIZE)
    assert memory.tensor.nbytes == SIZE
    assert not memory.tensor.any()
    memory.tensor[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    answers = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=other, args=(memory.place, answers))
    process.start()
    assert [answers.get(), answers.get()] == [[1, 2, 3], "written"]
    assert (int(memory.tensor[5]), memory.number(4096).value) == (77, 2**40 + 1)
    process.join()
    place = memory.place
    link = Path(f"/proc/{place.process}/fd/{place.descriptor}").readlink()
    assert str(link).startswith("/memfd:")  # it has no name
    assert SharedMemory.made_at(memory.address) is memory
    assert SharedMemory.made_at(memory.address + 1) is None


def test_what_a_process_made_lasts_for_others_when_it_is_killed_and_goes_with_them():
    answers = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=make, args=(answers,))
    process.start()
    place = answers.get()
    memory = SharedMemory.open(place)
    process.kill()
    process.join()
    assert int(memory.tensor[0]) == 9
    with pytest.raises(OSError, match="No such file"):
        SharedMemory.open(place)


def test_another_file_of_that_number_is_not_taken_for_it(tmp_path):
    memory = SharedMemory.make(SIZE)
    with pytest.raises(OSError, match="another file"):
        SharedMemory.open(memory.place._replace(inode=1))
    with pytest.raises(OSError, match="another file"):
        SharedMemory.open(memory.place._replace(size=4096))


def test_a_view_keeps_the_memory_mapped():
    number = SharedMemory.open(SharedMemory.make(SIZE).place).number(8)
    number.value = 3
    assert number.value == 3
