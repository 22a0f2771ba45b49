"""What mkdocs is told beside mkdocs.yml: files from outside of docs/ are pages too.

Each text has one place in the repository, where its links work as they are on any code host. For
the site, links are followed from there; one to a file that is not on the site becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Page of the site → file of the repository.
ADDED = {
    "index.md": "README.md",
    "measuring.md": "bench/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{
        f"pictures/{path.name}": f"bench/pictures/{path.name}"
        for path in (ROOT / "bench" / "pictures").glob("*.*g")
    },
}
_PLACES = {repository: page for page, repository in ADDED.items()}
# Code comes first, so that what looks like a link in it stays as it is.
_LINK = re.compile(
    r"^```.*?^```|`[^`\n]+`|(!?)\[((?:`[^`]*`|[^\]`])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
_MADE = re.compile(r"^<!-- (help|file): (\S+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add what lies outside of docs/."""
    for page, repository in ADDED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / repository)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(ADDED.get(here, f"docs/{here}"))

    def moved(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        if target is None:
            return link[0]
        repository = posixpath.normpath(posixpath.join(folder, target))
        if repository.startswith("docs/"):
            place = repository.removeprefix("docs/")
        elif repository in _PLACES:
            place = _PLACES[repository]
        else:
            return text
        relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"{picture}[{text}]({relative}{anchor or ''})"

    if here in ADDED:  # pictures in HTML, for light and dark pages
        markdown = markdown.replace('="docs/', '="')
    return _MADE.sub(_made, _LINK.sub(moved, markdown))


def _made(marker: re.Match[str]) -> str:
    """What ``streamload COMMAND --help`` prints, or a script, as a block."""
    kind, what = marker.groups()
    if kind == "file":
        return f"```python\n{(ROOT / what).read_text(encoding='utf-8').strip()}\n```"
    from streamload.cli import main

    done = CliRunner().invoke(main, [what, "--help"], prog_name="streamload")
    assert done.exit_code == 0, done.output
    return f"```text\n{done.output.strip()}\n```"
