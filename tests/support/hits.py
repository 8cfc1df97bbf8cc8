"""What tests of several ranks say of a prompt that was asked again."""

from __future__ import annotations

from typing import Any

from support.real_engine import BLOCK, CHUNK


def check_restored(seen: dict[str, Any], tokens: int, ranks: int = 2) -> None:
    """Tokens were right, and blocks byte for byte the same on all ranks, loaded or computed."""
    assert seen["right"]
    assert len(seen["restored"]) == ranks
    assert min(seen["restored"]) >= tokens // BLOCK


def check_hit(seen: dict[str, Any], tokens: int, ranks: int = 2) -> None:
    """And so many were loaded."""
    check_restored(seen, tokens, ranks)
    assert seen["hit"] == tokens


def check_lost(seen: list[dict[str, Any]], chunks: int) -> None:
    """What a rank had lost was no hit, and was stored again.

    It was computed in another step than the first time, in which rounding may differ.
    """
    faulty, afterwards = seen
    assert faulty["right"]
    assert faulty["hit"] < chunks * CHUNK
    assert afterwards["right"]
    assert afterwards["hit"] == chunks * CHUNK


def check_failed(seen: list[dict[str, Any]], chunks: int, ranks: int = 2) -> None:
    """A load that failed was recomputed, and the next one was a hit."""
    faulty, afterwards = seen
    check_restored(faulty, chunks * CHUNK, ranks)
    check_hit(afterwards, chunks * CHUNK, ranks)
