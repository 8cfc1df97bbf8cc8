"""The texts that images and stack are made from."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
EXAMPLE = (ROOT / ".env.example").read_text()
