from typing import Any

device_ops: Any

torch_device_type: Any
