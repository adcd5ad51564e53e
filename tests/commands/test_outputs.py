from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from unisono.commands.main import app
from unisono.commands.outputs import writable, writable_folder


def test_missing_folders_are_created(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "out.json"
    assert writable(path) == path
    assert path.parent.is_dir()
    assert not path.exists()
    assert writable(None) is None


def test_an_unwritable_path_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=f"cannot write {tmp_path}: Is a directory"):
        writable(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(typer.BadParameter, match=r"Not a directory|File exists"):
        writable(tmp_path / "file" / "out.json")


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert writable_folder(folder) == folder
    assert folder.is_dir()
    assert writable_folder(None) is None
    (tmp_path / "file").touch()
    for option, reason in (("--save", "cannot write to"), ("--load", "is a file")):
        words = ["train", "text", "--layout", "dp=2", option, str(tmp_path / "file")]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert reason in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "all_reduce", "--json"],
        ["bench", "all_reduce", "--plot"],
        ["train", "digits", "--json"],
        ["tune", "--out"],
        ["topo", "ring:4", "--svg"],
        ["show", "all_reduce", "ring", "--html"],
        ["simulate", "all_reduce", "--topology", "ring:4", "--trace"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_refuses_an_unwritable_path_before_it_works(
    words: list[str], tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, [*words, str(tmp_path)])
    assert result.exit_code == 2
    assert "Is a directory" in " ".join(result.output.replace("│", " ").split())
