"""The program of one rank in a layout's run; see `launch_layout`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import unisono.torch_backend  # noqa: F401 - registers the backend where autoload is off
from unisono.train import events
from unisono.train.layout_settings import LayoutRun
from unisono.train.layout_training import train_layout
from unisono.train.worker import emitter


@record
def main(settings: str, event_path: Path) -> None:
    """Joins the group of all ranks and trains.

    Emits `Refused`, and does not raise, if the layout cannot divide the task.
    """
    run = LayoutRun.decode(settings)
    dist.init_process_group("unisono", timeout=timedelta(seconds=run.timeout_s))
    try:
        with emitter(event_path) as emit:
            try:
                train_layout(run, emit)
            except ValueError as refusal:  # all ranks raise it, so none waits for another
                emit(events.Refused(reason=str(refusal)))
        dist.barrier()
    finally:
        dist.destroy_process_group()
