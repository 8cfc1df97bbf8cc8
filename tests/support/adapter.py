"""LMCache's adapter for vLLM, its metadata, and vLLM's requests, as far as they are used here."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

from lmcache_xpu.cache_engine.lookup_client import LookupClient

from lmcache_xpu.versions.lmcache import LMCacheLookupClient


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
        self.load_specs = {}
        self._requests_priority = {}
        self.lookup_client = Client(self)

    @property
    def forgotten(self):
        return self.lookup_client.forgotten


class Asked(LMCacheLookupClient):
    """LMCache's look-up client, which finds nothing."""

    def __init__(self, adapter):
        self.adapter = adapter
        self.forgotten = []

    def lookup(self, token_ids, lookup_id, request_configs=None):
        self.adapter.asked.append(list(token_ids))
        self.adapter.load_specs[lookup_id] = object()
        return 0

    def clear_lookup_status(self, lookup_id):
        self.forgotten.append(lookup_id)


class Client(LookupClient, Asked):
    """Ours around it."""

    def __init__(self, adapter):
        Asked.__init__(self, adapter)
        self.transport = SimpleNamespace(far_tokens={})
        self.token_database = SimpleNamespace(remember=lambda request, salt: nullcontext())


class Metadata:
    def __init__(self, *requests):
        self.requests = list(requests)

    def add_request(self, meta):
        self.requests.append(meta)


class UnaskedClient:
    """A look-up client that nobody asks.

    Args:
        far: tokens of each hit that are not in memory.
    """

    def __init__(self, far=0):
        self.far = far

    def far_tokens(self, lookup_id):
        return self.far

    def ask_near(self, engine):
        """Of which process the worker is makes no difference."""
