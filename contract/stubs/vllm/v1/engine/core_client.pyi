from typing import Any

class InprocClient:
    engine_core: Any
