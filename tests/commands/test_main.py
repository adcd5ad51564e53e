from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unisono
from unisono.bench.cases import OPERATIONS, REDUCTIONS, STORAGE
from unisono.commands.main import app

COMMANDS = (
    "check",
    "bench",
    "explain",
    "tune",
    "prove",
    "show",
    "topo",
    "trace",
    "simulate",
    "calibrate",
    "lab",
    "train",
)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "150"})
    return result.exit_code, result.output


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "train"])
def test_help_has_an_example(command: str) -> None:
    code, output = run(command, "--help")
    assert code == 0
    assert f"Example: unisono {command}" in output
    assert "--json" in output


def test_all_commands_are_listed() -> None:
    code, output = run("--help")
    assert code == 0
    assert all(command in output for command in COMMANDS)


def test_help_of_bench_lists_all_operations_types_and_reductions() -> None:
    _, output = run("bench", "--help")
    words = set(re.findall(r"\w+", output))
    assert {*OPERATIONS, *STORAGE, *REDUCTIONS} <= words


def test_the_version_is_printed() -> None:
    code, output = run("--version")
    assert code == 0 and output.split() == ["unisono", unisono.__version__]


@pytest.mark.parametrize("options", [(), ("--json", "-")])
def test_a_full_disk_is_reported_in_one_line(options: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "unisono", "show", "barrier", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert answer.returncode != 0 and "No space left on device" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_locale_without_table_characters_gets_replacements() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "unisono", "topo", "ring:4"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert b"ranks" in answer.stdout and answer.stdout.isascii()


def test_help_imports_no_slow_modules() -> None:
    script = (
        "import sys, unisono.commands.main; "
        "heavy = 'numpy', 'torch', 'matplotlib', 'mpi4py', 'unisono.train'; "
        "print([module for module in heavy if module in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert answer.stdout.strip() == b"[]"


@pytest.mark.parametrize(
    "wrong",
    [
        ("allreduce",),
        ("all_reduce", "--sizes", "8Q"),
        ("all_reduce", "--against", "nccl"),
        ("all_reduce", "--dtype", "float31"),
        ("broadcast", "-n", "2", "--root", "2"),
        ("all_reduce", "--round-s", "0"),
        ("all_reduce", "--round-s", "nan"),
        ("all_reduce", "--time-budget", "0"),
        ("all_reduce", "--rate", "1gbit"),
        ("all_reduce", "--device", "cuda"),
        ("all_reduce", "--device", "cuda", "--against", "openmpi"),
        ("all_reduce", "--device", "cuda", "--against", "gloo", "--hosts", "2"),
        ("all_reduce", "--hosts", "1"),
        ("all_reduce", "--hosts", "300"),
        ("all_reduce", "--hosts", "2", "-n", "4"),
    ],
)
def test_invalid_options_of_bench_are_refused_at_once(wrong: tuple[str, ...]) -> None:
    code, output = run("bench", *wrong)
    assert code == 2
    assert "Error" in output


@pytest.mark.parametrize("wrong", [("allreduce", "8"), ("all_reduce", "8Q")])
def test_explain_refuses_unknown_operations_and_sizes(wrong: tuple[str, str]) -> None:
    code, output = run("explain", *wrong)
    assert code == 2
    assert "Error" in output


def test_explain_names_the_algorithm() -> None:
    code, output = run("explain", "all_reduce", "64K", "-n", "2")
    assert code == 0
    assert "all_reduce of 65536 bytes on 2 ranks" in output


def test_train_has_its_own_help() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", "from unisono.commands.main import main; main()", "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "digits" in answer.stdout


def told(*words: str, without: str = "nothing") -> tuple[int, str]:
    """Runs the command in a process in which a package is not installed; returns its exit code and
    its errors.
    """
    script = (
        "import importlib.util, sys; find = importlib.util.find_spec; "
        f"importlib.util.find_spec = lambda name, *more: None if name == {without!r} "
        "else find(name, *more); from unisono.commands.main import main; main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    return answer.returncode, answer.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train text --layout dq=3", "unisono train text: Invalid value: --layout: a layout is"),
        ("train text --steps 0", "unisono train text: Invalid value for '--steps': "),
        ("train texts", "unisono train: No such command 'texts'."),
        (
            "plan --layout dq=3 --model gpt3-175b --cluster a100:4 --batch 4",
            "unisono plan: Invalid",
        ),
        ("bench nosuch", "unisono bench: Invalid value: unknown operation 'nosuch'"),
        ("trace --nosuch", "unisono trace read: No such option: --nosuch"),
        ("nosuch", "unisono: No such command 'nosuch'."),
    ],
)
def test_errors_in_arguments_are_one_plain_line(words: str, expected: str) -> None:
    code, errors = told(*words.split())
    assert code == 2
    assert errors.count("\n") == 1
    assert errors.startswith(expected)
    assert errors.endswith(" --help)\n")


@pytest.mark.parametrize(
    "words", ["check --device cuda", "bench all_reduce --device cuda --against gloo,nccl"]
)
def test_a_missing_gpu_is_told_in_one_line(words: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, errors = told(*words.split())
    assert code == 1 and errors.count("\n") == 1
    assert errors.startswith("unisono: UnsupportedError: --device cuda: torch ")


@pytest.mark.parametrize("options", [(), ("--layout", "dp=2")])
@pytest.mark.parametrize(("task", "package"), [("digits", "sklearn"), ("text", "torch")])
def test_a_missing_package_is_named_in_one_line(
    task: str, package: str, options: tuple[str, ...]
) -> None:
    code, errors = told("train", task, "-n", "2", *options, without=package)
    name = {"sklearn": "scikit-learn"}.get(package, package)
    assert code == 1
    assert errors == (
        f"unisono: UnsupportedError: unisono train {task} needs {name}, not installed here: "
        f"pip install 'unisono[{'train' if task == 'digits' else 'torch'}]'\n"
    )


def test_only_the_digits_need_scikit_learn() -> None:
    pytest.importorskip("torch")
    script = (
        "import sys; sys.modules['sklearn'] = None; "
        "import unisono.train.layout_tasks, unisono.train.task; unisono.train.task.build('text')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
