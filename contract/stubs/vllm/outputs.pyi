from typing import Any

class RequestOutput:
    finished: Any
