"""Starts the ranks of a training: `python -m unisono.train.rank_starter WORKER RUN EVENTS RANKS`.

Torch's elastic agent starts the ranks, as it does for torchrun. The ranks are forked from a process
that has imported the worker, since each import of torch takes seconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import secrets
import sys
from multiprocessing import forkserver
from pathlib import Path


def main() -> None:
    """Runs the worker's `main(run, event_path)` on all ranks to its end.

    Raises torch's `ChildFailedError`, with the traceback of the rank that failed first.
    """
    worker, run, event_path, ranks = sys.argv[1:]
    multiprocessing.get_context("forkserver").set_forkserver_preload([worker])
    forkserver.ensure_running()  # imports the worker at the same time as this process imports torch

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="forkserver",
        # Without a folder, torch makes its own folder and does not remove it.
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(event_path).parent)),
    )
    record(elastic_launch(config, _rank))(worker, run, event_path)


def _rank(worker: str, run: str, event_path: str) -> None:
    importlib.import_module(worker).main(run, Path(event_path))


if __name__ == "__main__":
    main()
