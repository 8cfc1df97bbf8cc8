"""What a report would give away: secrets and names that no pattern of theirs announces."""

from __future__ import annotations

import json

import pytest

from lmcache_xpu.bench.redaction import Redactor

SECRET = "hunter2x"
REDACT = Redactor(
    {
        "MY_DB_PW": "correct-horse",
        "PGPASS": "battery-staple",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
        "VLLM_API_KEY": "abc",
        "CI_JOB_NAME": "acme-rollout",
        "SERVICE_URL": "https://joe:p@ss'w\"rd@cache.acme.example/x",
        "LMCACHE_XPU_MODEL": "acme/secret-model-v7",
        "LMCACHE_XPU_REMOTE_PASSWORD": "päss wörd",
        "LMCACHE_XPU_LOG_LEVEL": "warning",
        "ZE_AFFINITY_MASK": "level_zero:0",
        "DISPLAY_MODE": "12.34.56789",
    },
    hosts=("node17", "node17.corp.example"),
    users=("alice",),
    homes=("/data/people/alice smith",),
)


@pytest.mark.parametrize(
    "text",
    [
        *(f"serve --api-key{between}{SECRET}" for between in (" ", "=", "  ")),
        f"['vllm', '--api-key', '{SECRET}']",
        f'["vllm", "--hf-token", "{SECRET}"]',
        json.dumps({"log": json.dumps({"password": SECRET})}),
        f"vllm serve m --some-option {SECRET} --port 8000",
        f"curl -u bob:{SECRET} x",
        f"mysql -p{SECRET} -u root",
        f"PGPASS={SECRET}",
        f"env SOME_PW='a {SECRET}' run",
        f"AWS_SECRET_ACCESS_KEY={SECRET}/K7+x,y",
        f"VLLM_API_KEY={SECRET}",
        f"non-default args: {{'api_key': ['k', '{SECRET}'], 'dtype': 'float32'}}",
        f"password is {SECRET}",
        f"password: 'a {SECRET}'",
        f"TOKEN {SECRET}",
        f"X-Amz-Signature={SECRET}",
        f"http://localhost:8000/v1?x={SECRET}",
        f"https://hooks.example.com/services/{SECRET}",
        f"redis://localhost:pa/{SECRET}@cache:6379",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
    ],
)
def test_values_of_names_that_are_not_listed_are_hidden(text):
    assert SECRET not in REDACT(text)


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("connect: correct-horse", "horse"),
        ("connect: battery-staple refused", "staple"),
        ("got wJalrXUtnFEMI/K7MDENG", "EMI"),
        ("p%C3%A4ss%20w%C3%B6rd", "%A4ss"),
        ("b'p@ss\\'w\"rd'", 'w"rd'),
        ("key abc in use", "abc"),
        ("step of acme-rollout", "acme"),
        ("acme/secret-model-v7: 36 layers", "acme"),
        ("cache.acme.example does not answer", "acme"),
        ("model='/srv/acme/m', dtype=torch.float32", "acme"),
        ("found disk_path=/srv/acme/kv", "acme"),
        ("/opt/acme/bin/x: no such file", "acme"),
        ("'/srv/acme corp/kv'", "corp"),
        ("in ~/acme/kv or ../acme/kv", "acme"),
        ("/data/people/alice smith/kv", "smith"),
        ("/dev/shm/acme_kv", "acme"),
        ("file:///srv/acme", "acme"),
        ("C:\\Users\\acme\\x", "acme"),
        ("/cache/huggingface/hub/models--acme--m", "acme"),
        ("alice_1's", "alice"),
        ("uid=1000(bob)", "bob"),
        ("username: bob", "bob"),
        ("node17-ib0 and node18.corp.example", "corp"),
        ("host=db.acme port=5432", "acme"),
        ("db.acme:6379 timed out", "acme"),
        ("MAC 00:1a:2b:3c:4d:5e", "1a:2b"),
        ("GPU-8a1b2c3d-1111-2222-3333-444455556666", "1111"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIA"),
    ],
)
def test_names_of_people_companies_and_hosts_are_hidden(text, gone):
    assert gone not in REDACT(text)


@pytest.mark.parametrize(
    "facts",
    [
        {"PGPASS": SECRET},
        {"api_key": [SECRET]},
        {f"/home/{SECRET}/kv": 1},
        {"command": ["vllm", "--api-key", SECRET]},
        ({"deep": ["serve", f"--unheard-of={SECRET}"]},),
    ],
)
def test_keys_of_objects_and_items_of_lists_are_looked_at(facts):
    assert SECRET not in json.dumps(REDACT(facts))


@pytest.mark.parametrize(
    "text",
    [
        "ZE_AFFINITY_MASK=0,1 ONEAPI_DEVICE_SELECTOR=level_zero:gpu CCL_ATL_TRANSPORT=ofi",
        "LMCACHE_XPU_CPU_GIB=5, cpu_gib=5.0, cache=server, block_tokens=64: log level warning",
        "serve --port 8000 --tensor-parallel 2 --max-model-len 4096, or --no-offload",
        "{'dtype': 'float32', 'max_model_len': 4096, 'enforce_eager': True, 'seed': 0}",
        "config: dtype=torch.bfloat16, kv_cache_dtype=auto, device_config=xpu, pid=123",
        "RuntimeError: Native API failed: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
        'File "/usr/lib/python3.12/multiprocessing/process.py", line 314, in _bootstrap',
        "[core.py:1032] LMCacheConnectorV1, lmcache==1.2.3, KeyError: 'device'",
        "ImportError: libze_loader.so.1: cannot open shared object file; cannot find -lze_loader",
        "Docker: --device /dev/dri; Kubernetes: request gpu.intel.com/xe or i915",
        "driver 12.34.56789 at 0x00007fffabcd1234, level_zero:0",
    ],
)
def test_what_a_maintainer_needs_stays(text):
    assert REDACT(text) == text


def test_files_of_packages_keep_the_end_of_their_paths():
    line = 'File "/home/alice/venv/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 10'
    assert REDACT(line) == 'File "<path>/site-packages/vllm/v1/engine/core.py", line 10'
