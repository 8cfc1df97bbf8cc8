"""What a run can be told.

Each field is an option of Locust's command line, a variable LOCUST_<FIELD>, and a field of
Locust's web page.
"""

from __future__ import annotations

import argparse
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:  # its import patches the whole process for gevent
    from locust.env import Environment

__all__ = ["Options", "parsed", "stage_users"]

SECRET = ("api_key",)


class Options(BaseModel):
    """One run. The number of users is Locust's own (`-u`), and so is the server (`--host`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The workload. Names and meanings of the first six are those of LMCache's multi-round-qa.
    num_rounds: int = Field(5, ge=1, description="R: questions per session")
    qps: float = Field(0.5, ge=0, description="Q: queries per second; 0: each at the last's end")
    shared_system_prompt: int = Field(1000, ge=0, description="S: words that all users share")
    user_history_prompt: int = Field(2000, ge=0, description="H: words that are a user's own")
    answer_len: int = Field(100, ge=1, description="A: tokens per answer")
    init_user_id: int = Field(0, ge=0, description="The first user's number is one more")
    conversations: Path | None = Field(None, description="ShareGPT file, for conversations")
    trace: Path | None = Field(None, description="File or folder, for trace")
    trace_format: str = Field("auto", description="mooncake, timed-trace, agents; see load-test.md")
    time_scale: float = Field(1, gt=0, description="Of a trace's gaps; 0.1: ten times faster")
    length_scale: float = Field(1, gt=0, description="Of a trace's prompts and answers")
    max_requests: int = Field(0, ge=0, description="Of a trace; 0: all")
    max_tokens: int = Field(0, ge=0, description="Leaves out a trace's longer requests; 0: none")
    chunk_tokens: int = Field(256, ge=1, description="Of the cache, for what it could reuse")
    documents: int = Field(20, ge=1, description="Documents, for long-documents")
    duration_s: float = Field(100, gt=0, description="Length of the run after the warm-up")
    enforce_strict_concurrent_users: bool = Field(
        False, description="No new session while as many are active as there are users"
    )
    stages: str = Field("", description="Users over time, as seconds:users,... ; only with qps 0")
    seed: int = Field(0, description="Of all texts that are drawn")
    salt: str = Field("auto", description="A word that keeps an earlier run's cache out; none: off")
    canned: bool = Field(False, description="Histories get fixed answers, not the model's")
    ignore_eos: bool = Field(True, description="Answers of exactly answer_len tokens (vLLM)")
    warm_up: int = Field(10, ge=0, description="Requests before the run, all at once")

    # The server.
    model: str = Field("", description="Model to ask for; empty: the server's first")
    api_key: str = Field("", description="Key of the server's API")
    metrics_url: str = Field("", description="More metrics, e.g. of GPUs; comma separated")
    connect_s: float = Field(10, gt=0, description="Longest wait for a connection")
    silence_s: float = Field(60, gt=0, description="Longest wait for the next byte")
    request_s: float = Field(300, gt=0, description="Longest request in all")
    gone_s: float = Field(10, gt=0, description="A server away for so long ends the run")

    # The report.
    report_dir: Path | None = Field(None, description="Default: reports/<time>")
    slo: Path = Field(
        Path(__file__).with_name("slo.toml"), description="Thresholds that decide the exit code"
    )

    @model_validator(mode="after")
    def _stages_are_for_closed_loops(self) -> Self:
        if self.stages:
            stage_users(self.stages, 0.0)
            if self.qps:
                raise ValueError(f"found --stages with --qps {self.qps:g}; expected --qps 0")
        return self

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Make an option of each field."""
        for name, about in cls.model_fields.items():
            kind = about.annotation
            arguments: dict[str, Any] = {"type": _plain(kind)}
            if kind is bool:
                arguments = {"action": argparse.BooleanOptionalAction}
            elif name in SECRET:
                arguments["is_secret"] = True  # Locust's own: masked on the web page
            parser.add_argument(
                "--" + name.replace("_", "-"),
                default=str(about.default) if isinstance(about.default, Path) else about.default,
                help=about.description,
                env_var="LOCUST_" + name.upper(),
                **arguments,
            )

    @classmethod
    def of(cls, environment: Environment) -> Self:
        """The options out of Locust's.

        Raises:
            ValidationError: a value is not allowed.
        """
        values = {name: getattr(parsed(environment), name) for name in cls.model_fields}
        # The web page sends an empty text for what is unset.
        return cls.model_validate({k: v for k, v in values.items() if v not in (None, "")})


def parsed(environment: Environment) -> argparse.Namespace:
    """Locust's options, ours among them."""
    options = environment.parsed_options
    assert isinstance(options, argparse.Namespace), "Locust was not started by its command"
    return options


def stage_users(stages: str, at_s: float) -> int:
    """The number of users at a time, by `seconds:users,seconds:users`; at last it stays.

    Raises:
        ValueError: `stages` can't be read.
    """
    end_s, users = 0.0, 0
    for stage in stages.split(","):
        seconds, _, number = stage.partition(":")
        end_s, users = end_s + float(seconds), int(number)
        if at_s < end_s:
            break
    return users


def _plain(annotation: Any) -> type:
    """A type that the web page and the messages between processes can carry."""
    if get_origin(annotation) is types.UnionType:
        annotation = get_args(annotation)[0]
    return str if annotation is Path else annotation
