from typing import Any

class Platform:
    device_control_env_var: str
    device_type: Any
