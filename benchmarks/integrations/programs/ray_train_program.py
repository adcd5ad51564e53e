"""Ray Train trains the digits in workers that it starts, with DistributedDataParallel."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train import torch as ray_torch

RANKS = int(sys.argv[1])
FOLDER = str(Path(__file__).parent)


def train(config: dict[str, str]) -> None:
    """Trains on one worker. Rank 0 writes its record to a file."""
    from digits_task import BATCH, STEPS, Record, digits, network
    from torch.utils.data import DataLoader

    model = ray_torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(digits(), batch_size=BATCH, shuffle=True)
    loader = ray_torch.prepare_data_loader(loader)
    record = Record()
    while len(record.losses) < STEPS:
        for images, classes in loader:
            loss = torch.nn.functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record.step(loss.item())
            if len(record.losses) == STEPS:
                break
    with open(config["path"], "a") as file:
        record.report(file)


ray.init(
    num_cpus=RANKS, include_dashboard=False, logging_level=logging.WARNING,
    runtime_env={"env_vars": {"PYTHONPATH": FOLDER}},
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "record"
    ray_torch.TorchTrainer(
        train,
        train_loop_config={"path": str(path)},
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    print(path.read_text(), end="")
ray.shutdown()
