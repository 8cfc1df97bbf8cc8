"""Hold one chat, let others push it out of the engine's own cache, and hold it again.

The second time its KV cache has to come from a tier outside the engine: the engine's counter of
external hits rises. Needs nothing but Python. Arguments: the engine's URL and the model's name;
the variable API_KEY where the engine asks for a key. It talks to one engine throughout, also
when the name stands for several.
"""

import http.client
import json
import os
import re
import socket
import sys
import time
import urllib.parse

WORDS = 750  # of about four tokens: several chunks of 256
HITS = "vllm:external_prefix_cache_hits_total"
SALT = f"{time.time_ns():x}"  # no earlier run has cached these prompts


class Engine:
    """One engine, by the first address of its name."""

    def __init__(self, url: str, model: str) -> None:
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname, f"no host in {url}"
        self.port = parts.port or 80
        self.address = socket.getaddrinfo(parts.hostname, self.port)[0][4][0]
        self.model = model
        self.headers = {"Content-Type": "application/json"}
        if key := os.environ.get("API_KEY"):
            self.headers["Authorization"] = f"Bearer {key}"
        models = json.loads(self.ask("GET", "/v1/models"))["data"]
        lengths = {entry["id"]: entry["max_model_len"] for entry in models}
        if model not in lengths:
            sys.exit(f"{url} serves {', '.join(lengths)}, not {model}")
        self.words = min(WORDS, lengths[model] // 10)

    def ask(self, method: str, path: str, body: object = None) -> str:
        """The answer's text; ends the program when it is not 200."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=600)
        try:
            connection.request(method, path, body and json.dumps(body), self.headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            sys.exit(f"{method} {path}: status {answer.status}, 200 expected: {text[:500]}")
        return text

    def chat(self, topic: str) -> int:
        """Say much about a topic; the number of tokens in that prompt."""
        text = f"{SALT} {topic}. " + " ".join(f"{topic}-{i}" for i in range(self.words))
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4,
            "temperature": 0,
        }
        answer = json.loads(self.ask("POST", "/v1/chat/completions", body))
        return answer["usage"]["prompt_tokens"]

    def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        lines = self.ask("GET", "/metrics").splitlines()
        samples = [line for line in lines if re.match(re.escape(name) + r"[{ ]", line)]
        if not samples:
            sys.exit(f"no metric {name} at the engine: is offload switched on?")
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def cache_tokens(self) -> int:
        """How many tokens the engine's own cache holds."""
        text = self.ask("GET", "/metrics")
        config = r'vllm:cache_config_info\{(?:[^}]*,)?%s="(\d+)"'
        blocks = re.search(config % "num_gpu_blocks", text)
        size = re.search(config % "block_size", text)
        if not (blocks and size):
            sys.exit("no vllm:cache_config_info with num_gpu_blocks and block_size")
        return int(blocks[1]) * int(size[1])


def main(url: str, model: str) -> None:
    """Run the check; ends with a message and code 1 when a chat does not come back."""
    engine = Engine(url, model)
    first = engine.chat("tides")
    capacity = engine.cache_tokens()
    print(f"a chat of {first} tokens; the engine's own cache holds {capacity}", flush=True)
    spoken, number = 0, 0
    while spoken < capacity:
        number += 1
        spoken += engine.chat(f"filler{number}")
    before = engine.metric(HITS)
    again = engine.chat("tides")
    hits = engine.metric(HITS) - before
    print(f"after {spoken} other tokens: {hits:.0f} of {again} tokens came from a tier", flush=True)
    if hits < 256:
        sys.exit(
            "no chunk came back: the tiers are smaller than the engine's own cache (raise "
            "settings.cpu_gib or disk_gib), or offload is off; see the engine's log"
        )


if __name__ == "__main__":
    main(*sys.argv[1:3])
