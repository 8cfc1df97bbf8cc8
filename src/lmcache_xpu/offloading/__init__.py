"""The disk tier behind vLLM's own offloading, by vLLM's `module_path`; nothing is patched."""
