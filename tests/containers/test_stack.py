"""`make up-cpu` with monitoring: a real engine, asked over HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml
from docker_host import ROOT
from stack import ask, conversation, crowd_out, words

from lmcache_xpu.errors import EngineError

ENGINE = "engine-cpu"
# Panels that need a program that no machine without an Intel GPU has: Intel's exporter.
NEEDS_A_GPU = {"GPU utilisation", "GPU memory", "GPU power", "GPU temperature"}


KEY = "key-of-these-tests"


@pytest.fixture(scope="module")
def stack(make_stack):
    """Brought up as `make up-cpu` does it, by settings that name a GPU as .env.example does."""
    stack = make_stack(LMCACHE_XPU_API_KEY=KEY, COMPOSE_PROFILES="xpu,monitoring,loadtest")
    stack.up("cpu")
    return stack


@pytest.fixture(scope="module")
def story(stack):
    """One conversation: its second question, answered with what the engine had itself."""
    with stack.client() as client:
        messages = conversation(1)
        first = ask(client, messages)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        answer = ask(client, messages)
    assert answer.prompt_tokens > 1024
    return messages, answer


def external_hits(stack, messages):
    with stack.client() as client:
        before = client.counts()
        answer = ask(client, messages)
        return answer, (client.counts() - before).external_hits


def test_the_engine_that_was_asked_for_runs_and_no_other(stack):
    services = stack.compose("ps", "--services").stdout.split()
    assert sorted(services) == sorted([ENGINE, "prometheus", "grafana", "loadtest"])


def test_the_engine_answers_and_says_which_model(stack, story):
    with stack.client() as client:
        assert client.model == "exact"
    assert story[1].completion_tokens == 24


def test_it_wants_its_key_and_shows_it_to_nobody(stack, story):
    for headers in ({}, {"Authorization": "Bearer another"}):
        for path in ("/v1/models", "/invocations", "/tokenize", "/version"):
            answer = httpx.get(stack.url() + path, headers=headers, trust_env=False)
            assert answer.status_code == 401
    assert KEY not in stack.compose("top", ENGINE).stdout
    assert KEY not in stack.logs(ENGINE)


def test_it_has_no_rights_that_it_does_not_need(stack):
    container = stack.inspect(ENGINE)
    rights = container["HostConfig"]
    assert container["Config"]["User"] == "10001:10001"
    assert rights["CapDrop"] == ["ALL"]
    assert rights["ReadonlyRootfs"] is True
    assert rights["SecurityOpt"] == ["no-new-privileges:true"]
    assert not rights["Privileged"]
    done = stack.compose("exec", ENGINE, "touch", "/opt/file", check=False)
    assert "Read-only file system" in done.stdout


def test_only_what_was_asked_for_is_published_and_only_on_loopback(stack):
    bound = [
        binding["HostIp"]
        for service in (ENGINE, "prometheus", "grafana", "loadtest")
        for bindings in stack.inspect(service)["HostConfig"]["PortBindings"].values()
        for binding in bindings
    ]
    assert bound == ["127.0.0.1"] * 4


def test_what_the_engine_forgot_the_cpu_tier_gives_back(stack, story):
    messages, expected = story
    with stack.client() as client:
        crowd_out(client, first_seed=10)
    answer, hits = external_hits(stack, messages)
    assert hits >= 1024
    assert answer.token_ids == expected.token_ids
    assert sum(stack.samples('lmcache_xpu_bytes_total{direction="load",tier="cpu"').values()) > 0


def test_metrics_of_vllm_and_of_this_package_are_in_one_place(stack, story):
    assert any(stack.samples("vllm:prompt_tokens_total").values())
    assert any(stack.samples("lmcache_xpu_bytes_total").values())
    assert any(stack.samples("lmcache_xpu_cpu_used_bytes").values())


def test_grafana_gets_its_files_and_they_fit_together(stack):
    """No Grafana here: what it would read, read from where it would."""
    read = {
        name: stack.compose("exec", "grafana", "cat", name).stdout
        for name in (
            "/etc/grafana/provisioning/datasources/prometheus.yaml",
            "/etc/grafana/provisioning/dashboards/files.yaml",
            "/etc/dashboards/lmcache-xpu.json",
        )
    }
    source, provider, dashboard = read.values()
    [source] = yaml.safe_load(source)["datasources"]
    [provider] = yaml.safe_load(provider)["providers"]
    home = stack.inspect("grafana")["Config"]["Env"]
    folder = provider["options"]["path"]
    assert f"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH={folder}/lmcache-xpu.json" in home
    assert source["type"] == json.loads(dashboard)["templating"]["list"][0]["query"]
    port = source["url"].rpartition(":")[2]
    assert f"{port}/tcp" in stack.inspect("prometheus")["HostConfig"]["PortBindings"]


@pytest.fixture(scope="module")
def load(stack, story):
    """Conversations while Prometheus looks every 5 s; some of them asked again."""
    end = time.monotonic() + 25

    def user(number: int) -> None:
        with stack.client() as client:
            seed = 100 * number
            while time.monotonic() < end:
                messages = conversation(seed + int(time.monotonic()) % 4)
                first = ask(client, messages)
                messages += [
                    {"role": "assistant", "content": first.text},
                    {"role": "user", "content": "Why?"},
                ]
                ask(client, messages)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(user, range(1, 4)))


def panels():
    dashboard = json.loads((ROOT / "monitoring/dashboards/lmcache-xpu.json").read_text())
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def test_prometheus_scrapes_the_engine(stack, load):
    up = {r["metric"]["job"]: r["value"][1] for r in stack.query("up")}
    assert up["lmcache-xpu"] == "1"


def test_every_query_of_every_panel_has_data(stack, load):
    empty = []
    for title, expression in panels():
        if title in NEEDS_A_GPU or "lmcache-server" in expression or "lmcache_mp_" in expression:
            continue  # test_cache_server.py has a server
        query = expression.replace("$__rate_interval", "1m")
        query = re.sub(r"\$(namespace|model|instance)\b", ".*", query)
        values = [float(result["value"][1]) for result in stack.query(query)]
        if not values or all(value != value for value in values):
            empty.append((title, expression))
    assert empty == []


def test_the_panels_of_the_gpu_are_all_that_was_left_out(stack, load):
    named = {title for title, expression in panels() if "hw_" in expression}
    assert named == NEEDS_A_GPU


# Of a router, a GPU or a server, which this stack does not have.
ABSENT = ("RouterDown", "RequestsFail", "GPUFailed", "CacheServerDown")


def test_every_alert_looks_at_something_that_is_there(stack, load):
    rules = yaml.safe_load((ROOT / "monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        if rule["alert"] in ABSENT:
            continue
        expression = re.sub(r"^absent\((.*)\)$", r"\1 > 0", rule["expr"])
        without_thresholds = re.sub(r"\s[<>]=? [\d.]+", "", expression)
        assert without_thresholds != expression, rule["alert"]
        assert stack.query(without_thresholds.replace("1h", "1m")), rule["alert"]
    loaded = httpx.get(f"{stack.url('PROMETHEUS_PORT')}/api/v1/rules", trust_env=False).json()[
        "data"
    ]["groups"][0]["rules"]
    assert {r["name"] for r in loaded} == {r["alert"] for r in rules}
    assert all(r["health"] in ("ok", "unknown") for r in loaded)


def test_hits_show_on_the_dashboard(stack, load):
    """Not only that there is a number: the two hit rates and the tiers' bytes are above zero."""
    for expression in (
        "rate(vllm:prefix_cache_hits_total[1m])",
        "rate(vllm:external_prefix_cache_hits_total[1m])",
        'rate(lmcache_xpu_bytes_total{tier="cpu",direction="load"}[1m])',
        'rate(lmcache_xpu_bytes_total{tier="disk",direction="store"}[1m])',
    ):
        assert any(float(r["value"][1]) > 0 for r in stack.query(expression)), expression


