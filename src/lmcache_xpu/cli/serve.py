"""`lmcache-xpu serve`.

The options are made from the fields of `Settings`: their names, types, defaults and help exist
once.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import SecretStr

from lmcache_xpu.launch.settings import ENV_PREFIX, Settings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def _serve(values: dict[str, Any], dry_run: bool) -> None:
    from lmcache_xpu.doctor.start import check_start
    from lmcache_xpu.launch.serve import serve

    serve(Settings.load(values), check_start, dry_run=dry_run)


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the command-line option of one setting; unset means: the variable, or the default."""
    default = "unset" if field.default is None else str(field.default)
    help_text = f"{field.description} (default: {default})."
    kind: Any = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(help=help_text, show_default=False)],
    )


def make_command() -> Any:
    """Return `serve` with one option per setting, model and extra arguments by position."""

    def run(**options: Any) -> None:  # its signature is written below
        dry_run = options.pop("dry_run")
        _serve({k: v for k, v in options.items() if v not in (None, [])}, dry_run)

    keyword_only = inspect.Parameter.KEYWORD_ONLY
    positional = {
        "model": (str | None, None),  # then from its variable
        "extra_args": (list[str] | None, None),
    }
    parameters = [
        inspect.Parameter(
            name,
            keyword_only,
            default=default,
            annotation=Annotated[
                kind,
                typer.Argument(
                    help=f"{Settings.model_fields[name].description}.", show_default=False
                ),
            ],
        )
        for name, (kind, default) in positional.items()
    ]
    parameters += [
        _option(name, field)
        for name, field in Settings.model_fields.items()
        # A key on the command line can be read by every user of the machine.
        if name not in positional and SecretStr not in get_args(field.annotation)
    ]
    parameters.append(
        inspect.Parameter(
            "dry_run",
            keyword_only,
            default=False,
            annotation=Annotated[
                bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")
            ],
        )
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = f"""Serve MODEL with vLLM and LMCache.

    Arguments after -- go to vLLM. Each option is also an environment variable: --cpu-gib is
    {ENV_PREFIX}CPU_GIB. The API key is {ENV_PREFIX}API_KEY and not an option.
    """
    return run
