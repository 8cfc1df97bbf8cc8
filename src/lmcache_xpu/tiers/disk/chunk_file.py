"""One chunk in one file, with checksums. The shared tier keeps the same bytes as a value.

    0       magic, version, header CRC, payload CRC, lengths, key, meta, zeros
    4096    payload

The header comes first, so one page tells whose a file is. It is written last, so a file without its
payload has no header either.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

HEADER_BYTES = 4096
SUFFIX = ".lmxkv"
TEMPORARY = ".lmxkv.tmp"  # of a file that is written, and is not complete
_MAGIC = b"LMXCHUNK"
_VERSION = 1
_FIXED = struct.Struct("<8sIIIQHH")  # magic, version, header CRC, payload CRC, payload, key, meta
_CRC_AT = 12
_SLICE = 1024 * 1024
_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: write pages out, wait for none


class ChunkInfo(NamedTuple):
    """What a chunk's header says of its payload."""

    meta: str
    payload_bytes: int


class _Header(NamedTuple):
    key: str
    info: ChunkInfo
    crc: int  # of the payload


def disk_bytes(payload_bytes: int) -> int:
    """Size of a chunk's file in whole 4 KiB blocks, header included."""
    return HEADER_BYTES + (payload_bytes + 4095) // 4096 * 4096


def file_name(key: str) -> str:
    """Return the name of a chunk's file: the hash of its key."""
    return f"{hashlib.sha256(key.encode()).hexdigest()}{SUFFIX}"


def list_chunks(directory: int) -> tuple[list[tuple[int, str, int]], int]:
    """List the files of a directory that may be chunks; remove what can't be, or is incomplete.

    Opens none, and leaves files of other names alone. Returns of each file its time of last use,
    its name and the bytes of its payload; and the number of those that were too short.
    """
    files, damaged, user = [], 0, os.geteuid()
    for entry in os.scandir(directory):  # by its descriptor, twice as fast as by its path
        is_complete = entry.name.endswith(SUFFIX)
        if not (is_complete or entry.name.endswith(TEMPORARY)):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            payload_bytes = status.st_size - HEADER_BYTES
            is_file = is_complete and _is_plain(status, user)
            if is_file and payload_bytes >= 0:
                files.append((status.st_mtime_ns, entry.name, payload_bytes))
            else:
                damaged += is_file
                os.unlink(entry.name, dir_fd=directory)
        except OSError:  # e.g. a directory of that name
            continue
    return files, damaged


def write_chunk(path: Path, key: str, meta: str, payload: memoryview, used_ns: int) -> None:
    """Write a new file, mode 0600, with `used_ns` as its modification time.

    Raises ValueError if key and meta don't fit the header, and OSError; then the file may be there,
    without a header.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        fd = file.fileno()
        os.lseek(fd, HEADER_BYTES, os.SEEK_SET)
        crc, done = 0, 0
        while done < len(payload):
            piece = payload[done : done + _SLICE]
            piece = piece[: os.write(fd, piece)]
            crc = zlib.crc32(piece, crc)
            done += len(piece)
        os.pwrite(fd, _pack(_Header(key, ChunkInfo(meta, len(payload)), crc)), 0)
        os.utime(fd, ns=(used_ns, used_ns))
        # The disk begins now: Linux itself begins seconds later, and a burst takes twice as long.
        _LIBC.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def read_chunk(
    path: Path,
    key: str,
    info: ChunkInfo,
    buffer: memoryview,
    is_lent: Callable[[], bool] | None = None,
) -> str | None:
    """Read a payload into `buffer`, of its length; return None, or what is wrong with the file.

    With `is_lent`, which says whether `buffer` may still be written, each slice goes to memory of
    this call first: a slow disk may deliver when the buffer is another's already. Then nothing is
    wrong with the file, and "" is returned. After an error `buffer` may hold anything.
    Raises OSError if the file can't be opened or read.
    """
    with _open(path) as file:
        raw, buffer = bytearray(HEADER_BYTES), buffer.cast("B")
        own = memoryview(bytearray(min(_SLICE, len(buffer)))) if is_lent else buffer
        # In one call: after each this thread waits up to 5 ms for an engine that keeps Python busy.
        count = os.preadv(file.fileno(), [raw, own], 0) - HEADER_BYTES
        header = _parse(bytes(raw)) if count >= 0 else None
        if header is None:
            return "its header is damaged"
        if header.key != key or header.info != info:
            return "it holds another chunk"
        crc, done = 0, 0
        while True:
            crc = zlib.crc32(own[:count], crc)
            if is_lent:
                if not is_lent():
                    return ""
                buffer[done : done + count] = own[:count]
            done += count
            if done == len(buffer):
                break
            own = own[: len(buffer) - done] if is_lent else buffer[done:]
            count = os.preadv(file.fileno(), [own], HEADER_BYTES + done)
            if count == 0:
                return f"it ends after {done} of {len(buffer)} bytes"
    return None if crc == header.crc else "its checksum does not match"


def identify_chunk(path: Path) -> tuple[str, ChunkInfo] | None:
    """Return key and info of a file; None if they are wrong. OSError if it can't be read."""
    with _open(path) as file:
        header, status = _parse(os.pread(file.fileno(), HEADER_BYTES, 0)), os.fstat(file.fileno())
    if header is None or status.st_size != HEADER_BYTES + header.info.payload_bytes:
        return None
    return header.key, header.info


