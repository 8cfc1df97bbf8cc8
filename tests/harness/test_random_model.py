"""The demo's model: equal everywhere, whole or absent, and sensitive to every part of its KV."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing

import pytest

from lmcache_xpu.harness.random_model import CHAT_TEMPLATE, DEMO, EXACT, SPECIAL, corpus, make_model

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "transformers")
]

LENGTH, ANSWER, BLOCK = 1100, 24, 128


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def exact(parent):
    return make_model(EXACT, parent)


def load(directory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(directory)


def differs(said, right):
    """Whether another token is said than is right, which ends the answer."""
    return any(token != other for token, other in zip(said, right, strict=True))


def make_in_process(spec, parent):
    make_model(spec, parent)


def test_every_making_gives_the_same_bytes(exact, tmp_path):
    """In another process, too: hash seeds and thread timing must not matter."""
    process = multiprocessing.get_context("spawn").Process(
        target=make_in_process, args=(EXACT, tmp_path)
    )
    process.start()
    process.join()
    other = tmp_path / exact.name
    names = sorted(path.name for path in exact.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (exact / name).read_bytes() == (other / name).read_bytes(), name


def test_it_is_made_once_and_anew_for_other_parameters(exact, parent):
    before = (exact / "config.json").stat().st_mtime_ns
    assert make_model(EXACT, parent) == exact
    assert (exact / "config.json").stat().st_mtime_ns == before
    other = make_model(dataclasses.replace(EXACT, seed=1), parent)
    assert other != exact
    assert (other / "model.safetensors").read_bytes() != (exact / "model.safetensors").read_bytes()


def test_a_maker_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lmcache_xpu.harness.random_model._write_weights", full)
    with pytest.raises(OSError, match="No space left"):
        make_model(EXACT, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_maker_that_is_second_takes_the_firsts(exact, parent, monkeypatch):
    """Both found no directory; the other one's rename came first."""
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    real = type(exact).rename

    def rename(path, target):
        monkeypatch.undo()
        return real(path, target)

    monkeypatch.setattr("pathlib.Path.rename", rename)
    before = sorted(parent.iterdir())
    assert make_model(EXACT, parent) == exact
    assert sorted(parent.iterdir()) == before


def test_the_tokenizer_is_trained_lossless_and_keeps_a_turn_as_a_prefix(exact):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exact)
    text = corpus()[5000:9000]
    ids = tokenizer(text)["input_ids"]
    assert 3 < len(text) / len(ids) < 6  # bytes alone would be 1
    odd = "naïve 東京 🙂\r\n\x00\u2028"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd

    turn = [{"role": "user", "content": "One?"}]
    later = [*turn, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "?"}]
    first = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    second = tokenizer.apply_chat_template(later, add_generation_prompt=True)["input_ids"]
    assert second[: len(first)] == first
    assert first[0] == SPECIAL.index("<|begin|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_each_token_it_says_can_be_shown_at_once(exact):
    """Or the first chunk with text comes after the first token, and TTFT is wrong."""
    model, tokenizer = load(exact)
    said = model.lm_head.weight.abs().sum(1).nonzero().flatten().tolist()
    assert len(said) > 3000
    assert not set(tokenizer.convert_tokens_to_ids(SPECIAL)) & set(said)
    for token in said:
        text = tokenizer.decode([token])
        assert text
        assert "\ufffd" not in text


@pytest.mark.parametrize(("spec", "prompts"), [(EXACT, 6), (DEMO, 2)], ids=["exact", "demo"])
def test_the_answer_depends_on_every_part_of_the_context(spec, prompts, parent):
    """A changed early token, a block read from its neighbour, lost V: all change the answer.

    Rounding, as between a cached and a recomputed prefix, does not. (Measured: a single lost
    token out of 1,100 shows in about one of three answers; 16 lost ones in all but a few.)
    """
    import torch

    model, tokenizer = load(make_model(spec, parent))
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def compute(prompt):
        return model(prompt[None, :-1], use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def answer(prompt, computed, damage=None):
        cache = copy.deepcopy(computed)
        for layer in cache.layers:
            if damage:
                damage(layer)
        token = prompt[-1]
        for _ in range(ANSWER):
            token = model(token.view(1, 1), past_key_values=cache).logits[0, -1].argmax()
            yield token.item()

    def read_a_block_from_its_neighbour(layer):
        block, neighbour = slice(2 * BLOCK, 3 * BLOCK), slice(BLOCK, 2 * BLOCK)
        for part in (layer.keys, layer.values):
            part[:, :, block] = part[:, :, neighbour].clone()

    def lose_v_of_a_block(layer):
        layer.values[:, :, BLOCK : 2 * BLOCK] = 0

    def lose_16_tokens(layer):
        for part in (layer.keys, layer.values):
            part[:, :, 3 * BLOCK + 5 : 3 * BLOCK + 21] = 0

    def round_off(layer):
        for part in (layer.keys, layer.values):
            part *= 1 + 2e-7 * torch.randn(part.shape, generator=generator)

    answers = []
    for number in range(prompts):
        text = corpus()[number * 20_000 :][: LENGTH * 6]
        prompt = tokenizer(text, return_tensors="pt")["input_ids"][0, :LENGTH]
        computed = compute(prompt)
        right = tuple(answer(prompt, computed))
        answers.append(right)
        assert len(set(right)) > ANSWER / 2  # it doesn't repeat itself
        assert tuple(answer(prompt, computed, round_off)) == right
        changed = prompt.clone()
        changed[7] = (changed[7] + 17) % spec.vocabulary
        assert differs(answer(changed, compute(changed)), right)
        for damage in (read_a_block_from_its_neighbour, lose_v_of_a_block, lose_16_tokens):
            assert differs(answer(prompt, computed, damage), right), damage.__name__
    assert len(set(answers)) == prompts


def test_sizes_that_others_rely_on(exact):
    config = json.loads((exact / "config.json").read_text())
    assert config["max_position_embeddings"] >= 8192
    assert config["head_dim"] in (32, 64, 80, 96, 112, 128)  # vLLM's CPU attention
    assert EXACT.kv_bytes_per_token == 2 * 4 * 2 * 64 * 4
