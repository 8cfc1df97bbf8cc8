"""Without the key nothing of an engine is reached but probes and metrics."""

from __future__ import annotations

import importlib

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from lmcache_xpu.launch.engine_arguments import vllm_arguments
from lmcache_xpu.launch.settings import Settings

KEY = 's3"cr et'
PATHS = ("/health", "/ping", "/metrics", "/metrics/", "/v1/models", "/invocations", "/tokenize")
OPEN = PATHS[:4]


async def answer(_):
    return PlainTextResponse("answered")


async def talk(socket):
    await socket.accept()
    await socket.close()


@pytest.fixture
def client(monkeypatch):
    """An application with the middleware that `serve` names, added as vLLM adds it."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    arguments = vllm_arguments(Settings.load({"model": "m", "api_key": KEY}))
    module, _, name = arguments[arguments.index("--middleware") + 1].rpartition(".")
    routes = [Route(path, answer, methods=["GET", "OPTIONS"]) for path in PATHS]
    app = Starlette(routes=[*routes, WebSocketRoute("/v1/realtime", talk)])
    app.add_middleware(getattr(importlib.import_module(module), name))
    return TestClient(app)


@pytest.mark.parametrize("path", [*PATHS, "//metrics", "/metrics/../v1/models", "/none"])
@pytest.mark.parametrize("sent", [None, "Bearer guessed", KEY, f"Basic {KEY}", "Bearer", ""])
def test_without_the_key(client, path, sent):
    headers = {} if sent is None else {"Authorization": sent}
    done = client.get(path, headers=headers)
    if path in OPEN:
        assert done.text == "answered"
    else:
        assert (done.status_code, done.json()) == (401, {"error": "Unauthorized"})


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_key(client, scheme):
    for path in PATHS:
        done = client.get(path, headers={"Authorization": f"{scheme} {KEY}"})
        assert (done.status_code, done.text) == (200, "answered")


def test_a_browser_may_ask_whether_it_may_send_the_key(client):
    assert client.options("/v1/models").status_code == 200


def test_a_socket_asks_for_the_key_too(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    headers = {"Authorization": f"Bearer {KEY}"}
    with client.websocket_connect("/v1/realtime", headers=headers):
        pass


def test_without_a_key_vllm_is_as_it_was():
    assert "--middleware" not in vllm_arguments(Settings.load({"model": "m"}))
