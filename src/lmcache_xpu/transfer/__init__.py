"""Bytes between vLLM's paged KV cache and host memory; knows torch and Triton only."""
