"""The demo, and its parts: a small model, an engine in a process, a client that measures."""
