"""LMCache's keys of a prompt's chunks, in a cache of this process."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey

__all__ = ["PromptKeys"]


class PromptKeys:
    """The keys of a prompt, to which chunks are added as vLLM hashes them.

    Args:
        model_name: of the engine's model.
        salt: what sets the prompt's KV apart beside its tokens.
        groups: number of KV cache groups.

    Attributes:
        by_group: by KV cache group, the keys in the order of chunks.
    """

    def __init__(self, model_name: str, salt: str, groups: int) -> None:
        self._names = model_name, salt
        self.by_group: list[list[ObjectKey]] = [[] for _ in range(groups)]

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.by_group[0])

    def extend(self, hashes: Sequence[bytes]) -> None:
        """Add chunks, by the hashes of all tokens up to the end of each."""
        model_name, salt = self._names
        for group, keys in enumerate(self.by_group):
            keys += [ObjectKey(name, model_name, 0, group, salt) for name in hashes]