def test_a_load_test_from_its_web_page(stack, story):
    """Started by what the page sends; it knows the server, its key, and where reports go."""
    page = stack.url("LOADTEST_PORT")
    form = {
        **{"user_count": 2, "spawn_rate": 2, "host": f"http://{ENGINE}:8000", "qps": 2},
        **{"num_rounds": 3, "shared_system_prompt": 50, "user_history_prompt": 200},
        **{"answer_len": 8, "duration_s": 12},
    }
    assert httpx.post(f"{page}/swarm", data=form, trust_env=False).json()["success"]
    end = time.monotonic() + 60
    while "report.html" not in (written := files_of(stack)):
        assert time.monotonic() < end, stack.logs("loadtest")[-3000:]
        time.sleep(1)
    rows = stack.compose("exec", "loadtest", "sh", "-c", "cat /reports/rows.jsonl").stdout
    outcomes = [json.loads(row)["outcome"] for row in rows.splitlines()]
    assert {"summary.json", "ttft-cdf.png"} <= written
    assert outcomes.count("ok") > 10
    assert set(outcomes) <= {"ok", "dropped"}


def files_of(stack):
    return set(stack.compose("exec", "loadtest", "ls", "/reports").stdout.split())


def test_a_restart_finds_the_disk_tier_and_the_same_answer(stack, story):
    messages, expected = story
    stack.compose("restart", ENGINE)
    stack.wait_healthy(ENGINE)
    before = stack.samples("vllm:prompt_tokens_total")
    assert sum(before.values()) == 0, "metrics of the engine before it"
    answer, hits = external_hits(stack, messages)
    assert hits >= 1024
    assert answer.token_ids == expected.token_ids
    assert sum(stack.samples('lmcache_xpu_bytes_total{direction="load",tier="disk"').values()) > 0


def test_stopping_lets_answers_end(stack, story):
    """The last test of this stack: its engine is gone after it."""
    answers, began = [], threading.Event()

    def long_answer() -> None:
        with stack.client() as client:
            assert client.model
            began.set()
            answers.append(client.chat([{"role": "user", "content": words(7, 20)}], max_tokens=600))

    asking = threading.Thread(target=long_answer)
    asking.start()
    began.wait(30)
    time.sleep(1)
    assert not answers, "the answer was there too soon to prove anything"
    begin = time.monotonic()
    stack.compose("stop", ENGINE)
    stopped_s = time.monotonic() - begin
    asking.join(60)
    assert [answer.completion_tokens for answer in answers] == [600]
    state = stack.inspect(ENGINE)["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False), stack.logs(ENGINE)[-3000:]
    assert stopped_s < 60
    with stack.client() as client, pytest.raises(EngineError):
        ask(client, story[0])
