from typing import Any

class EngineCore:
    scheduler: Any
