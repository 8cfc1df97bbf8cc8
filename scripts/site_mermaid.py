"""Let the site draw its diagrams without another host; `mkdocs.yml` names this as a hook.

Material loads Mermaid from a public host wherever a page has a diagram, unless the page has loaded
it already. `make docs` runs this file, which takes Mermaid from the npm registry by npm. The hook
then copies it into the site and lets those pages load that copy. Without npm the site is built all
the same, and its readers' browsers fetch Mermaid.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

VERSION = "11.17.2"  # of the major version that Material loads
SCRIPT = f"assets/mermaid-{VERSION}.min.js"  # in the site
MEMBER = "package/dist/mermaid.min.js"  # in npm's archive
DIAGRAM = '<pre class="mermaid">'


def local_copy() -> Path:
    """Return where the script is kept: in the environment, so that `make clean` removes it."""
    default = Path(sys.prefix, "share", "mermaid", f"{VERSION}.min.js")
    return Path(os.environ.get("DOCS_MERMAID", default))


def fetch() -> str:
    """Take the script from the npm registry, once; return a sentence if that fails."""
    copy = local_copy()
    if copy.exists():
        return ""
    npm = shutil.which("npm")
    if npm is None:
        return "no npm here"
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--pack-destination", folder, f"mermaid@{VERSION}"]
        if subprocess.run(command, cwd=folder, capture_output=True).returncode:
            return f"npm could not fetch mermaid {VERSION}"
        [archive] = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as files:
            script = files.extractfile(MEMBER)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(script.read())  # type: ignore[union-attr]
    return ""


def on_files(files: Any, *, config: Any, **_: object) -> Any:
    """Add the script to the site."""
    if local_copy().exists():
        files.append(File.generated(config, SCRIPT, abs_src_path=str(local_copy())))
    return files


def on_page_content(html: str, *, page: Any, **_: object) -> str:
    """Let a page with a diagram load the site's own copy."""
    if DIAGRAM not in html or not local_copy().exists():
        return html
    return f'{html}\n<script src="{get_relative_url(SCRIPT, page.url)}"></script>'


if __name__ == "__main__":
    if reason := fetch():
        print(f"docs: {reason}: browsers will fetch Mermaid from elsewhere.", file=sys.stderr)
