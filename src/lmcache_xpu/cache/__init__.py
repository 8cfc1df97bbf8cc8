"""The cache that is asked: LMCache's storage manager in this process, or LMCache's server."""
