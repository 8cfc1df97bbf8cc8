from enum import Enum
from typing import Any

class L1Error(Enum):
    SUCCESS: Any
    OUT_OF_MEMORY: Any