def pack_chunk(key: str, meta: str, payload: memoryview) -> bytes:
    """Return the bytes of a chunk's file. Raises ValueError if key and meta don't fit a header."""
    header = _pack(_Header(key, ChunkInfo(meta, len(payload)), zlib.crc32(payload)))
    return b"".join((header, payload))


def unpack_chunk(value: memoryview, key: str) -> tuple[str, memoryview]:
    """Undo `pack_chunk`: return meta and payload, a view. ValueError says what is wrong."""
    header, payload = _parse(bytes(value[:HEADER_BYTES])), value[HEADER_BYTES:]
    if header is None:
        raise ValueError("its header is damaged")
    if header.key != key:
        raise ValueError("it holds another chunk")
    if len(payload) != header.info.payload_bytes:
        raise ValueError(f"it has {len(payload)} of {header.info.payload_bytes} bytes")
    if zlib.crc32(payload) != header.crc:
        raise ValueError("its checksum does not match")
    return header.info.meta, payload


def _open(path: Path) -> BinaryIO:
    """Open a plain file of this user for reading; never waits for the other end of a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not _is_plain(status, os.geteuid()):
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a plain file of this user", str(path))
    return os.fdopen(fd, "rb", buffering=0)


def _is_plain(status: os.stat_result, user: int) -> bool:
    """Whether it is a plain file of the user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == user


def _pack(header: _Header) -> bytes:
    key, meta = header.key.encode(), header.info.meta.encode()
    if len(key) + len(meta) + _FIXED.size > HEADER_BYTES:
        raise ValueError(f"key and meta are longer than a header of {HEADER_BYTES} bytes holds")
    lengths = (header.info.payload_bytes, len(key), len(meta))
    fixed = _FIXED.pack(_MAGIC, _VERSION, 0, header.crc, *lengths)
    raw = bytearray((fixed + key + meta).ljust(HEADER_BYTES, b"\0"))
    struct.pack_into("<I", raw, _CRC_AT, zlib.crc32(raw))
    return bytes(raw)


def _parse(raw: bytes) -> _Header | None:
    """Return the header, or None if these bytes are not an intact one of this version."""
    if len(raw) != HEADER_BYTES or raw[:8] != _MAGIC:
        return None
    _, version, crc, payload_crc, payload, key_bytes, meta_bytes = _FIXED.unpack_from(raw)
    if version != _VERSION or crc != zlib.crc32(raw[:_CRC_AT] + bytes(4) + raw[_CRC_AT + 4 :]):
        return None
    end = _FIXED.size + key_bytes
    key, meta = raw[_FIXED.size : end], raw[end : end + meta_bytes]
    try:
        return _Header(key.decode(), ChunkInfo(meta.decode(), payload), payload_crc)
    except UnicodeDecodeError:
        return None
