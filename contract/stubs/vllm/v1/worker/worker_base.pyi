from typing import Any

class WorkerWrapperBase:
    def __getattr__(self, attr): ...
    worker: Any

class WorkerBase:
    model_runner: Any
    parallel_config: Any
