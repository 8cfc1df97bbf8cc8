"""What a model and its settings say of the KV cache."""
