"""What the judge says of what engines gave back; answers stand for engines."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmcache_xpu.bench.runner import Result as EngineResult
from lmcache_xpu.cli import app, verify
from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.verify import judge
from lmcache_xpu.verify.asking import Asked
from lmcache_xpu.verify.cases import Case, Facts, Pair, cases, damage
from lmcache_xpu.verify.judge import Judge, Outcome, Result, acquit, differences, do

FACTS = Facts([16, 32], [["a.0", "a.1"], ["state"]], tokens=4096, longest=4000)
PROMPT = list(range(70))


def asked(**changes) -> Asked:
    """A prompt of which four blocks of one group and two of another are whole."""
    values = {
        "prompt": PROMPT,
        "answer": [7, 8, 9],
        "ends": [16, 32, 48, 64, 70],
        "blocks": {
            **{(0, at): [10 + at, 20 + at] for at in range(4)},
            **{(1, at): [30 + at] for at in range(2)},
        },
    }
    return Asked(**(values | changes))


def hit(external: int = 64, **changes) -> Asked:
    return asked(**({"external": external, "ends": [70]} | changes))


def with_block(key: tuple[int, int], digests: list[int]) -> dict:
    return asked().blocks | {key: digests}


class Engine:
    """The process of an engine, which answers what it is told."""

    def __init__(self, *answers: object, error: str | None = None) -> None:
        self.result = EngineResult("x", "the engine", error=error)
        self.answers, self.jobs = list(answers), []

    def ask(self, words, job):
        self.jobs.append(job)
        return self.answers.pop(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.result.error or not self.answers


def judged(pair: Pair, *computed: Asked, second: Engine | None = None) -> Result:
    starts = iter([second] if second else [])
    return Judge(FACTS, Engine(*computed), lambda _: next(starts)).result("case", [pair])


def test_what_was_loaded_and_what_was_computed_are_compared():
    result = judged(Pair("", asked(), hit()), asked())
    assert result.outcome is Outcome.EXACT
    assert (result.tokens, result.hit, result.compared) == (70, 64, 12)


@pytest.mark.parametrize(
    ("key", "digests", "words"),
    [
        ((0, 1), [11, 0], "block 1 (token 16), group 0, layer a.1"),
        ((0, 3), [0, 23], "block 3 (token 48), group 0, layer a.0"),
        ((1, 1), [0], "block 1 (token 32), group 1, layer state"),
    ],
)
def test_the_first_block_layer_and_group_that_differ_are_named(key, digests, words):
    result = judged(Pair("", asked(), hit(blocks=with_block(key, digests))))
    assert result.outcome is Outcome.WRONG
    assert result.different[0] == words


@pytest.mark.parametrize(("block", "outcome"), [(3, Outcome.EXACT), (2, Outcome.WRONG)])
def test_of_a_whole_hit_the_last_block_is_not_compared(block, outcome):
    """Its last token is computed alone, and rounded otherwise than among others."""
    whole = {"prompt": PROMPT[:64], "ends": [16, 32, 48, 64]}
    pair = Pair("", asked(**whole), hit(**whole, blocks=with_block((0, block), [0, 0])))
    assert judged(pair, asked(**whole)).outcome is outcome


def test_other_tokens_after_exact_blocks_are_wrong():
    """As after a load that came behind the step that read it."""
    result = judged(Pair("", asked(), hit(answer=[7, 0, 9])), asked(), asked())
    assert result.different == ["token 1 of the answer"]


def test_blocks_behind_a_hit_are_compared_with_the_same_steps():
    pair = Pair("", asked(), hit(32, ends=[48, 70], blocks=with_block((0, 3), [0, 0])))
    plain = Engine(asked(), asked())
    result = Judge(FACTS, plain, lambda _: None).result("case", [pair])
    assert result.different == ["block 3 (token 48), group 0, layer a.0"]
    assert plain.jobs[0].keywords["ends"] == [16, 32, 48, 70]


def test_without_a_hit_nothing_is_proven_but_a_difference_counts():
    own = {"external": 0, "own": 64}
    assert judged(Pair("", asked(), hit(**own)), asked()).outcome is Outcome.NO_HIT
    wrong = judged(Pair("", asked(), hit(**own, answer=[1])), asked(), asked())
    assert wrong.outcome is Outcome.WRONG


def test_a_load_that_failed_and_was_computed_is_no_hit():
    result = judged(Pair("", asked(), hit(failed=True, blocks={})))
    assert (result.outcome, result.failed) == (Outcome.NO_HIT, 64)


def test_where_two_engines_differ_by_themselves_only_loads_are_compared():
    other = asked(answer=[1, 2, 3], blocks=with_block((0, 0), [1, 1]))
    third = asked(blocks=with_block((0, 0), [2, 2]))
    result = judged(Pair("", asked(), hit()), other, other, second=Engine(third))
    assert (result.outcome, result.compared) == (Outcome.EXACT, 6)
    assert result.note == judge.NOT_REPEATED


def test_a_connector_that_changes_what_is_computed_is_wrong():
    """Two engines without it agree, and the one that had it computed otherwise from the start."""
    plain = asked(answer=[1, 2, 3], blocks=with_block((0, 0), [1, 1]))
    result = judged(Pair("", asked(), hit()), plain, plain, second=Engine(plain))
    assert result.outcome is Outcome.WRONG


def test_at_once_only_loaded_blocks_are_compared():
    pair = Pair("", asked(), hit(32, answer=[], blocks=with_block((0, 3), [0, 0])), alone=False)
    assert judged(pair).outcome is Outcome.EXACT


def test_another_question_is_compared_as_far_as_prompts_are_the_same():
    prompt = PROMPT[:40] + [0] * 30
    pair = Pair("", asked(), hit(64, prompt=prompt, blocks=with_block((0, 3), [0, 0])), alone=False)
    assert judged(pair).compared == 3


@pytest.mark.parametrize(
    ("ranks", "digests", "outcome"),
    [
        (1, [11, 21], "exact"),
        (1, [1, 2], "exact"),
        (1, [1, 21], "WRONG"),  # half of each, as of an object that is half written
        (2, [1, 21], "exact"),  # a rank had dropped its part, and the other had not
        (2, [1, 22], "WRONG"),
    ],
)
def test_a_block_that_was_recomputed_may_have_either_bytes(ranks, digests, outcome):
    """A cache that is too small drops blocks; computed among others they are rounded otherwise."""
    recomputed = [{(0, 1): [1, 2]}, {(0, 2): [3, 4]}]
    now = hit(blocks=with_block((0, 1), digests))
    pair = Pair("", asked(), now, alone=False, recomputed=recomputed)
    result = Judge(replace(FACTS, ranks=ranks), Engine(), lambda _: None).result("case", [pair])
    assert (result.outcome, result.compared) == (outcome, 6)


def test_null_blocks_are_not_compared():
    both = {key: value for key, value in asked().blocks.items() if key[0]}
    assert differences(FACTS, asked().blocks, both, 70) == (2, [])


def test_another_question_leaves_a_drafter_the_token_behind_a_hit():
    # Its layers compute a token with the one behind it.
    for drafts in (False, True):
        [case] = [c for c in cases(replace(FACTS, drafts=drafts)) if c.name.endswith("chunk's end")]
        assert case.shared == 2 * FACTS.chunk + drafts


def test_lengths_lie_around_blocks_and_chunks():
    lengths = {case.stored for case in cases(FACTS)}
    assert {255, 256, 257, 799, 800} <= lengths
    assert all(case.shared < case.stored for case in cases(FACTS))
    small = Facts([128], [["a"]], tokens=1024, longest=4000)
    assert {case.stored for case in cases(small)} == {255, 256, 257}
    assert Case("x", 5) == Case("x", 5, 0, 0, 0, False)


def test_a_byte_of_each_file_is_flipped(tmp_path: Path):
    contents = {"a": b"abc", "b": b"", "c/d": bytes(1000)}
    (tmp_path / "c").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert damage(tmp_path) == 2
    changed = {name: (tmp_path / name).read_bytes() for name in contents}
    assert changed["a"] == b"a\x9dc"
    assert sum(changed["c/d"]) == 255


def test_an_engine_that_ends_is_an_error():
    with pytest.raises(EngineError, match="failed at 'start': RuntimeError: no"):
        do(Engine(None, error="RuntimeError: no"), "start", print)


def pairs(**changes) -> list[Pair]:
    return [Pair("", asked(), asked(**changes))]


@pytest.mark.parametrize(
    ("bare", "own", "connector", "code", "words"),
    [
        ({}, {"own": 64}, {"external": 64}, 0, "All agree"),
        (
            {"answer": [1]},
            {},
            {"answer": [1], "external": 64},
            0,
            "Not the connector: with no cache",
        ),
        ({}, {"answer": [1]}, {"external": 64}, 0, "Not the connector: with vLLM's own cache"),
        ({}, {}, {"answer": [7, 7, 7], "external": 64}, 1, "THE CONNECTOR"),
        ({}, {}, {}, 3, "NOTHING WAS LOADED"),
    ],
    ids=["all agree", "the engine", "vLLM's own cache", "the connector", "no hit"],
)
def test_who_differs_first(bare, own, connector, code, words):
    answers = {
        "bare": Engine(FACTS, [PROMPT], pairs(**bare)),
        "plain": Engine(FACTS, pairs(**own)),
        "connector": Engine(FACTS, pairs(**connector)),
    }
    results = acquit(lambda name: answers[name])
    console = Console(file=io.StringIO(), width=200)
    assert verify.acquittal(results, console) == code
    assert words in console.file.getvalue()
    if code == 1:
        assert results[-1].different[0] == "token 1 of the answer"


@pytest.mark.parametrize(
    ("result", "code", "words"),
    [
        (Result("a", hit=5, compared=3), 0, "Exact"),
        (Result("a", hit=5, different=["block 3", "block 4"]), 1, "block 3, and 1 more"),
        (Result("a"), 3, "NOTHING WAS LOADED"),
        (Result("a", hit=5, preemptions=2, failed=256), 0, "256 tokens promised, and computed"),
    ],
    ids=["exact", "wrong", "no hit", "failed"],
)
def test_the_page_and_the_exit_code(result, code, words):
    console = Console(file=io.StringIO(), width=200)
    verify.show([result], console, "theirs")
    assert verify.conclusion([result], console) == code
    assert words in console.file.getvalue()


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", "Expecting property name"), ('{"kv_role": "kv_both"}', "kv_connector"), ("3", "object")],
)
def test_a_wrong_configuration_is_told_at_once(config, message):
    done = CliRunner().invoke(app, ["verify", "model", "--kv-transfer-config", config])
    assert done.exit_code == 2
    assert message in done.output


def test_a_directory_with_files_is_not_damaged(tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    done = CliRunner().invoke(app, ["verify", "--disk", str(tmp_path)])
    assert done.exit_code == 2
    assert (tmp_path / "mine").read_text() == "mine"


def test_engines_are_started_with_and_without_the_connector(monkeypatch, tmp_path: Path):
    started = []

    class Child:
        def __init__(self, variant, values, variables, **_):
            started.append((variant.name, values, variables))

    monkeypatch.setattr("lmcache_xpu.bench.runner.Child", Child)
    monkeypatch.setenv("LMCACHE_XPU_CPU_GIB", "3")
    theirs = {"kv_connector": "Theirs"}
    for config in (None, theirs):
        start = verify.starter(str(tmp_path), config, None, ["--x"], 5, Console())
        for name in ("connector", "plain", "bare"):
            start(name)
    offload = [values.get("offload", True) for _, values, _ in started]
    assert offload == [True, False, False, False, False, False]
    assert started[2][1]["prefix_caching"] is False
    assert "cpu_gib" not in started[0][1]  # the environment says it
    words = started[3][1]["extra_args"]
    sent = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert sent == {"kv_connector": "Theirs", "kv_role": "kv_both"}
    assert "--kv-transfer-config" not in started[4][1]["extra_args"]


def test_a_setting_that_is_wrong_is_told(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("LMCACHE_XPU_CHUNK_TOKENS", "100")
    with pytest.raises(SettingsError, match="chunk_tokens=100"):
        verify.starter(str(tmp_path), None, None, [], 5, Console())
