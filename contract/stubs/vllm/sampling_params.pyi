from typing import Any

class RequestOutputKind:
    DELTA: Any
