"""Training under torchrun that loses a rank, and goes on from its newest complete checkpoint.

Covers: `torchrun --max-restarts`, `parallelize` with a layout of as many ranks as there are,
`ParallelRun.save` and `load`. Scenario: ranks train the transformer of
`restart_in_another_layout.py`, and the last one kills itself. torchrun starts all ranks again. They
continue from the newest checkpoint, also if there are fewer or more of them, as after the loss of a
node. The losses are those of one process.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/elastic_training.py
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint node0:29500 examples/elastic_training.py --folder /shared/checkpoints
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from restart_in_another_layout import train, train_alone
from torch import distributed as dist

from unisono.parallel import Layout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lost-in-step", type=int, default=5, help="of the first start")
    given = parser.parse_args()
    job, starts = os.environ["TORCHELASTIC_RUN_ID"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    folder = given.folder or Path(tempfile.gettempdir()) / f"checkpoints-{job}"
    layout = Layout(dp=int(os.environ["WORLD_SIZE"]), zero=1)
    losses = train(layout, folder, given.lost_in_step if starts == "0" else None, given.steps)
    if dist.get_rank() == 0:
        alone = train_alone(given.steps)
        for step, loss in losses.items():
            print(f"{dist.get_world_size()} ranks, step {step}: {loss:.12f}", flush=True)
            assert abs(loss / alone[step] - 1) < 1e-10
        if given.folder is None:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
