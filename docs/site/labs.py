"""The labs of the course as pages: each lab runs from top to bottom, and its page has the text, the
code and the results. Pages that play become files of their own in `players/`.

`marimo export html` is not used: its pages load the front end of marimo from another server.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from pprint import pformat
from typing import Any

from unisono.course import chapters, lab

_FRAME = re.compile(r"<iframe srcdoc='(.*?)'.*?height=[\"']?(\d+)", re.DOTALL)
_COMMAND = {
    "en": "This page shows one run of the lab. The lab itself waits for your predictions: `{}`",
    "zh": "本页是这个实验的一次运行结果。实验本身会等您先做预测：`{}`",
}
_CHOICES = {"en": "Answers to choose from:", "zh": "可选的回答："}


def write(language: str, page: Callable[[str, str], None], players: Path) -> None:
    """Runs all labs of a language, and writes `course/NAME.md` by `page(path, text)`."""
    for chapter in chapters():
        file = lab(chapter.name, language)
        suffix = "" if language == "en" else f" --language {language}"
        command = _COMMAND[language].format(f"unisono learn {chapter.number}{suffix}")
        parts = _LabPage(language, chapter.name, players).parts(file)
        page(f"course/{chapter.name}.md", "\n\n".join([parts[0], command, *parts[1:]]) + "\n")


class _LabPage:
    def __init__(self, language: str, name: str, players: Path) -> None:
        self.language, self.name, self.players = language, name, players
        self.shown = 0

    def parts(self, file: Path) -> list[str]:
        """Returns the parts of the page in Markdown: text, code and results."""
        spec = importlib.util.spec_from_file_location(f"lab_{self.language}_{self.name}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with redirect_stdout(StringIO()) as printed:
            outputs, _ = module.app.run()
        cells = zip(_cells(file), outputs, strict=True)
        parts = [part for cell, output in cells for part in self._cell(*cell, output)]
        if text := printed.getvalue().strip():
            place = next(i for i, part in enumerate(parts) if "print(" in part)
            parts.insert(place + 1, f"```text\n{text}\n```")
        return parts

    def _cell(self, code: str, hidden: bool, output: Any) -> list[str]:
        shown = [] if hidden or output_is_text(output) else [f"```python\n{code}\n```"]
        if output is None:
            return shown
        if output_is_text(output):
            return [output._markdown_text]
        if hasattr(output, "options"):
            return [_CHOICES[self.language] + "\n\n" + "\n".join(f"- {o}" for o in output.options)]
        if hasattr(output, "text"):
            return [*shown, self._element(output.text)]
        return [*shown, f"```text\n{pformat(output, width=90, sort_dicts=False)}\n```"]

    def _element(self, text: str) -> str:
        found = _FRAME.search(text)
        if found is None:
            return f"```{{raw}} html\n{text}\n```"
        self.shown += 1
        file = f"{self.language}-{self.name}-{self.shown}.html"
        self.players.mkdir(parents=True, exist_ok=True)
        (self.players / file).write_text(html.unescape(found[1]))
        up = "../" if self.language == "en" else "../../"
        frame = (
            f'<iframe class="player" loading="lazy" src="{up}players/{file}" height="{found[2]}"'
        )
        return f'```{{raw}} html\n{frame} title="{self.name} {self.shown}"></iframe>\n```'


def output_is_text(output: Any) -> bool:
    """Returns True for the output of `mo.md`."""
    return hasattr(output, "_markdown_text")


def _cells(file: Path) -> list[tuple[str, bool]]:
    """Returns the code of each cell, and whether the notebook hides it."""
    source = file.read_text()
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        body = [each for each in node.body if not isinstance(each, ast.Return)]
        lines = source.splitlines()[body[0].lineno - 1 : body[-1].end_lineno] if body else []
        code = "\n".join(line[4:] for line in lines)
        found.append((code, "hide_code" in ast.unparse(node.decorator_list[0])))
    return found
