"""Recorded traffic, replayed: `--tags trace`."""
