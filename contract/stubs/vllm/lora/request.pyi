from typing import Any

class LoRARequest:
    lora_path: Any
    lora_name: Any
    adapter_id: Any
    name: Any
