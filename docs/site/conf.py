"""Configuration of Sphinx for the site. `build.py` sets the language."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent

project = "Unisono"
version = release = importlib.metadata.version("unisono")
language = {"en": "en", "zh": "zh_CN"}[os.environ["SITE_LANGUAGE"]]
copyright = "The Unisono developers, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
templates_path = [str(_HERE / "templates")]
html_static_path = [str(_HERE / "static")]
html_css_files = ["site.css"]
html_theme = "furo"
html_title = "Unisono"
html_copy_source = html_show_sphinx = html_show_sourcelink = False
html_context = {
    "other_language": {"en": "zh/index.html", "zh_CN": "../index.html"}[language],
    "other_name": {"en": "中文", "zh_CN": "English"}[language],
    "pagefind": {"en": "pagefind/", "zh_CN": "../pagefind/"}[language],
    "search_label": {"en": "Search", "zh_CN": "搜索"}[language],
}
html_sidebars = {
    "**": [
        "sidebar/scroll-start.html",
        "sidebar/brand.html",
        "sidebar/find.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
pygments_style = "friendly"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
default_role = "code"


def _restructured(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Changes the Markdown of our docstrings to reStructuredText: one backtick to two, a mark
    before code that is only indented, and blank lines around lists and examples.
    """
    changed: list[str] = [""]
    for line in lines:
        text = line if line.lstrip().startswith((">>>", "...")) else _CODE.sub(r"``\1``", line)
        before = changed[-1]
        if re.match(r"- |>>> ", text) and before and not re.match(r"- |>>> |\.\.\. ", before):
            changed.append("")
        if re.match(r"    \S", text) and not before and not _is_indented(changed):
            changed += ["::", ""]
        changed.append(text)
    lines[:] = changed[1:]


def _is_indented(lines: list[str]) -> bool:
    last = next((line for line in reversed(lines) if line), "")
    return last.startswith((" ", "- "))


_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def setup(app: Any) -> None:
    """Registers the change of docstrings."""
    app.connect("autodoc-process-docstring", _restructured)
