"""The command: run the clients that are here, and say whether they agree.

Each client puts a small load of its own kind on the same server. What it says is compared with the
server's own histogram of times to first token over the same requests. So clients are comparable,
though their loads differ and the machine drifts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from loadtests.other_clients.clients import Client, Load, clients
from loadtests.other_clients.counts import Counts, Watch

__all__ = ["Agreement", "app", "measure"]

LIMIT = 0.05
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a client said, and what the server did."""

    name: str
    requests: int
    mean_s: float
    server: Counts

    @property
    def difference(self) -> float | None:
        """By how much more the client saw than the server did, as a share of that."""
        mean_s = self.server.mean_s
        return None if not mean_s else self.mean_s / mean_s - 1

    @property
    def holds(self) -> bool:
        """Whether they agree within 5 %."""
        return self.difference is not None and abs(self.difference) <= LIMIT


def measure(client: Client, load: Load, directory: Path) -> Agreement | str:
    """Run a client; a sentence when it could not be."""
    if client.missing:
        return f"not here ({client.missing})"
    directory.mkdir(parents=True)
    log = directory / "log"
    env = os.environ | {"NO_PROXY": "*", "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", "x")}
    with Watch(load.url, warm_up=client.warm_up) as watch, log.open("w") as out:
        command = client.command(directory)
        subprocess.run(command, cwd=client.folder, stdout=out, stderr=out, env=env, check=False)
        time.sleep(1)  # what the end of a run cut off is counted by then
        counted = watch.counted()
    try:
        requests, mean_s = client.read(directory)
    except (OSError, ValueError, KeyError) as error:
        return f"failed ({error!r}); {log} has the cause"
    return Agreement(client.name, requests, mean_s, counted)


def show(results: dict[str, Agreement | str]) -> None:
    """Print a table."""
    table = Table(title="Mean time to first token, by each client and by the server meanwhile")
    for column in ("client", "n", "client, ms", "server, ms", "difference", "prompt tokens"):
        table.add_column(column, justify="left" if column == "client" else "right")
    table.add_column("device hits", justify="right")
    table.add_column("LMCache hits", justify="right")
    for name, result in results.items():
        if isinstance(result, str):
            table.add_row(name, result)
            continue
        server, difference = result.server, result.difference
        table.add_row(
            name,
            str(result.requests),
            f"{result.mean_s * 1e3:,.0f}",
            "" if server.mean_s is None else f"{server.mean_s * 1e3:,.0f}",
            "" if difference is None else f"{difference:+.1%}",
            *(f"{count:,.0f}" for count in (server.prompt, server.device, server.external)),
        )
    Console(width=110).print(table)


@app.command()
def main(
    host: Annotated[str, typer.Option(help="Server, without /v1")],
    multi_round_qa: Annotated[Path | None, typer.Option(help="LMCache's multi-round-qa.py")] = None,
    aiperf: Annotated[str | None, typer.Option(help="AIPerf's command")] = shutil.which("aiperf"),
    tokenizer: Annotated[str, typer.Option(help="Default: what the server was started with")] = "",
    users: int = 6,
    rounds: int = 4,
    qps: float = 0.5,
    shared: int = 100,
    history: int = 900,
    answer: int = 16,
    seconds: Annotated[int, typer.Option(help="Of multi-round QA, ours and LMCache's")] = 60,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write it here")] = None,
) -> None:
    """Run those clients that are here, one after another, and say whether they agree."""
    host = host.rstrip("/")
    try:
        page = httpx.get(f"{host}/v1/models", timeout=10, trust_env=False)
        [model, *_] = page.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        print(f"other-clients: found no models at {host}/v1/models ({error}).", file=sys.stderr)
        raise typer.Exit(2) from None
    load = Load(
        url=host,
        model=model["id"],
        tokenizer=tokenizer or model.get("root") or model["id"],
        users=users,
        rounds=rounds,
        qps=qps,
        shared=shared,
        history=history,
        answer=answer,
        seconds=seconds,
    )
    results: dict[str, Agreement | str] = {}
    directory = Path(tempfile.mkdtemp(prefix="other-clients-"))
    for number, client in enumerate(clients(load, multi_round_qa=multi_round_qa, aiperf=aiperf)):
        results[client.name] = measure(client, load, directory / str(number))
        print(f"{client.name}: done", file=sys.stderr)
    show(results)
    measured = [result for result in results.values() if isinstance(result, Agreement)]
    if json_file is not None:
        figures = [
            {
                "client": result.name,
                "requests": result.requests,
                "client_mean_s": result.mean_s,
                "server_mean_s": result.server.mean_s,
                "difference": result.difference,
                "prompt_tokens": result.server.prompt,
                "device_hits": result.server.device,
                "external_hits": result.server.external,
            }
            for result in measured
        ]
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    raise typer.Exit(0 if measured and all(result.holds for result in measured) else 1)


if __name__ == "__main__":
    app()
