"""Smaller pages: removes the HTML that Sphinx writes and that no style of the site needs."""

from __future__ import annotations

import re
from pathlib import Path

_RULES = (
    (re.compile(r"<(t[dh])([^>]*)><p>((?:(?!</?p>).)*)</p>\s*</t[dh]>", re.S), r"<\1\2>\3</\1>"),
    (re.compile(r"(</t[dhr]>)\n"), r"\1"),
    (re.compile(r'<tr class="row-(?:even|odd)">'), "<tr>"),
    # HTML needs no end of a cell or row before the next one.
    (re.compile(r"</t[dh]>(?=<t[dh]|</tr>)"), ""),
    (re.compile(r"</tr>(?=<tr|\n?</t(?:body|head)>)"), ""),
    (re.compile(r'<span class="[wnp]">([^<]*)</span>'), r"\1"),
    (re.compile(r'<span class="pre">([^<]*)</span>'), r"\1"),
    (re.compile(r' class="docutils literal notranslate"'), ' class="docutils literal"'),
    (re.compile(r"<img (?!loading)"), '<img loading="lazy" '),
)


def slim(site: Path) -> None:
    """Rewrites all pages of the site. Pictures load when a reader scrolls to them."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        page.write_text(text)
