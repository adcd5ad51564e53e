"""`unisono.run` in programs without a file: notebooks, `python -c`, standard input."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.launch.pickling import pack

PROGRAM = """
import json, sys
import numpy as np
import unisono

class Odd(Exception):
    pass

scale = 10.0
sys.parent_only = True  # so much for what a forked child would have

def sums(plus):
    comm = unisono.init()
    forked = hasattr(sys, "parent_only")
    return comm.rank, comm.all_reduce(np.full(2, scale + plus)).tolist(), forked

def fails():
    raise Odd("of the program")

try:
    unisono.run(fails, ranks=1)
except Odd as error:
    caught = [str(error), "in fails" in error.__notes__[0]]
plus = 2.0
print(json.dumps([unisono.run(lambda: sums(plus), ranks=2), caught]))
"""
EXPECTED: Any = [[[0, [24.0, 24.0], False], [1, [24.0, 24.0], False]], ["of the program", True]]

TORCH_PROGRAM = """
import json, os
import torch
from torch import distributed as dist
import unisono

torch.set_num_threads(2)
work = torch.ones(512, 512)
work @ work  # starts OpenMP's threads, which a forked child would wait for

def rank(x):
    x @ x
    sums = []
    for backend in ("unisono", "gloo"):
        dist.init_process_group(backend)
        mine = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(mine)
        sums.append(mine.tolist())
        dist.destroy_process_group()
        with unisono.init() as comm:
            comm.barrier()  # nobody takes this store, which rank 0 has just closed, for the next
    with unisono.init() as comm:
        comm.all_reduce(x)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    elastic = [name for name in os.environ if name.startswith("TORCHELASTIC_")]
    return sums, x[0], [os.environ[name] for name in names], elastic

results = unisono.run(rank, ranks=2, args=(work,))
shares = work.is_shared() or float(work.sum()) != 512 * 512
print(json.dumps([[s, x[:2].tolist(), v, e] for s, x, v, e in results] + [shares]))
"""

NOTEBOOK = """
import sys
import nbclient, nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec

manager = AsyncKernelManager()  # of this interpreter, whatever is installed on the machine
command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager._kernel_spec = KernelSpec(argv=command, display_name="", language="python")
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.stdin.read())])
nbclient.NotebookClient(notebook, km=manager, timeout=110).execute()
print("".join(output.text for output in notebook.cells[0].outputs))
"""


def said(arguments: list[str], program: str = "", **environment: str) -> Any:
    """Returns the JSON output of a program in a new interpreter."""
    done = subprocess.run(
        [sys.executable, *arguments], input=program, capture_output=True, text=True, timeout=110,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # torch 2.9 prints lines about Gloo before
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_program_on_standard_input_can_run_ranks() -> None:
    assert said(["-"], PROGRAM) == EXPECTED


@pytest.mark.torch
def test_ranks_start_after_torch_has_used_its_threads() -> None:
    pytest.importorskip("torch")
    # Variables of a torchrun that started the program. Its store must not be used for these ranks.
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "outer"}
    found = said(["-c", TORCH_PROGRAM], **outer)
    ranks = [[str(r), str(r), "2", "2", "127.0.0.1"] for r in range(2)]
    assert found == [[[[3.0, 3.0]] * 2, [2.0, 2.0], rank, []] for rank in ranks] + [False]


def test_a_notebook_can_run_ranks(tmp_path: Path) -> None:
    pytest.importorskip("nbclient"), pytest.importorskip("ipykernel")
    folders = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    assert said(["-c", NOTEBOOK], PROGRAM, **dict.fromkeys(folders, str(tmp_path))) == EXPECTED


def test_a_lambda_works_in_an_importable_program() -> None:
    assert unisono.run(lambda x: x + 1, ranks=1, args=(2,)) == [3]


def test_arguments_that_cannot_be_pickled_are_refused_before_a_rank_starts() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        unisono.run(len, ranks=1, args=(sys.stdout,))


@pytest.mark.torch
def test_tensors_are_copied() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(3)
    clone = pickle.loads(pack(x))
    clone += 1
    assert x.tolist() == [0.0] * 3 and not x.is_shared()
