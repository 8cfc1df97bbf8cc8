"""LMCache's cache engine: which chunks are stored and loaded, and under which keys."""
