"""Attacks, and mishaps, that have to stay without effect."""
