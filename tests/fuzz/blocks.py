"""Blocks of the fuzzer's engine: requests get them, share them and give them back."""

from __future__ import annotations

import random
from collections import Counter

import oracle
from running import Prompt, Running


class Blocks:
    """What becomes of blocks; a part of `Steps`, which sets the attributes."""

    random: random.Random
    paged: oracle.Paged
    block_tokens: int
    chunk: int  # tokens
    stored: dict[tuple[int, int], list]  # content and number: objects by group
    free: list[int]
    users: Counter[int]
    grown: list[Running]  # in this step

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
        stored = 0
        while (stored + 1) * self.chunk <= prompt.tokens and (
            prompt.content,
            stored,
        ) in self.stored:
            stored += 1
        request = Running(prompt, blocks, prompt.tokens, cached, max(cached, stored * self.chunk))
        if request.loaded > cached:
            first = cached // self.chunk if self.random.random() < 0.5 else 0
            request.chunks = [(n * self.chunk, (n + 1) * self.chunk) for n in range(first, stored)]
            held = [self.stored[prompt.content, n] for n in range(first, stored)]
            request.objs = [list(group) for group in zip(*held, strict=True)]
            for obj in (obj for group in request.objs for obj in group):
                obj.ref_count_up()
        return request

    def _new(self, request: Running) -> frozenset[int]:
        return frozenset(request.blocks[request.cached // self.block_tokens :])

    def _grow(self, donors: list[Running]) -> frozenset[int]:
        """Requests that run get a token more, and a block where they need one."""
        new = set()
        for request in donors:
            if self.paged.block and request.tokens % self.block_tokens:
                continue  # its whole block would be written, which others may share
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
