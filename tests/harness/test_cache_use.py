"""What is said of a running engine; the pages were recorded from one on CPU, with a disk tier.

The CPU tier's metrics have other names since: they were put in by hand, with the same values.

fresh  nobody has asked
one    one prompt of 1,100 tokens
fits   the same again: it was still in the engine's own cache
hits   eight such prompts in turn, three times: more than the engine and its CPU tier hold
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_xpu.harness.cache_use import CacheUse, advise
from lmcache_xpu.harness.client import Page

PAGES = Path(__file__).parent / "pages"


def page(name, **changes):
    """A recorded page; a change gives the samples of a name, or of `name{label=value,...}`."""
    text = (PAGES / f"{name}.prom").read_text()
    lines = []
    for line in text.splitlines():
        sample = line.rpartition(" ")[0]
        for key, value in () if line.startswith("#") else changes.items():
            words = key.split("__")
            if sample.partition("{")[0].endswith(words[0]) and all(w in sample for w in words[1:]):
                line = f"{sample} {value}"
        lines.append(line)
    return Page.parse("\n".join(lines) + "\n")


def said(name, **changes):
    return advise(CacheUse.between(None, page(name, **changes)))


def test_hits_by_tier():
    use = CacheUse.between(None, page("hits"))
    assert (use.prompt_tokens, use.device_tokens, use.cpu_tokens) == (28_600, 2_048, 0)
    assert (use.disk_tokens, use.shared_tokens, use.computed_tokens) == (16_384, 0, 10_168)
    assert use.stored_tokens == {"cpu": 8_192, "disk": 8_192, "shared": 0}
    assert (use.evicted_chunks, use.own_tokens, use.requests) == (48, 5_120, 26)
    assert use.cpu_bytes == use.cpu_limit_bytes == 24 * 2**20
    assert 0.16 < use.disk_bytes / use.disk_limit_bytes < 0.17


def test_two_devices_of_a_model_count_a_token_once():
    twice = {f"tokens_total__load__{tier}": 32_768 for tier in ("cpu", "disk")}
    use = CacheUse.between(None, page("hits", **twice))
    assert (use.cpu_tokens, use.disk_tokens) == (0, 16_384)
    half = CacheUse.between(None, page("hits", tokens_total__load__disk=8_192))
    assert (half.cpu_tokens, half.disk_tokens) == (8_192, 8_192)


def test_a_span_is_the_difference_and_levels_are_those_of_its_end():
    use = CacheUse.between(page("fits"), page("hits"))
    assert (use.prompt_tokens, use.device_tokens, use.requests) == (26_400, 1_024, 24)
    assert use.cpu_bytes == 24 * 2**20
    restarted = CacheUse.between(page("hits"), page("one"))
    assert restarted.prompt_tokens == 0


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fresh", {}, "No prompt has come yet"),
        ("one", {}, "No prompt came back yet"),
        ("fits", {}, "Everything fits there, so a tier can't help."),
        ("fits", {"tokens_total__store__cpu": 9_000}, "nobody has asked for it again"),
        ("hits", {}, "The cache works: 57% of all prompt tokens came from the tiers"),
        ("one", {"tokens_total__store__cpu": 0}, "Nothing was stored of 1,100 prompt tokens"),
        (
            "one",
            {"tokens_total__store__cpu": 0, "prompt_tokens_total": 90},
            "No prompt was long enough",
        ),
    ],
)
def test_the_answer_comes_first(name, changes, words):
    first, *_ = said(name, **changes)
    assert words in first.text
    assert (first.outcome == "wrong") == words.startswith("Nothing was stored")


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({"disk_limit_bytes": 0}, "hint", "evicted 48 chunks: a larger one (cpu_gib) or a disk"),
        ({"disk_used_bytes": 2e8}, "hint", "The disk tier is full and evicts"),
        ({"num_preemptions_total": 3}, "hint", "3 times a request had to make room"),
        (
            {"errors_total__load__disk__corrupt": 2},
            "wrong",
            "2 times a load failed in the disk tier, corrupt: A file failed its checksum",
        ),
        ({"errors_total__store__disk__behind": 2}, "hint", "faster than the disk"),
        ({"errors_total__load__cpu__RuntimeError": 1}, "wrong", "the log has the cause"),
        ({"fallbacks_total": 4}, "wrong", "4 requests were computed anew"),
    ],
)
def test_what_would_make_it_better(changes, outcome, words):
    answer, *rest = said("hits", **changes)
    assert "The cache works" in answer.text
    assert [item.outcome for item in rest] == [outcome]
    assert words in rest[0].text


def test_there_is_nothing_to_say_of_a_disk_tier_that_keeps_what_the_cpu_tier_evicts():
    assert len(said("hits")) == 1
