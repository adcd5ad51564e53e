"""Commands whose arguments are unreadable text files."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.commands.main import app

COMMANDS = (
    ("topo", "FILE"),
    ("show", "FILE"),
    ("calibrate", "FILE"),
    ("simulate", "all_reduce", "ring", "-t", "FILE"),
    ("simulate", "all_reduce", "ring", "-t", "ring:4", "--model", "FILE"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x93NUMPY\xff\xfe", "not text in UTF-8"),
        (b'{"format":', "JSON"),
        (b"[" * 100_000, ""),
        (None, "Is a directory"),
    ],
)
def test_the_error_names_the_file_and_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    content: bytes | None,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is None:
        Path("bad.json").mkdir()
    else:
        Path("bad.json").write_bytes(content)
    arguments = [word.replace("FILE", "bad.json") for word in command]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    output = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2
    assert "Invalid value: bad.json: " in output and told in output
