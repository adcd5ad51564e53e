"""The program of one rank in a comparison of backends; see `launch`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import unisono.torch_backend  # noqa: F401 - registers the backend where autoload is off
from unisono.train import events, task
from unisono.train.settings import CONTROLLER, TrainingRun
from unisono.train.training_loop import Emit, train


# `record` writes a failing rank's traceback to a file. Torch's agent then reports the traceback of
# the rank that failed first.
@record
def main(settings: str, event_path: Path) -> None:
    """Joins the default group (first backend), makes a group for each other backend, and trains."""
    run = TrainingRun.decode(settings)
    timeout = timedelta(seconds=run.timeout_s)
    first, *others = run.backends
    dist.init_process_group(_backend(first), timeout=timeout)
    try:
        world = dist.group.WORLD
        assert world is not None  # set by `init_process_group`
        groups = {first: world}
        for other in others:
            groups[other] = dist.new_group(backend=_backend(other), timeout=timeout)
        with emitter(event_path) as emit:
            train(run, task.build(run.task), groups, emit)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _backend(name: str) -> str:
    return "unisono" if name == CONTROLLER else name


@contextlib.contextmanager
def emitter(path: Path) -> Iterator[Emit]:
    """Yields a function that writes events to the file on rank 0 and drops them on other ranks."""
    if dist.get_rank() != 0:
        yield lambda event: None
        return
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield lambda event: print(events.encode(event), file=file)
