"""`unisono learn`: the list of chapters, its errors, and the server of a lab."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from typer.testing import CliRunner

from bootstrap_stores import free_port
from unisono.commands import learn as learn_module
from unisono.commands.main import app
from unisono.course import chapters

RUNNER = CliRunner()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_without_a_chapter_lists_all(language: str) -> None:
    shown = RUNNER.invoke(app, ["learn", "--language", language])
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) == 7
    assert all(each.titles[language] in shown.stdout for each in chapters())


@pytest.mark.parametrize("arguments", [["8"], ["walls", "--language", "fr"], ["--language", "fr"]])
def test_refuses_another_chapter_or_language(arguments: list[str]) -> None:
    shown = RUNNER.invoke(app, ["learn", *arguments])
    assert shown.exit_code == 2 and "expected" in shown.output


def test_names_the_cure_for_a_missing_marimo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn_module, "find_spec", lambda name: None)
    error = RUNNER.invoke(app, ["learn", "2"]).exception
    cure = "unisono learn needs marimo, not installed here: pip install 'unisono[learn]'"
    assert isinstance(error, ModuleNotFoundError) and str(error) == cure


@pytest.mark.optional
def test_serves_a_lab() -> None:
    pytest.importorskip("marimo")
    port = free_port()
    command = [sys.executable, "-m", "unisono", "learn", "3", "--language", "zh", "--headless"]
    server = subprocess.Popen([*command, "--port", str(port)], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5) as answer:
                    page = answer.read().decode()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)
    assert "算法：编写、证明、破坏、运行" in page
