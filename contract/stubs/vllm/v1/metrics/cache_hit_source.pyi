from enum import Enum
from typing import Any

class CacheHitSource(Enum):
    HOST: Any
    DISK: Any
