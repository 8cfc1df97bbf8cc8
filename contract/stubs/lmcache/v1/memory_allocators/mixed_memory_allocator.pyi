from typing import Any

class MixedMemoryAllocator:
    buffer: Any
