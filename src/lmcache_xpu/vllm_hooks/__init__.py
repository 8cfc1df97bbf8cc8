"""What has to be told to vLLM, and what vLLM tells no connector."""
