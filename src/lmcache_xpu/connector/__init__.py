"""vLLM's KV connector: its scheduler half finds, chooses and describes; its worker half copies."""
