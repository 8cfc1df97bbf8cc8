from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

class LMCacheConnectorV1(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config): ...
