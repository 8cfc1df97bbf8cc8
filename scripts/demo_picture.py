"""Run the demo, and draw its table as a terminal shows it; it takes some minutes.

The picture is docs/pictures/demo.svg, for the README. Its numbers are of this machine, today.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from lmcache_xpu.harness.demo import MEANING, table, tell

PICTURE = Path(__file__).parents[1] / "docs/pictures/demo.svg"
WIDTH = 84
# rich's own loads a font from another site, which pages of documentation may not.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }} {styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def main() -> None:
    """Run the demo and write the picture."""
    rows = tell(work=Path(".demo"))
    console = Console(record=True, width=WIDTH, force_terminal=True)
    console.print(table(rows))
    console.print(f"\n{MEANING}", highlight=False)
    svg = console.export_svg(title="make demo", theme=MONOKAI, code_format=FORMAT, unique_id="demo")
    PICTURE.write_text(svg)


if __name__ == "__main__":
    main()
