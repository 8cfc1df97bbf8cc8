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
        found = 0
        while (found + 1) * self.chunk <= prompt.tokens and (prompt.content, found) in self.stored:
            found += 1
        one = Running(prompt, blocks, prompt.tokens, cached, max(cached, found * self.chunk))
        if one.loaded > cached:
            first = cached // self.chunk if self.random.random() < 0.5 else 0
            one.chunks = [(n * self.chunk, (n + 1) * self.chunk) for n in range(first, found)]
            held = [self.stored[prompt.content, n] for n in range(first, found)]
            one.objs = [list(group) for group in zip(*held, strict=True)]
            for obj in (obj for group in one.objs for obj in group):
                obj.ref_count_up()
        return one

    def _new(self, one: Running) -> frozenset[int]:
        return frozenset(one.blocks[one.cached // self.block_tokens :])

    def _grow(self, donors: list[Running]) -> frozenset[int]:
        """Requests that run get a token more, and a block where they need one."""
        new = set()
        for one in donors:
            if self.paged.block and one.tokens % self.block_tokens:
                continue  # its whole block would be written, which others may share
            if one.tokens == len(one.blocks) * self.block_tokens:
                if not self.free or self.random.random() < 0.5:
                    continue
                one.blocks.append(self.free.pop())
                self.users[one.blocks[-1]] += 1
                new.add(one.blocks[-1])
            elif self.users[one.blocks[-1]] > 1:
                continue
            one.tokens += 1
            self.grown.append(one)
        return frozenset(new)

    def _give_back(self, one: Running) -> None:
        for block in one.blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
