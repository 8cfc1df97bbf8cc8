from typing import Any

class ServerModuleCallRequest:
    def __init__(self, method, payload): ...

class ServerModuleCallResponse:
    success: Any
    payload: Any
