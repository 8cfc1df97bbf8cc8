"""Make the tables of the chart's README.md from values.yaml: `make helm-docs` runs this."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml
from chart_schema import settings_schema

from lmcache_xpu.launch.settings import Settings

CHART = Path(__file__).resolve().parent / "lmcache-xpu"
README = CHART / "README.md"
BEGIN, END = "<!-- values: made by `make helm-docs` -->\n", "<!-- end of values -->\n"


def readme(text: str) -> str:
    """README.md's text with the tables as they should be."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, _values(), "", _settings(), "", END + tail])


def _values() -> str:
    """One row per value: name, default, what its comment says."""
    source = (CHART / "values.yaml").read_text()
    rows = ["| value | default | what it is |", "|---|---|---|"]
    root = yaml.compose(source)
    assert isinstance(root, yaml.MappingNode)
    for name, default, comment in _leaves(root, source.splitlines(), ""):
        rows.append(f"| `{name}` | {f'`{default}`' if default else ''} | {comment} |")
    return "\n".join(rows)


def _leaves(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[tuple[str, ...]]:
    for key, value in node.value:
        name = prefix + key.value
        comment = _comment(lines, key.start_mark.line)
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        if block and key.value != "resources":
            if comment:
                yield name, "", comment
            yield from _leaves(value, lines, name + ".")
        else:
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            yield name, "unset" if default == "null" else default, comment


def _comment(lines: list[str], line: int) -> str:
    """The comment lines right above a line, as one."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("# "):
        first -= 1
    comment = [text.strip().removeprefix("# ") for text in lines[first:line]]
    return " ".join(comment).replace("|", "\\|")


def _settings() -> str:
    """One row per setting of `lmcache-xpu serve` that the chart passes on."""
    rows = ["| `settings.` | default | what it is |", "|---|---|---|"]
    for name in settings_schema()["properties"]:
        field = Settings.model_fields[name]
        default = "unset" if field.default in (None, ()) or field.is_required() else field.default
        rows.append(f"| `{name}` | `{default}` | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    README.write_text(readme(README.read_text()))
