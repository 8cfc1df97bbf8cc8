"""The connector to LMCache's server: LMCache's own by subclass, with this package's copies."""
