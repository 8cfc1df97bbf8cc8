"""The disk tier's tests have LMCache's storage small enough for this, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tiers"))
