from typing import Any

class KVConnectorOutput:
    kv_connector_worker_meta: Any
    finished_recving: Any
