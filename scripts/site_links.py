"""Let the site's links to files it does not have lead somewhere; `mkdocs.yml` names this as a hook.

On GitHub a link to a file outside docs/, or to one that `exclude_docs` leaves out, opens that file.
The site has no such file: the link leads to the repository that `DOCS_REPO_URL` names, and without
that variable its text stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^):\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with its links to files that the site does not have replaced."""
    docs = Path(config["docs_dir"])
    folder = Path(page.file.abs_src_path).parent
    address = config["repo_url"]

    def in_site(path: Path) -> bool:
        if not path.is_relative_to(docs):
            return False
        file = files.get_file_from_path(str(path.relative_to(docs)))
        return file is not None and not file.inclusion.is_excluded()

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if not path.exists() or in_site(path):  # MkDocs checks these
            return link[0]
        if not address:
            return text
        return f"[{text}]({urljoin(f'{address}/', path.relative_to(ROOT).as_posix())})"

    return LINK.sub(replace, markdown)
