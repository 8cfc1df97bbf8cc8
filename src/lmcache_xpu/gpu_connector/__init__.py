"""LMCache's GPU connectors: chunks of a request to and from vLLM's paged KV cache."""
