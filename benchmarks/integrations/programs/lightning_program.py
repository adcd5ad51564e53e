"""Lightning trains the digits with its DDP strategy."""

from __future__ import annotations

import logging
import os

import lightning
import torch
from digits_task import BATCH, STEPS, Record, digits, network
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
record = Record()


class Digits(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, _):
        images, classes = batch
        return torch.nn.functional.cross_entropy(self.network(images), classes)

    def on_train_batch_end(self, outputs, batch, _):
        record.step(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Last(lightning.Callback):
    """Reports while the process group exists."""

    def on_train_end(self, trainer, module):
        record.report()


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", max_steps=STEPS, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[Last()], max_epochs=-1,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
)  # fmt: skip
trainer.fit(Digits(), DataLoader(digits(), batch_size=BATCH, shuffle=True, num_workers=0))
