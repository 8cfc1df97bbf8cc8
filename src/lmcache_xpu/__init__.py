"""KV-cache offload for vLLM on Intel GPUs, plugged into a stock LMCache."""

__version__ = "0.1.0"
