"""The index of the search, made by Pagefind from copies of the pages.

Pagefind cuts the Chinese text of a page into words by a dictionary, and browsers cut a query by
another one. So in the copies each Chinese character is a word; `static/search.js` does the same to
a query.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

_TEXT = re.compile(r">[^<]+<")
_BETWEEN = re.compile(r"(?<=[\u4e00-\u9fff])(?=[\u4e00-\u9fff])")


def index(site: Path, copies: Path) -> None:
    """Writes the index of all pages of a site into its folder `pagefind`."""
    shutil.rmtree(copies, ignore_errors=True)
    for page in site.rglob("*.html"):
        copy = copies / page.relative_to(site)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_TEXT.sub(lambda found: _BETWEEN.sub(" ", found[0]), page.read_text()))
    command = [sys.executable, "-m", "pagefind", "--site", str(copies), "--quiet"]
    subprocess.run([*command, "--output-path", str(site / "pagefind")], check=True)
