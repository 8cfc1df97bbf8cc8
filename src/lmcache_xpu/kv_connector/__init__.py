"""What vLLM calls: its KV connector, in the scheduler's process and in the workers'."""
