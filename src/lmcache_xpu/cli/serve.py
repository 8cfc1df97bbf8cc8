"""`lmcache-xpu serve`.

The options are made from the fields of `Settings`: their names, types, defaults and help exist
once.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_args

import typer
from pydantic import SecretStr

from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import Settings

POSITIONAL: dict[str, Any] = {"model": str | None, "extra_args": list[str] | None}


def make_command() -> Any:
    """Return `serve` with one option per setting, model and extra arguments by position."""

    def run(**options: Any) -> None:  # its signature is written below
        from lmcache_xpu.doctor import check_start
        from lmcache_xpu.launch.serve import serve

        dry_run = options.pop("dry_run")
        values = {name: value for name, value in options.items() if value not in (None, [])}
        serve(Settings.load(values), check_start, dry_run=dry_run)

    fields = Settings.model_fields
    parameters = [
        _parameter(name, kind, typer.Argument(help=f"{fields[name].description}."))
        for name, kind in POSITIONAL.items()
    ]
    for name, field in fields.items():
        # A key on the command line can be read by every user of the machine.
        if name not in POSITIONAL and SecretStr not in get_args(field.annotation):
            default = "unset" if field.default is None else field.default
            option = typer.Option(help=f"{field.description} (default: {default}).")
            kind: Any = field.annotation
            parameters.append(_parameter(name, kind | None, option))
    dry_run = typer.Option(
        "--dry-run", help="Print what would be run, and run nothing; the machine is not checked."
    )
    parameters.append(_parameter("dry_run", bool, dry_run, default=False))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = f"""Serve MODEL with vLLM and LMCache.

    Arguments after -- go to vLLM. Each option is also an environment variable: --cpu-gib is
    {ENV_PREFIX}CPU_GIB. The API key is {ENV_PREFIX}API_KEY and not an option.
    """
    return run


def _parameter(name: str, kind: Any, info: Any, *, default: object = None) -> inspect.Parameter:
    """Return a parameter of the command; None means: the setting's variable, or its default."""
    info.show_default = False
    annotation = Annotated[kind, info]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
