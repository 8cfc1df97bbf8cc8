from typing import Any

class FrontendArgs:
    # `vllm serve` has an option for each.
    enable_prompt_tokens_details: Any
    host: Any
    middleware: Any
    port: Any
