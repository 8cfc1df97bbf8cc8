"""A vLLM engine in this process, whose KV cache can be emptied and compared.

`main` is the program of a process that `runner.Child` starts.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from lmcache_xpu.launch.cache_server import PAGES, PROGRAM, server_command, start_server
from lmcache_xpu.launch.engine_arguments import engine_variables, vllm_arguments
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.model.kv_cache_groups import block_tokens, is_recurrent

Hits = Literal["tier", "own cache", "none"]
# Digests of a request's blocks, by KV cache group and place in the prompt: of each tensor of each
# layer that a rank has, one rank after another.
Blocks = dict[tuple[int, int], list[int]]

SERVER_URL = "tcp://LMCACHE"  # stands for that of the server that an engine's process starts
STORE_S = 0.5  # stores go on after an answer
STORED_S = 10.0  # limit of the stores' time


class Engine:
    """A vLLM engine of some settings, in this process."""

    def __init__(self, settings: Settings, hits: Hits = "tier") -> None:
        from vllm import LLM, SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args, _ = parser.parse_known_args(["--model", *vllm_arguments(settings)])  # else: server's
        self.hits = hits
        self._llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
        self._engine: Any = self._llm.llm_engine
        if settings.device != "cpu":
            # As vLLM has it from 0.32 on: threads that wait for torch's next parallel operation
            # take the CPU from the engine's thread.
            torch.set_num_threads(1)
        self._one_token = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self.numbers = random.Random(1)  # of prompts, the same in each process
        self._names = map(str, itertools.count())
        self._tokens = range(3, min(8000, self._engine.model_config.get_vocab_size()))

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self._engine.engine_core.engine_core.scheduler

    def prompt(self, length: int) -> list[int]:
        """Make up a prompt of tokens that was never used before."""
        return self.numbers.choices(self._tokens, k=length)

    def seconds(self, *prompts: list[int]) -> float:
        """Time these prompts, at once, until all have their first token."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        self._llm.generate(requests, self._one_token, use_tqdm=False)
        return time.perf_counter() - begin

    def add(self, prompt: list[int], tokens: int) -> str:
        """Add a request whose answer has so many tokens; return its name."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name := next(self._names), {"prompt_token_ids": prompt}, how)
        return name

    def step(self) -> list[Any]:
        """Compute one step of all requests that were added; return vLLM's outputs, new tokens."""
        return list(self._engine.step())

    def abort(self, name: str) -> None:
        """End a request that was added; it has no answer."""
        self._engine.abort_request([name])

    def request(self, name: str) -> Any:
        """Return vLLM's request of a name, which vLLM may add to; None once it has ended."""
        requests = self.scheduler.requests
        return next((r for key, r in requests.items() if key.partition("-")[0] == name), None)

    def forget(self) -> None:
        """Empty the engine's own prefix cache; waits for stores that keep blocks of it."""
        deadline = time.perf_counter() + STORED_S
        while not self._llm.reset_prefix_cache():
            if time.perf_counter() > deadline:
                raise RuntimeError("the engine keeps its prefix cache: blocks are still in use")
            time.sleep(0.01)
            self.step()  # vLLM learns of ended stores in a step

    def zero(self) -> None:
        """Zero the engine's KV cache."""
        self._llm.collective_rpc(_zero)

    def written(self, prompt: list[int]) -> Blocks:
        """Compute a prompt; return digests of its blocks, but for the one of its last token.

        That one a hit computes anew, which may be rounded otherwise.
        """
        name, blocks = self.add(prompt, 2), Blocks()
        while self._engine.has_unfinished_requests():
            outputs = self.step()
            if outputs and not outputs[0].finished and not blocks:
                blocks = self.blocks(name, len(prompt) - 1)
        return blocks

    def blocks(
        self,
        name: str,
        tokens: int,
        *,
        seen: Container[tuple[int, int]] = (),
        states: Container[int] = (),
    ) -> Blocks:
        """Return digests of the blocks that a request's first tokens fill, in all groups.

        Null blocks are left out, and those at the places that are `seen`. Of the groups `states`
        the block that the last token is in counts as filled.
        """
        config = self.scheduler.kv_cache_config
        ids = self.scheduler.kv_cache_manager.get_block_ids(self.request(name).request_id)
        wanted = []
        for number, size in enumerate(block_tokens(config)):
            last = -(-tokens // size) if number in states else size and tokens // size
            whole = ids[number][:last]
            held = {at: b for at, b in enumerate(whole) if b and (number, at) not in seen}
            if held:
                layers = config.kv_cache_groups[number].layer_names
                wanted.append((number, list(held), layers, list(held.values())))
        args = ([each[2:] for each in wanted], config.num_blocks)
        ranks = self._llm.collective_rpc(_digests, args=args) if wanted else []
        blocks: Blocks = {}
        for at, (number, places, *_) in enumerate(wanted):
            columns = torch.cat([rank[at] for rank in ranks]).T.tolist()
            blocks |= {(number, place): row for place, row in zip(places, columns, strict=True)}
        return blocks

    def states(self) -> set[int]:
        """Return the numbers of the groups whose blocks hold states."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return {n for n, group in enumerate(groups) if is_recurrent(group.kv_cache_spec)}

    def layers(self) -> list[list[str]]:
        """Return, by KV cache group, the layers that the digests of `blocks` are of, in order."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        names = [list(group.layer_names) for group in groups]
        ranks = self._llm.collective_rpc(_layers, args=(names,))
        return [[*itertools.chain(*of_group)] for of_group in zip(*ranks, strict=True)]


def _zero(worker: Any) -> None:
    from lmcache_xpu.vllm_hooks.worker_hooks import worker_half

    if (half := worker_half(worker.vllm_config)) is not None:
        half.drain()  # stores of this package keep no blocks
    for cache in worker.model_runner.kv_caches:
        for tensor in _tensors(cache):
            tensor.zero_()
    synchronize()


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Return a layer's tensors: a state has several."""
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _caches(worker: Any, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of those layers that this rank has, with the layer's name."""
    layers = worker.model_runner.compilation_config.static_forward_context
    for name in names:
        if name in layers:
            yield from ((name, tensor) for tensor in _tensors(layers[name].kv_cache))


def _layers(worker: Any, groups: Sequence[list[str]]) -> list[list[str]]:
    return [[name for name, _ in _caches(worker, names)] for names in groups]


def _digests(
    worker: Any, groups: Sequence[tuple[list[str], list[int]]], count: int
) -> list[torch.Tensor]:
    """Return, by group, `[tensors, blocks]` digests of the layers that this rank has."""
    synchronize()
    return [
        torch.stack([_rows(tensor, ids, count) for _, tensor in _caches(worker, names)])
        for names, ids in groups
    ]


def _rows(cache: torch.Tensor, ids: Sequence[int], count: int) -> torch.Tensor:
    """Return a number per block, of every byte and its place; it may be several of a kernel's."""
    dimension = next(d for d, size in enumerate(cache.shape) if size and size % count == 0)
    moved = cache.movedim(dimension, 0)
    blocks = moved.reshape(count, -1, *moved.shape[1:])
    words = blocks[torch.tensor(ids, device=cache.device)].contiguous()
    words = words.view(len(ids), -1).view(torch.int16).long()
    places = torch.arange(words.shape[1], device=cache.device)
    weights = (places * 2654435761 + 40503) | 1
    digests: torch.Tensor = (words * weights).sum(dim=1).cpu()
    return digests


def synchronize(devices: int | None = None) -> None:
    """Wait until the first so many devices, or the current one, are idle; a CPU always is."""
    if torch.accelerator.is_available():
        for device in [None] if devices is None else range(devices):
            torch.accelerator.synchronize(device)


def main() -> None:
    """Start an engine, and do the jobs that the parent process asks for until it is gone.

    Arguments of the process: values for `Settings.load` as JSON, the place of hits, and the file
    descriptor of a connection, on which each job gives an answer.
    """
    status = 1
    try:
        _do_jobs(Settings.load(json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # LMCache's threads would keep the process, a failed one too


def _do_jobs(settings: Settings, hits: Any, descriptor: int) -> None:
    connection: Connection[Any, Callable[[Engine], Any]] = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    # Without offload a server is for LMCache's own connector to it, whose arguments name one.
    named = any(SERVER_URL in word for word in settings.extra_args)
    if settings.is_server if settings.offload else named:
        command = server_command if settings.offload else lmcache_server
        settings = at_server(settings, start_server(settings, command))  # ends with this process
    os.environ.update(
        engine_variables(settings),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # `Engine` needs the scheduler in this process
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    engine = Engine(settings, hits)
    with suppress(EOFError):
        while True:
            job = connection.recv()
            time.sleep(STORE_S)  # the engine before this one may still store
            connection.send(job(engine))


def at_server(settings: Settings, url: str) -> Settings:
    """Return the settings of an engine at a server: with our connector, or with LMCache's."""
    words = tuple(word.replace(SERVER_URL, url) for word in settings.extra_args)
    return settings.model_copy(update={"server_url": url, "extra_args": words})


def lmcache_server(settings: Settings, socket: Path) -> list[str]:
    """Return the command line of a server with LMCache's own options; see `server_command`.

    On CUDA the server copies. Elsewhere workers do, through shared memory: the pickled tensors that
    LMCache would take instead are refused.
    """
    options = f"--l1-size-gb {settings.cpu_gib * settings.devices} --eviction-policy LRU"
    if settings.device != "cuda":
        options += f" --shm-name {socket.parent.name} --no-l1-use-lazy"
    words = f"{options} --supported-transfer-mode auto".split()
    return [*PROGRAM, str(socket), PAGES, *words]
