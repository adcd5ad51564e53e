"""transformers' Trainer trains a small GPT-2 with random weights on generated text."""

from __future__ import annotations

import tempfile

import torch
from digits_task import BATCH, STEPS, Record
from torch import distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=128, n_layer=2, n_head=4, attn_pdrop=0.0,
    embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
starts = torch.randint(0, 64, (4096, 1))
texts = (starts + torch.arange(32) * 3) % 64
data = [{"input_ids": text, "labels": text} for text in texts]
record = Record()


class Steps(TrainerCallback):
    """Records each logged loss."""

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            record.step(logs["loss"])


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=BATCH // 4,
        logging_steps=1, report_to=[], save_strategy="no", seed=0, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Steps()])
    trainer.train()
# Only rank 0 logs; its loss is already the mean of all ranks.
totals: list[list[float]] = [[] for _ in range(dist.get_world_size())]
dist.all_gather_object(totals, record.losses)
record.losses = totals[0]
record.report()
dist.destroy_process_group()
