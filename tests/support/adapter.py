"""LMCache's adapter for vLLM, its metadata, and vLLM's requests, as far as they are used here."""

from __future__ import annotations

from types import SimpleNamespace


def request(request_id="r", cache_salt=None, lora=None, prompt_embeds=None, computed=False):
    return SimpleNamespace(
        request_id=request_id,
        cache_salt=cache_salt,
        lora_request=lora,
        prompt_embeds=prompt_embeds,
        skip_reading_prefix_cache=computed,
    )


class Adapter:
    """LMCache's connector, as far as it is used here."""

    def __init__(self):
        self.asked = []
        self.forgotten = []
        self.load_specs = {}
        self._requests_priority = {}
        self.lookup_client = SimpleNamespace(
            lookup=self.lookup, clear_lookup_status=self.forgotten.append
        )

    def lookup(self, token_ids, lookup_id, request_configs=None):
        self.asked.append(list(token_ids))
        self.load_specs[lookup_id] = object()
        return 0


class Metadata:
    def __init__(self, *requests):
        self.requests = list(requests)

    def add_request(self, meta):
        self.requests.append(meta)
