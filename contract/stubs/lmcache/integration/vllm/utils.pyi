from typing import Any

ENGINE_NAME: Any

def calculate_draft_layers(vllm_config): ...
def lmcache_get_or_create_config(): ...

_config_instance: Any
