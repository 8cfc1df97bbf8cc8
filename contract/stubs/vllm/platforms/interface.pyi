from typing import Any

class Platform:
    device_type: Any
