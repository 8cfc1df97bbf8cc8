from typing import Any

class MultiConnector:
    _connectors: Any
