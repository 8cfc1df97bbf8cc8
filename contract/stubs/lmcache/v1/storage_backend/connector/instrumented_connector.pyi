from typing import Any

class InstrumentedRemoteConnector:
    _connector: Any
