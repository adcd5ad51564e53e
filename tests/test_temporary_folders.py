from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.temporary_folders import TemporaryFolder

MAKE_AND_WAIT = """
import sys
from unisono.temporary_folders import TemporaryFolder
scratch = TemporaryFolder("unisono-test-")
(scratch.path / "file").write_text("kept")
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the folder in which the tests make temporary folders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_a_folder_lives_as_long_as_the_block(temporary: Path) -> None:
    with TemporaryFolder("unisono-test-") as folder:
        assert folder.parent == temporary
        (folder / "file").touch()
    assert list(temporary.iterdir()) == []


def test_the_next_process_removes_folders_of_a_killed_one(temporary: Path) -> None:
    command = [sys.executable, "-c", MAKE_AND_WAIT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        with TemporaryFolder("unisono-test-"):
            # the process that made the folder is alive
            assert (folder / "file").read_text() == "kept"
        os.kill(process.pid, signal.SIGKILL)
    assert folder.exists()
    with TemporaryFolder("unisono-test-") as mine:
        assert list(temporary.iterdir()) == [mine]


def test_folders_of_others_are_not_removed(temporary: Path) -> None:
    (temporary / "unisono-test-other").mkdir()
    (temporary / "unisono-test-file").touch()
    (temporary / "unisono-test-link").symlink_to(temporary / "unisono-test-other")
    with TemporaryFolder("unisono-test-"):
        pass
    names = {"unisono-test-other", "unisono-test-file", "unisono-test-link"}
    assert {path.name for path in temporary.iterdir()} == names
