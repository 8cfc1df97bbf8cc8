"""How many users fit within the thresholds: `make capacity`."""
