"""Ask an engine step by step, and keep digests of the blocks that its requests fill."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lmcache_xpu.bench.engine import Blocks, Engine

ANSWER = 12  # tokens of each answer
LOOKED_AT = 8  # once an answer has so many, all blocks of its prompt are looked at again
SETTLE_S, SETTLE_STEPS = 0.3, 2


@dataclass(slots=True)
class Asked:
    """A prompt, what it was answered, and what the blocks of its prompt held."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    own: int = 0  # tokens that vLLM's own cache had
    external: int = 0  # tokens that the connector promised
    ends: list[int] = field(default_factory=list)  # where its steps ended, in tokens of the prompt
    blocks: Blocks = field(default_factory=dict)  # of whole blocks of the prompt
    preemptions: int = 0
    failed: bool = False  # whether promised tokens were computed anew, as after a failed load

    @property
    def cached(self) -> int:
        """Tokens at the beginning that were not computed."""
        return self.own + self.external

    def computed(self, sizes: Sequence[int]) -> Blocks:
        """Return the blocks that were not cached; `sizes` are the tokens of a block, by group."""
        begin = 0 if self.failed else self.cached
        return {key: row for key, row in self.blocks.items() if key[1] * sizes[key[0]] >= begin}


@contextmanager
def promised(connector: Any) -> Iterator[dict[str, int]]:
    """Yield the tokens that a connector promises first to load, by request, as vLLM tells it."""
    promises: dict[str, int] = {}
    if connector is None:
        yield promises
        return
    real = connector.update_state_after_alloc

    def update(request: Any, blocks: Any, tokens: int, *args: Any) -> Any:
        promises.setdefault(request.request_id.partition("-")[0], tokens)
        return real(request, blocks, tokens, *args)

    connector.update_state_after_alloc = update
    yield promises
    del connector.update_state_after_alloc


def ask(
    engine: Engine,
    prompts: Sequence[list[int]],
    ends: Sequence[int] = (),
    aborted: Collection[int] = (),
) -> list[Asked]:
    """Ask prompts at once; return what came of each.

    At `ends`, tokens of the only prompt, steps end besides vLLM's own choice. Prompts of the
    numbers `aborted` are aborted after the first step.
    """
    scheduler = engine.scheduler
    usual = scheduler.max_num_scheduled_tokens
    all_asked = [Asked(prompt) for prompt in prompts]
    running = {engine.add(asked.prompt, ANSWER): asked for asked in all_asked}
    names = list(running)
    with promised(scheduler.connector) as promises:
        while running:
            if ends:
                request = engine.request(names[0])
                done = request.num_computed_tokens if request else 0
                left = next((end - done for end in ends if end > done), usual)
                scheduler.max_num_scheduled_tokens = min(usual, left)
            outputs = engine.step()
            for name, each in running.items():
                _look(engine, name, each)
            for output in outputs:
                if (asked := running.get(output.request_id)) is None:
                    continue  # aborted
                if not asked.answer:
                    asked.own = output.num_cached_tokens or 0
                asked.answer += output.outputs[0].token_ids
                if output.finished:
                    del running[output.request_id]
            for number in aborted:
                engine.abort(names[number])
                running.pop(names[number], None)
            aborted = ()
    scheduler.max_num_scheduled_tokens = usual
    for name, asked in zip(names, all_asked, strict=True):
        asked.external = promises.get(name, 0)
        asked.own = max(0, asked.own - asked.external)
        asked.failed = asked.external > 0 and any(end < asked.cached for end in asked.ends)
    return all_asked


def _look(engine: Engine, name: str, asked: Asked) -> None:
    """Keep digests of the blocks that a step has filled, and of all once more near the end."""
    request = engine.request(name)
    if request is None or request not in engine.scheduler.running:
        return  # it waits, for its load perhaps
    asked.preemptions = max(asked.preemptions, request.num_preemptions)
    done = min(request.num_computed_tokens, len(asked.prompt))
    if not asked.ends or done != asked.ends[-1]:
        asked.ends.append(done)
        # A state goes on with the answer: there is one moment at which it is the prompt's.
        at_end = request.num_computed_tokens == len(asked.prompt)
        states = engine.states() if at_end else ()
        asked.blocks |= engine.blocks(name, done, seen=asked.blocks, states=states)
    elif len(asked.answer) == LOOKED_AT:
        asked.blocks |= engine.blocks(name, len(asked.prompt))


def clean(engine: Engine) -> None:
    """Let stores end, then forget the engine's own cache, its bytes too."""
    for _ in range(SETTLE_STEPS):  # some connectors store a step's blocks in the next one
        engine.seconds(engine.prompt(2))
    time.sleep(SETTLE_S)
    engine.forget()
    engine.zero()
