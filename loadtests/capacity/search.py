"""The search for the most users that fit: it doubles until a step fails, then bisects."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["search"]


def search(
    fits: Callable[[int], bool],
    *,
    start: int,
    most: int,
    within: float,
    allowed: Callable[[int], bool],
) -> None:
    """Try numbers of users until the answer is near enough.

    Args:
        fits: tries a number; whether it is within the thresholds.
        start: the first number.
        most: no larger number is tried.
        within: the search ends when no number is left between the largest that fits and the
            smallest that does not, or when they differ by less than this share.
        allowed: numbers that may be tried; the next one above is taken instead.
    """
    good, bad, users = 0, None, start
    while True:
        users = next((u for u in range(users, most + 1) if allowed(u)), 0)
        if not users:
            return
        if fits(users):
            good = users
        else:
            bad = users
        if bad is None:
            users = 2 * good
            continue
        between = [u for u in range(good + 1, bad) if allowed(u)]
        if not between or bad - good <= within * good:
            return
        users = between[len(between) // 2]
