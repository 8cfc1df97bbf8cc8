"""Names of torchvision, for models that are given text alone.

vLLM's Qwen 3.5 imports its processor of images whatever it is given. PyPI's torchvision needs
CUDA's PyTorch, and `.venv` has the one for CPU. A call of what stands here processes no image.
"""

from __future__ import annotations

import sys
from unittest.mock import NonCallableMagicMock

__version__ = "0.0"
for _name in ("io", "transforms", "transforms.functional", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"] = NonCallableMagicMock(name=_name)
sys.modules[f"{__name__}.transforms.v2"] = NonCallableMagicMock(
    functional=sys.modules[f"{__name__}.transforms.v2.functional"]
)
