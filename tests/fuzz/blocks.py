"""Blocks of the fuzzer's engine: requests get them, share them and give them back."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection

from keeper import Keeper
from paged_layers import Layers
from running import Prompt, Running

from lmcache_xpu.cache.protocol import TokenRange


class Blocks:
    """What becomes of blocks; a part of `Steps`, which sets the attributes."""

    random: random.Random
    keeper: Keeper
    layout: Layers
    block_tokens: int
    chunk: int  # tokens
    free: list[int]
    users: Counter[int]
    grown: list[Running]  # in this step
    numbers: itertools.count

    def _admit(self, prompt: Prompt, donors: list[Running]) -> Running | None:
        size = self.block_tokens
        kept = [
            donor.blocks[: min(prompt.kept, donor.tokens // size, (prompt.tokens - 1) // size)]
            for donor in donors
            if donor.prompt.content == prompt.content
        ]
        blocks = max(kept, key=len, default=[])[:]
        cached = len(blocks) * size
        need = -(-prompt.tokens // size) - len(blocks)
        if need > len(self.free):
            return None
        # Those that were given back last come first.
        blocks += [self.free.pop() for _ in range(need)]
        self.users.update(blocks)
        keys = self.keeper.keys(prompt.content, prompt.tokens // self.chunk)
        name = f"request {next(self.numbers)}"
        request = Running(name, prompt, keys, blocks, prompt.tokens, cached, cached)
        if not len(keys):
            return request
        hit = self.keeper.look_up(keys)
        if hit * self.chunk <= cached:
            self.keeper.cache.unlock(keys, hit, 0, hit)
            return request
        first = cached // self.chunk if self.random.random() < 0.5 else 0
        self.keeper.cache.unlock(keys, hit, 0, first)
        request.loaded = hit * self.chunk
        request.load = self._range(request, first * self.chunk, request.loaded)
        return request

    def _range(self, request: Running, start: int, end: int) -> TokenRange:
        """Chunks of a request, with their blocks."""
        size = self.block_tokens
        blocks = request.blocks[start // size : end // size]
        kept = max(0, request.cached - start)
        numbers = [self.layout.numbers(group, blocks) for group in range(self.layout.groups)]
        return TokenRange(request.name, request.keys, start, end, "", None, numbers, kept)

    def _of_all_groups(self, blocks: Collection[int]) -> set[int]:
        """Numbers in all groups of blocks as the first one numbers them."""
        groups = range(self.layout.groups)
        return {number for group in groups for number in self.layout.numbers(group, blocks)}

    def _new(self, request: Running) -> frozenset[int]:
        return frozenset(request.blocks[request.cached // self.block_tokens :])

    def _grow(self, donors: list[Running]) -> frozenset[int]:
        """Requests that run get a token more, and a block where they need one."""
        new = set()
        for request in donors:
            if request.tokens == len(request.blocks) * self.block_tokens:
                if not self.free or self.random.random() < 0.5:
                    continue
                request.blocks.append(self.free.pop())
                self.users[request.blocks[-1]] += 1
                new.add(request.blocks[-1])
            elif self.users[request.blocks[-1]] > 1:
                continue
            request.tokens += 1
            self.grown.append(request)
        return frozenset(new)

    def _give_back(self, request: Running) -> None:
        for block in request.blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
