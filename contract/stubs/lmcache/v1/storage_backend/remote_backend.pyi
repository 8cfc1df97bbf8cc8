from typing import Any

class RemoteBackend:
    connection: Any
