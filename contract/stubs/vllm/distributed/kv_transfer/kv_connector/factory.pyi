from typing import Any

class KVConnectorFactory:
    _registry: Any
    @classmethod
    def register_connector(cls, name, module_path, class_name): ...
