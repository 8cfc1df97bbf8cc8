"""How `verify` asks: steps that end where it says, promises, aborts. vLLM's engine is imitated."""

from __future__ import annotations

from types import SimpleNamespace

from lmcache_xpu.verify.asking import ANSWER, ask

BLOCK, STEP = 16, 100


class Connector:
    """Promises tokens to each request, as vLLM's scheduler tells it to load."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def update_state_after_alloc(self, request, blocks, tokens) -> None:
        self.calls.append(tokens)


class Engine:
    """Computes a prompt in steps, and then a token a step."""

    def __init__(self, hit: int = 0, own: int = 0, lost: int = 0) -> None:
        self.connector = Connector()
        self.scheduler = SimpleNamespace(
            max_num_scheduled_tokens=STEP, connector=self.connector, running=[]
        )
        self.hit, self.own, self.lost = hit, own, lost
        self.requests: dict[str, SimpleNamespace] = {}
        self.steps: list[int] = []
        self.looks: list[int] = []

    def add(self, prompt, tokens):
        name = str(len(self.requests))
        self.requests[name] = SimpleNamespace(
            request_id=f"{name}-1f", prompt=prompt, left=tokens,
            num_computed_tokens=0, num_preemptions=0,
        )  # fmt: skip
        return name

    def request(self, name):
        request = self.requests.get(name)
        return request if request in self.scheduler.running else None

    def states(self):
        return {1}

    def blocks(self, name, tokens, *, seen=(), states=()):
        self.looks.append(tokens)
        places = {(0, at): [at] for at in range(tokens // BLOCK) if (0, at) not in seen}
        return places | ({(1, tokens // BLOCK): [tokens]} if states else {})

    def abort(self, name):
        self.scheduler.running.remove(self.requests.pop(name))

    def step(self):
        outputs = []
        for name, request in list(self.requests.items()):
            if request not in self.scheduler.running:
                self.scheduler.running.append(request)
                request.num_computed_tokens = self.own + self.hit - self.lost
                self.scheduler.connector.update_state_after_alloc(request, None, self.hit)
            left = len(request.prompt) - request.num_computed_tokens
            tokens = min(left, self.scheduler.max_num_scheduled_tokens) if left > 0 else 1
            self.steps.append(tokens)
            request.num_computed_tokens += tokens
            done = request.num_computed_tokens >= len(request.prompt)
            request.left -= done
            if not request.left:
                del self.requests[name]
                self.scheduler.running.remove(request)
            if done:
                outputs.append(
                    SimpleNamespace(
                        request_id=name,
                        outputs=[SimpleNamespace(token_ids=[7])],
                        num_cached_tokens=self.own + self.hit,
                        finished=not request.left,
                    )
                )
        return outputs


def test_steps_end_where_they_are_told_to():
    engine = Engine()
    [asked] = ask(engine, [[5] * 150], ends=(32, 33))
    assert engine.steps[:4] == [32, 1, 100, 17]
    assert asked.ends == [32, 33, 133, 150]
    assert engine.scheduler.max_num_scheduled_tokens == STEP
    assert asked.answer == [7] * ANSWER
    assert (asked.cached, asked.failed) == (0, False)


def test_blocks_are_looked_at_as_they_fill_and_once_more_near_the_end():
    engine = Engine()
    [asked] = ask(engine, [[5] * 150], ends=(32,))
    assert engine.looks == [32, 132, 150, 150]
    assert {place for group, place in asked.blocks if group == 0} == set(range(9))
    assert asked.blocks[1, 9] == [150]  # the state at the prompt's end, which goes on afterwards


def test_a_promise_is_kept_and_the_connector_is_left_as_it_was():
    engine = Engine(hit=64, own=32)
    [asked] = ask(engine, [[5] * 120])
    assert (asked.external, asked.own, asked.failed) == (64, 32, False)
    assert engine.connector.calls == [64]
    assert "update_state_after_alloc" not in vars(engine.connector)


def test_promised_tokens_that_are_computed_count_as_a_failed_load():
    [asked] = ask(Engine(hit=112, lost=112), [[5] * 120])
    assert asked.failed


def test_an_aborted_prompt_has_no_answer():
    first, second = ask(Engine(), [[5] * 140, [6] * 40], aborted=[0])
    assert first.answer == []
    assert second.answer == [7] * ANSWER


def test_an_engine_without_a_connector_promises_nothing():
    engine = Engine(own=32)
    real = engine.scheduler.connector
    engine.scheduler.connector = None
    real_step, engine.step = engine.step, None

    def step():
        engine.scheduler.connector = real
        outputs = real_step()
        engine.scheduler.connector = None
        return outputs

    engine.step = step
    [asked] = ask(engine, [[5] * 40])
    assert (asked.external, asked.own) == (0, 32)
