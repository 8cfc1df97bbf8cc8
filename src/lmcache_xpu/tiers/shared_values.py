"""The values of the shared tier: objects of LMCache's server in a Valkey or Redis.

A value has the bytes of a file of the disk tier: a header with checksums, and the object. Its name
has LMCache's key and the object's layout, so engines of another one find nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryObj
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import LOAD_SHARED
from lmcache_xpu.tiers import PASSWORD_VARIABLE, URL_KEY, complain
from lmcache_xpu.tiers.chunk_layout import ChunkLayout, object_name
from lmcache_xpu.tiers.disk.chunk_file import pack_chunk, unpack_chunk

# The version of a value, as part of its name: engines with another one share a server with these,
# and neither finds what the other stores.
FORMAT = "kv3"
CONNECT_S = 1.0
ANSWER_S = 10.0  # to one command
_SLICE = 256 * 1024
_URL = re.compile(r"rediss?://[^@/?]+(/\d+)?(\?ssl_ca_certs=/[^&#]+)?")


def value_name(key: ObjectKey, layout: ChunkLayout | MemoryLayoutDesc) -> str:
    """Return the server's name of an object: of its format, layout and key."""
    shapes = [list(shape) for shape in layout.shapes]
    text = f"{shapes}{[str(dtype) for dtype in layout.dtypes]}"
    return f"{FORMAT}@{hashlib.sha256(text.encode()).hexdigest()[:16]}@{object_name(key)}"


class SharedValues:
    """Values in a server, found by their names. All methods raise what the client raises.

    Thread-safe. Connects with the first command, and again after each error. The password comes
    from the environment. Raises SettingsError if one of `adapter_params`, see `shared_option`, is
    wrong, missing or unknown; it is not shown.
    """

    def __init__(self, params: Mapping[str, object]) -> None:
        url = params.get(URL_KEY)
        if params.keys() != {URL_KEY} or not isinstance(url, str) or not _URL.fullmatch(url):
            raise SettingsError(
                f"adapter_params with {', '.join(sorted(params)) or 'nothing'}",
                f"{URL_KEY} alone, redis://HOST:PORT or rediss://HOST:PORT",
                f"A password goes into the variable {PASSWORD_VARIABLE}.",
            )
        self._server = Redis.from_url(
            url,
            password=os.environ.get(PASSWORD_VARIABLE) or None,
            protocol=2,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),
        )

    def exist(self, names: list[str]) -> list[bool]:
        """Return of each name whether the server has it, which counts as a use; one round trip."""
        with self._server.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.touch(name)
            return [bool(count) for count in pipeline.execute()]

    def touch(self, names: list[str]) -> None:
        """Count values as used now, as far as the server has them."""
        if names:
            self._server.touch(*names)

    def get(self, name: str, layout: ChunkLayout) -> memoryview | None:
        """Return the bytes of an object, None on a miss; a damaged value is deleted."""
        value: Any = self._server.get(name)
        if value is None:
            return None
        try:
            meta, payload = unpack_chunk(memoryview(value), name)
            # Compared, not read: whoever writes to the server wrote that, too.
            if (meta, len(payload)) != (layout.text, layout.size):
                held = f"{len(payload)} bytes of {meta[:200]!r}"
                raise ValueError(f"it holds {held}; expected {layout.size} of {layout.text}")
            return payload
        except ValueError as damage:
            LOAD_SHARED.failed("corrupt")
            complain(
                "a damaged chunk of %d bytes: %s (docs: troubleshooting#shared-damaged)",
                *(len(value), damage),
                tier="shared",
            )
            with contextlib.suppress(ResponseError):  # it may not be deleted, and stays a miss
                self._server.delete(name)
            return None

    def put(self, name: str, layout: ChunkLayout, obj: MemoryObj) -> bool:
        """Send an object; False if its memory was taken back, in which case nothing was sent."""
        value = pack_chunk(name, layout.text, memoryview(obj.byte_array).cast("B"))
        if not obj.is_valid():  # so the bytes may be another's
            return False
        self._server.set(name, value)
        return True

    def disconnect(self) -> None:
        """End what other threads wait for, which raises there."""
        with contextlib.suppress(Exception):  # they may be at it at this moment
            self._server.connection_pool.disconnect()


def fill(obj: MemoryObj, payload: memoryview) -> bool:
    """Write an object's memory while it is lent; say whether it was to the end."""
    memory = memoryview(obj.byte_array).cast("B")
    for begin in range(0, len(payload), _SLICE):
        if not obj.is_valid():
            return False
        memory[begin : begin + _SLICE] = payload[begin : begin + _SLICE]
    return bool(obj.is_valid())
