"""Nothing that tells whose machine it is stays in a report; each kind is planted here."""

from __future__ import annotations

import json

import pytest

from lmcache_xpu.bench.redaction import Redactor

ENVIRON = {
    "LMCACHE_XPU_API_KEY": "s3cret-key",
    "HF_TOKEN": "hf_abcdefghijkl",
    "LMCACHE_XPU_REMOTE_PASSWORD": 'pass"word\\1',
    "LMCACHE_XPU_REMOTE_URL": "redis://cache.corp.example:6379/0",
    "HTTPS_PROXY": "http://joe:hunter22@proxy.corp.example:3128",
    "TOKENIZERS_PARALLELISM": "on",
    "PATH": "/usr/bin",
}
REDACT = Redactor(
    ENVIRON,
    hosts=("node17", "node17.corp.example"),
    users=("alice", "root"),
    homes=("/data/people/alice",),
)


@pytest.mark.parametrize(
    ("planted", "gone"),
    [
        ("found key s3cret-key", "s3cret"),
        ("token hf_abcdefghijkl", "abcdefghijkl"),
        ("another hf_zyxwvutsrqpo of a log", "zyxwvut"),
        ('AUTH pass"word\\1 refused', "pass"),
        ("Authorization: Bearer eyJhbGciOi", "eyJhb"),
        ('"api_key": "0123456789"', "0123456789"),
        ("redis_password=letmein99", "letmein"),
        ("redis://cache.corp.example:6379: timed out", "corp"),
        ("cache.corp.example does not answer", "corp"),
        ("http://joe:hunter22@proxy.corp.example:3128", "hunter22"),
        ("hunter22", "hunter22"),
        ("http://joe:other-pass@elsewhere.example/x", "other-pass"),
        ("https://elsewhere.example/x", "elsewhere"),
        ("on node17: no device", "node17"),
        ("on NODE17.corp.example: no", "corp"),
        ("owned by alice", "alice"),
        ("mail alice.b@corp.example", "corp"),
        ("/home/bob/models/x/config.json", "bob"),
        ("/Users/carol/x", "carol"),
        ("/data/people/alice/venv/lib", "people"),
        ("connect 192.168.10.7:6379", "192.168"),
        ("from fe80::1ff:fe23:4567:890a", "fe80"),
        ("[2001:db8::7]:6379", "2001"),
    ],
)
def test_it_is_taken_out(planted, gone):
    for value in (planted, {"a": [planted]}, [{"b": planted}]):
        text = json.dumps(REDACT(value))
        assert gone.lower() not in text.lower()


@pytest.mark.parametrize(
    "text",
    [
        "driver 25.13.33276.3, Linux-6.14.0-29-generic-x86_64-with-glibc2.39",
        "Intel(R) Arc(TM) Pro B60 Graphics, 24 GiB",
        "127.0.0.1:8000 is free",
        "http://localhost:8000",
        "https://github.com/vllm-project/vllm/issues/49250",
        "/opt/venv/lib/python3.12/site-packages, /dev/dri/renderD128",
        "at 12:30:05, 1024 tokens on cpu",
        "the group of root; malice, node170",
    ],
)
def test_what_is_asked_for_stays(text):
    assert REDACT(text) == text


def test_this_machine_is_known(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node99")
    monkeypatch.setattr("getpass.getuser", lambda: "dora")
    monkeypatch.setenv("MY_SECRET", "planted-here")
    text = Redactor.of_this_machine()("node99, dora, planted-here")
    assert text == "(host), (user), (secret)"
