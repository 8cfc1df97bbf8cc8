"""Who has no API key reaches probes and metrics, and nothing else of an engine.

vLLM asks for the key under `/v1` and a few other beginnings of paths. Without one it answers the
others, `/invocations` among them, to which whole chats can be posted. `serve` hands it this
middleware by `--middleware` where there is a key.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OPEN = ("/health", "/ping", "/metrics", "/metrics/")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers 401 to requests without the key in `VLLM_API_KEY`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or self._passes(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = json.dumps({"error": "Unauthorized"}).encode()
            await send({"type": "http.response.body", "body": body})

    def _passes(self, scope: Message) -> bool:
        # A browser sends no key with the question whether it may send one.
        if scope.get("method") == "OPTIONS":
            return True
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN:
            return True
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)
