"""A real `lmcache server` for tests, and a client of it that is no engine.

The client is LMCache's own: its requests, and its way to the server's shared memory, as a worker of
an engine uses them. It stores and retrieves CPU tensors.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from support.scripts import environment

from lmcache_xpu.harness.engine_process import free_port

if TYPE_CHECKING:
    from support.cache_server import CacheServer

MODEL = "a/model"
CHUNK_TOKENS = 256
LAYERS, HIDDEN = 2, 64
SHAPE = torch.Size([2, LAYERS, CHUNK_TOKENS, HIDDEN])  # 128 KiB in bfloat16
CHUNK = SHAPE.numel() * 2
WAIT_S = 30.0
PROGRAM = (sys.executable, "-m", "lmcache.cli.main", "server")  # LMCache's own


class Server:
    """On loopback, with shared memory of its own and these options.

    Args:
        log: file for its output.
        options: more than those that it needs for a start.
        disk: a directory that is a file system of 1 MiB for it, which nobody else sees.
    """

    def __init__(self, log: Path, *options: str, disk: Path | None = None):
        self.log = log
        self.options = options
        self._disk = disk
        self.port, self.http_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *PROGRAM,
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self.http_port)),
            *("--supported-transfer-mode", "engine_driven", "--chunk-size", str(CHUNK_TOKENS)),
            *("--l1-size-gb", str(64 * CHUNK / 2**30), "--no-l1-use-lazy"),
            *("--shm-name", f"test_{self.port}"),
            *("--eviction-policy", "LRU", *self.options),
        ]
        if self._disk is not None:
            user = [] if os.geteuid() == 0 else ["--map-root-user"]
            mount = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
            command = ["unshare", "--mount", *user, "sh", "-c", mount, str(self._disk), *command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(LMCACHE_TRACK_USAGE="false"),
            )
        deadline = time.monotonic() + 90
        while not self._is_up():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthcheck", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def address(self) -> str:
        """Where workers reach it."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def output(self) -> str:
        return self.log.read_text()[-4000:]

    def _status(self, part: str) -> Any:
        return httpx.get(f"{self.url}/status", timeout=10).json()["storage_manager"][part]

    @property
    def disk(self) -> dict[str, Any]:
        """What the server says of its only L2 adapter."""
        [adapter] = self._status("l2_adapters")
        return adapter

    @property
    def l1(self) -> dict[str, Any]:
        """What the server says of its memory."""
        return self._status("l1_manager")

    @property
    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    def stop(self, signal_: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(signal_)
            self.process.wait(30)
            self.process = None


class Client:
    """A worker and a scheduler in one, which asks for prompts of whole chunks.

    Args:
        server: that runs.
        instance: number of the worker, of which the server has no other.
    """

    def __init__(self, server: Server | CacheServer, instance: int = 1):
        self._server = server
        self._instance = instance
        self._requests = itertools.count()
        self._client = RequestClientFactory.create(server.address)
        payload = RegisterEngineDrivenContextPayload(
            instance_id=instance,
            model_name=MODEL,
            world_size=1,
            block_size=16,
            num_layers=LAYERS,
            hidden_dim_size=HIDDEN,
            dtype_str="bfloat16",
            use_mla=False,
            num_physical_slots=CHUNK_TOKENS,
        )
        pool = self._client.register_kv_cache_engine_driven_context(payload).result(WAIT_S)
        metadata = EngineDrivenContextMetadata(
            MemoryLayoutDesc([SHAPE], [torch.bfloat16]), block_size=16, use_mla=False
        )
        self._context = EngineDrivenContextShm(
            metadata, self._client, WAIT_S, pool.shm_name, pool.pool_size
        )

    def _key(self, prompt: int, chunks: int, worker: int | None) -> IPCCacheServerKey:
        tokens = [prompt * 1_000 + i % 997 for i in range(chunks * CHUNK_TOKENS)]
        request = f"request-{next(self._requests)}"
        return IPCCacheServerKey.from_token_ids(MODEL, 1, worker, tokens, 0, len(tokens), request)

    def store(self, prompt: int, chunks: int) -> int:
        """Store a prompt; returns how many chunks of it L1 did not have."""
        key = self._key(prompt, chunks, worker=0)
        slots, numbers = self._context.prepare_store(key, self._instance)
        for slot, number in zip(slots, numbers, strict=True):
            slot.copy_(content(prompt, number))
        assert not slots or self._context.commit_store(key, self._instance, [])
        self._client.end_session(key.request_id).result(WAIT_S)
        return len(numbers)

    def compute(self, prompt: int, chunks: int, step: int) -> None:
        """Look a prompt up that nobody has stored, and store it in steps, as an engine does."""
        key = self._key(prompt, chunks, worker=None)
        self._client.lookup(key, 1).result(WAIT_S)
        assert not self._client.wait_prefetch_status(key.request_id, WAIT_S).result(WAIT_S)
        for first in range(0, chunks, step):
            last = min(first + step, chunks)
            tokens = first * CHUNK_TOKENS, last * CHUNK_TOKENS
            part = replace(key, start=tokens[0], end=tokens[1], worker_id=0)
            slots, numbers = self._context.prepare_store(part, self._instance)
            for slot, number in zip(slots, numbers, strict=True):
                slot.copy_(content(prompt, first + number))
            assert self._context.commit_store(part, self._instance, [])
        self._client.end_session(key.request_id).result(WAIT_S)

    def hit(self, prompt: int, chunks: int) -> int:
        """Look a prompt up and retrieve its hit, whose bytes are compared; returns its chunks."""
        key = self._key(prompt, chunks, worker=None)
        self._client.lookup(key, 1).result(WAIT_S)
        length = self._client.wait_prefetch_status(key.request_id, WAIT_S).result(WAIT_S)
        assert length is not None, "the look-up did not end"
        if length:
            part = replace(key, end=length * CHUNK_TOKENS, worker_id=0)
            # Not the context's own method: its arguments differ between LMCache's versions.
            answer = self._client.prepare_retrieve(part, self._instance).result(WAIT_S)
            slots = self._context._build_slot_tensors(answer.context["slots"])
            assert len(slots) == length
            for number, slot in enumerate(slots):
                assert torch.equal(slot, content(prompt, number)), (prompt, number)
            assert self._context.commit_retrieve(part, self._instance)
        self._client.end_session(key.request_id).result(WAIT_S)
        return length

    def leave(self, prompt: int, chunks: int) -> None:
        """Ask for memory to store a prompt in, and leave before anything is written there."""
        self._context.prepare_store(self._key(prompt, chunks, worker=0), self._instance)
        self.unregister()

    def hold(self) -> int:
        """Ask for memory until there is none, and write nothing; returns its chunks."""
        prompts, chunks, held = itertools.count(10_000), 64, 0
        while chunks:
            key = self._key(next(prompts), chunks, worker=0)
            numbers = self._context.prepare_store(key, self._instance)[1]
            held += len(numbers)
            if not numbers:
                chunks //= 2
        return held

    def unregister(self) -> None:
        """End as a worker that says so."""
        self._client.unregister_kv_cache_engine_driven_context(self._instance).result(WAIT_S)
        self.close()

    def clear(self) -> None:
        """Empty L1, once nothing of it is being stored, and wipe its memory."""
        deadline = time.monotonic() + WAIT_S
        while self._server.l1["total_object_count"]:
            assert time.monotonic() < deadline, self._server.l1
            self._client.clear().result(WAIT_S)
        memory = self._context._shm_buffer
        memory[:] = b"\xff" * len(memory)

    def close(self) -> None:
        self._context.close()
        self._client.close()


def content(prompt: int, chunk: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(prompt * 1_000 + chunk)
    return torch.randn(SHAPE, generator=generator).to(torch.bfloat16)
