"""What a tier would compute less if it knew more: replays of coding agents' sessions.

    PYTHONPATH=src python measurements/eviction_hints.py FOLDER --tokens 1000000

Simulations in a few lines, beside the order that the tiers have (`tail first`) and the optimum.
Prints JSON: tokens computed, over those of endless memory.
"""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict, defaultdict
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from lmcache_xpu.bench import trace

CHUNK, USERS, FLOOD = 256, 8, 200  # tokens; agents at work; chunks of a prompt of the flood


class Prompt(NamedTuple):
    """A prompt of a session, and the names of its whole chunks."""

    session: int
    is_last: bool
    tokens: int
    chunks: tuple[int, ...]


def prompts(folder: Path) -> list[Prompt]:
    """Read sessions as `lmcache-xpu bench trace` does, and keep whose prompts they are."""
    free, sent = [0.0] * USERS, []
    for number, file in enumerate(sorted(folder.glob("*.json"))):
        session = json.loads(file.read_text())
        scope = "" if session.get("hash_id_scope") == "global" else file.name
        steps = sorted(trace._steps(session["requests"], scope, 0, session.get("block_size", 64)))
        at = heapq.heappop(free)
        for place, (earlier, later) in enumerate(pairwise([steps[0], *steps])):
            at += min(later.at - earlier.at, trace.PAUSE_S)
            sent.append((later._replace(at=at), number, place == len(steps) - 1))
        heapq.heappush(free, at + trace.NEXT_S)
    sent.sort(key=lambda each: each[0].at)
    requests = trace._requests([prompt for prompt, *_ in sent], CHUNK)
    return [
        Prompt(session, is_last, request.tokens, tuple(request.chunks))
        for (_, session, is_last), request in zip(sent, requests, strict=True)
    ]


class TailFirst:
    """Least recently used goes first, and of one prompt its end."""

    def __init__(self, room: int, future: list[Prompt]) -> None:
        self.room, self.now = room, 0
        self.kept: dict[int, tuple[int, int, int]] = {}
        self.order: list[tuple[tuple[int, int, int], int]] = []

    def ask(self, prompt: Prompt) -> int:
        """Return the chunks that are hit, and store the rest."""
        hit = sum(1 for _ in takewhile(self.kept.__contains__, prompt.chunks))
        self.now += 1
        for place, chunk in enumerate(prompt.chunks):
            self._rank(chunk, (self._rank_of(place, hit), self.now, -place))
        while len(self.kept) > self.room:
            rank, chunk = heapq.heappop(self.order)
            if self.kept.get(chunk) == rank:
                del self.kept[chunk]
        self._end(prompt)
        return hit

    def _rank(self, chunk: int, rank: tuple[int, int, int]) -> None:
        self.kept[chunk] = rank
        heapq.heappush(self.order, (rank, chunk))

    def _rank_of(self, place: int, hit: int) -> int:
        return 1

    def _end(self, prompt: Prompt) -> None:
        """Learn from a prompt that was answered."""

    def _forget(self, chunks: set[int]) -> None:
        """Let chunks go before all others."""
        for chunk in chunks & self.kept.keys():
            self._rank(chunk, (0, *self.kept[chunk][1:]))


class SessionEnds(TailFirst):
    """A client says that its session is over: what no other session has goes first."""

    def __init__(self, room: int, future: list[Prompt]) -> None:
        super().__init__(room, future)
        self.users: defaultdict[int, set[int]] = defaultdict(set)
        self.of: defaultdict[int, set[int]] = defaultdict(set)

    def _end(self, prompt: Prompt) -> None:
        super()._end(prompt)
        self.of[prompt.session].update(prompt.chunks)
        for chunk in prompt.chunks:
            self.users[chunk].add(prompt.session)
        if prompt.is_last:
            for chunk in (own := self.of.pop(prompt.session)):
                self.users[chunk].discard(prompt.session)
            self._forget({chunk for chunk in own if not self.users[chunk]})


class BranchesEnd(TailFirst):
    """A client names its session: what its next prompt did not go on with goes first."""

    def __init__(self, room: int, future: list[Prompt]) -> None:
        super().__init__(room, future)
        self.last: dict[int, set[int]] = {}

    def _end(self, prompt: Prompt) -> None:
        super()._end(prompt)
        left = self.last.get(prompt.session, set()) - set(prompt.chunks)
        self._forget({chunk for chunk in left if self.kept.get(chunk, (0, self.now))[1] < self.now})
        self.last[prompt.session] = set(prompt.chunks)


class BothEnd(BranchesEnd, SessionEnds):
    """Both."""


class HitOnce(TailFirst):
    """Admission: what was never hit goes before what was."""

    def _rank_of(self, place: int, hit: int) -> int:
        return int(place < hit)


class Optimum(TailFirst):
    """Those go that are asked for last (Belady)."""

    def __init__(self, room: int, future: list[Prompt]) -> None:
        super().__init__(room, future)
        self.uses: defaultdict[int, list[int]] = defaultdict(list)
        for at in reversed(range(len(future))):
            for chunk in future[at].chunks:
                self.uses[chunk].append(at)

    def _rank(self, chunk: int, rank: tuple[int, int, int]) -> None:
        self.uses[chunk].pop()
        use = self.uses[chunk][-1] if self.uses[chunk] else 2**40
        super()._rank(chunk, (-use, *rank[1:]))


class Flooded(TailFirst):
    """Another tenant sends a prompt that never comes back behind each of the agents'."""

    quota = 1.0  # of the room, that one tenant may hold

    def __init__(self, room: int, future: list[Prompt]) -> None:
        super().__init__(room, future)
        self.tenant: OrderedDict[int, None] = OrderedDict()

    def _end(self, prompt: Prompt) -> None:
        if prompt.session < 0:
            self.tenant.update(dict.fromkeys(prompt.chunks))
            while len(self.tenant) > self.quota * self.room:
                self.kept.pop(self.tenant.popitem(last=False)[0], None)
            return
        first = -1 - FLOOD * self.now
        self.ask(Prompt(-1, False, 0, tuple(range(first, first - FLOOD, -1))))


class FloodedHalf(Flooded):
    """The same, and no tenant may hold more than half."""

    quota = 0.5


def main(
    folder: Annotated[Path, typer.Argument(help="Sessions of coding agents, a JSON file each")],
    tokens: Annotated[list[int], typer.Option(help="Of a tier; repeat it")] = [1_000_000],  # noqa: B006
) -> None:
    """Print a line for each size of the tier."""
    sent = prompts(folder)

    def computed(kind: type[TailFirst], room: int) -> int:
        tier = kind(room, sent)
        return sum(each.tokens - min(tier.ask(each) * CHUNK, each.tokens - 1) for each in sent)

    endless, kinds = computed(TailFirst, 2**40), (TailFirst, SessionEnds, BranchesEnd, BothEnd)
    for size in tokens:
        of = (*kinds, HitOnce, Optimum, Flooded, FloodedHalf)
        report = {kind.__name__: computed(kind, -(-size // CHUNK)) / endless for kind in of}
        print(json.dumps({"tokens": size, **{k: round(v, 2) for k, v in report.items()}}))


if __name__ == "__main__":
    typer.run(main)
