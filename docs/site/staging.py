"""Copies the pages of the repository into a folder for Sphinx, with links that the site can follow.

A page keeps its path, except that a language's start page becomes `index.md` and Chinese pages
move to the top. A link to a file that is not a page leads to a page with the text of the file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from zlib import crc32

import mermaidx
from contents import SECTIONS, START

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?P<text>!?\[[^\[\]]*\])\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~)")
_LEXERS = {".py": "python", ".cc": "cpp", ".c": "c", ".h": "c", ".yaml": "yaml", ".yml": "yaml"}
_PICTURES = {".svg", ".png"}


class Staging:
    """The pages of one language in `folder`, the source of one run of Sphinx."""

    def __init__(self, language: str, folder: Path) -> None:
        self.language = language
        self.folder = folder
        self._files: set[str] = set()
        shutil.rmtree(folder, ignore_errors=True)

    def copy(self) -> None:
        """Copies all pages of the contents, and writes pages for the files to which they link."""
        for page in all_pages(self.language):
            text = (ROOT / page).read_text()
            self.write(place(page), self._site_text(page, text))
        for file in sorted(self._files):
            self.write(f"files/{file}.md", _file_page(file))

    def write(self, path: str, text: str) -> None:
        """Writes a page of the site by its path below the folder."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def _site_text(self, page: str, text: str) -> str:
        drawn = re.sub(r"```mermaid\n(.*?)```", lambda found: _drawing(found[1]), text, flags=re.S)
        lines, code = [], False
        for line in drawn.splitlines():
            code ^= bool(_FENCE.match(line.strip()))
            lines.append(line if code else _LINK.sub(lambda m: self._link(page, m), line))
        return "\n".join(lines) + "\n"

    def _link(self, page: str, found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        if not target or ":" in target:
            return found[0]
        path = os.path.normpath(PurePosixPath(page).parent / target)
        if not (ROOT / path).exists():
            raise ValueError(f"{page}: expected a file at the link {target}, found none")
        address = self._address(page, path) + ("#" + anchor if anchor else "")
        if address.partition("#")[0].endswith(".html"):
            return f'<a href="{address}">{found["text"][1:-1]}</a>'
        return f"{found['text']}({address})"

    def _address(self, page: str, path: str) -> str:
        folder = PurePosixPath(place(page)).parent
        if Path(path).suffix in _PICTURES:
            copy = self.folder / place(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy)
        elif (other := _language(path)) and other != self.language:
            up = "../" * len(folder.parts) + ("../" if self.language == "zh" else "zh/")
            return up + place(path).removesuffix(".md") + ".html"
        elif path not in all_pages(self.language):
            self._files.add(path)
            return os.path.relpath(f"files/{path}.md", folder)
        return os.path.relpath(place(path), folder)


def all_pages(language: str) -> list[str]:
    """Returns the paths of a language's pages in the repository, the start page first."""
    return [START[language], *(page for _, pages in SECTIONS[language] for page in pages)]


def place(path: str) -> str:
    """Returns the path of a page or picture on the site, below the language's folder."""
    return path.removeprefix("docs/zh/") if path != START["en"] else "index.md"


def _language(path: str) -> str | None:
    return next((each for each in START if path in all_pages(each)), None)


def _drawing(mermaid: str) -> str:
    """Returns the drawing of a Mermaid graph as HTML without scripts."""
    svg = mermaidx.render(mermaid).svg().replace("my-svg", f"graph-{crc32(mermaid.encode())}")
    return f'<div class="graph">{" ".join(svg.splitlines())}</div>\n'


def _file_page(path: str) -> str:
    """Returns a page with the text of a file, or with the names of the files of a folder."""
    head = f"---\norphan: true\n---\n# `{path}`\n\n"
    if (ROOT / path).is_dir():
        listed = subprocess.run(
            ["git", "ls-files", path], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return head + "\n".join(f"- `{name}`" for name in listed.stdout.split()) + "\n"
    text = (ROOT / path).read_text()
    return f"{head}````{_LEXERS.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n````\n"
