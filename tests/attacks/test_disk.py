"""The disk tier against another user of the host, who may write where its directory is made.

They need two users, so they need root: `.ci/run` has it, and so has a container.
"""

from __future__ import annotations

import os
import shutil

import pytest
from support.chunk_files import NO_LIMIT, file_of, files, load, payload

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.chunk_layout import ChunkLayout, object_key
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
from lmcache_xpu.tiers.disk.parameters import DiskSettings

NOBODY = 65534
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: needs root")


@pytest.fixture
def place(tmp_path):
    """A directory that all may write, as /tmp is."""
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "precious"
    path.write_text("root's settings")
    path.chmod(0o600)
    return path


def settings(place):
    return DiskSettings.parse({"disk.path": str(place), "disk.gib": 0.1})


def opened(place):
    return settings(place).open_store("kv-worker-0")


def give(path, user=NOBODY):
    os.chown(path, user, user, follow_symlinks=False)


@pytest.fixture(params=["worker", "server"])
def start(request, place):
    """Open the store of a worker, or LMCache's server; and the name of its directory."""
    if request.param == "worker":
        return lambda: opened(place), place / "kv-worker-0"
    return lambda: settings(place).open_store("kv-server"), place / "kv-server"


@two_users
def test_a_directory_of_another_user_is_refused(start, victim):
    start, directory = start
    directory.mkdir(mode=0o777)
    (directory / "lock").symlink_to(victim)
    give(directory)
    with pytest.raises(SettingsError, match=f"{directory.name} of user {NOBODY}"):
        start()
    assert victim.read_text() == "root's settings"
    assert directory.stat().st_uid == NOBODY


@two_users
@pytest.mark.parametrize("owner", [0, NOBODY])
def test_a_link_in_place_of_the_directory_is_refused(start, tmp_path, owner):
    start, directory = start
    (tmp_path / "etc").mkdir(mode=0o755)
    directory.symlink_to(tmp_path / "etc")
    give(directory, owner)
    with pytest.raises(SettingsError, match="is a link" if owner == 0 else "of user"):
        start()
    assert (list((tmp_path / "etc").iterdir()), (tmp_path / "etc").stat().st_mode & 0o777) == (
        [],
        0o755,
    )


@two_users
@pytest.mark.parametrize("link", [False, True])
def test_a_parent_of_another_user_is_refused(place, tmp_path, link):
    if link:
        place.rename(tmp_path / "other")
        place.symlink_to(tmp_path / "other")
    give(place)
    with pytest.raises(SettingsError, match=f"kv of user {NOBODY}"):
        opened(place)


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "directory"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(place, victim, kind):
    directory = place / "kv-worker-0"
    directory.mkdir()
    match kind:
        case "symlink":
            (directory / "lock").symlink_to(victim)
        case "hard link":
            os.link(victim, directory / "lock")
        case "pipe":
            os.mkfifo(directory / "lock")
        case "directory":
            (directory / "lock").mkdir()
    with pytest.raises(SettingsError):
        opened(place)
    assert victim.read_text() == "root's settings"


@two_users
def test_a_lock_of_another_user_is_refused(place):
    (place / "kv-worker-0").mkdir()
    (place / "kv-worker-0/lock").touch()
    give(place / "kv-worker-0/lock")
    with pytest.raises(SettingsError, match="lock"):
        opened(place)


@two_users
def test_a_chunk_that_another_user_wrote_is_not_read(place):
    store = opened(place)
    store.put("a", "", payload("a"))
    give(file_of(store, "a"))
    assert load(store, "a") is None
    store.close()
    again = opened(place)
    assert "a" not in again
    again.close()


def test_a_directory_that_is_replaced_while_in_use_is_not_written(place, tmp_path):
    (tmp_path / "etc").mkdir()
    store = opened(place)
    store.put("a", "", payload("a"))
    store.directory.rename(place / "moved")
    store.directory.symlink_to(tmp_path / "etc")
    assert store.put("b", "", payload("b"))
    assert load(store, "a") == payload("a")
    assert list((tmp_path / "etc").iterdir()) == []
    assert len(files(place / "moved")) == 2
    store.close()


# Two stores in one directory


def test_a_lock_that_was_removed_lets_no_second_store_in(place):
    store = opened(place)
    (store.directory / "lock").unlink()
    with pytest.raises(SettingsError, match="in use"):
        ChunkStore(store.directory, NO_LIMIT, lock_seconds=0)
    store.close()


def test_a_store_whose_directory_was_removed_does_not_write_in_a_second_ones(place):
    store = opened(place)
    store.put("a", "", payload("a"))
    shutil.rmtree(store.directory)
    second = ChunkStore(store.directory, NO_LIMIT, lock_seconds=0)
    second.put("b", "", payload("b"))
    for _ in range(2):
        with pytest.raises(OSError, match="in use"):
            store.put("c", "", payload("c"))
    assert files(second.directory) == [file_of(second, "b")]
    second.close()
    assert store.put("c", "", payload("c"))  # it is free again
    store.close()


def test_a_directory_that_became_a_file_is_not_taken_for_one(place):
    store = opened(place)
    store.put("a", "", payload("a"))
    shutil.rmtree(store.directory)
    store.directory.write_text("not a directory")
    for _ in range(2):
        with pytest.raises(OSError, match="File exists"):
            store.put("b", "", payload("b"))
    assert store.counters["errors"] == 2
    assert store._index.reserved_bytes == 0
    store.directory.unlink()
    assert store.put("b", "", payload("b"))
    store.close()


def test_the_holder_of_a_lock_may_have_any_name(place):
    store = opened(place)
    (store.directory / "lock").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="in use"):
        ChunkStore(store.directory, NO_LIMIT, lock_seconds=0)
    store.close()


# Texts that another version, or anyone, wrote


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "[]",
        '["KV_2LTD", [[2, 2, 4, 8]], ["Tensor"]]',
        '["KV_2LTD", [[2, 2, 4, 8]], ["no_such_dtype"]]',
        '["NO_FORMAT", [[2, 2, 4, 8]], ["float16"]]',
        '["KV_2LTD", [[-2, -2, 4, 8]], ["float16"]]',
        '["KV_2LTD", [[1e400]], ["float16"]]',
        '["KV_2LTD", [[99999999999999999999]], ["float16"]]',
        '["KV_2LTD", [["a"]], ["float16"]]',
        '["KV_2LTD", [[2, 2]], []]',
        '{"a": 1}',
    ],
)
def test_a_layout_that_is_none_is_a_miss(text):
    assert ChunkLayout.parse(text) is None
    assert object_key(text) is None
