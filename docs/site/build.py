"""Builds the site into a folder: `python docs/site/build.py build/site`.

Stages the pages, runs Sphinx once for each language, indexes the text for the search, and checks
all links. Any warning is an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import labs
import reference
from contents import COURSE, LANGUAGES, SECTIONS
from indexing import index
from links import broken
from slim import slim
from staging import Staging, place

from unisono.course import chapters

_HERE = Path(__file__).parent


def main() -> None:
    """Builds the site. Ends with status 1 and the reasons if a page or link is wrong."""
    site = Path(sys.argv[1]).resolve()
    work = site.with_name(site.name + "-work")
    for language in LANGUAGES:
        source = stage(language, work / language, site / "players")
        target = site if language == "en" else site / language
        sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(_HERE)]
        run([*sphinx, "-d", str(work / f"doctrees-{language}"), str(source), str(target)], language)
    index(site, work / "index")
    slim(site)  # after the index, which does not read cells without end tags
    if lines := broken(site):
        sys.exit("Broken links:\n" + "\n".join(lines))
    print(f"The site is in {site}: python -m http.server --directory {site}")


def stage(language: str, folder: Path, players: Path) -> Path:
    """Writes the source of one language's pages. Returns its folder."""
    staging = Staging(language, folder)
    staging.copy()
    start = folder / "index.md"
    trees = [_tree(title, [place(page) for page in pages]) for title, pages in SECTIONS[language]]
    labs.write(language, staging.write, players)
    trees.insert(0, _tree(COURSE[language], [f"course/{each.name}.md" for each in chapters()]))
    if language == "en":
        reference.write(staging.write)
        trees.insert(6, _tree("Reference", [f"reference/{name}.md" for name in reference.MODULES]))
    start.write_text(start.read_text() + "".join(trees))
    return folder


def _tree(title: str, pages: list[str]) -> str:
    lines = "\n".join(page.removesuffix(".md") for page in pages)
    return f'\n```{{toctree}}\n:hidden:\n:caption: "{title}"\n:maxdepth: 1\n\n{lines}\n```\n'


def run(command: list[str], language: str = "en") -> None:
    """Runs a program of the build. Ends this program if it fails."""
    environment = {**os.environ, "SITE_LANGUAGE": language}
    if status := subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(status)


if __name__ == "__main__":
    main()
