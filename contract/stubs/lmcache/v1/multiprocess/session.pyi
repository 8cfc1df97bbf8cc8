from typing import Any

class Session:
    lookup_ipc_key: Any

class SessionManager:
    def get(self, request_id): ...
