"""Trains a Llama of transformers in a layout, loses a rank, and goes on in another layout.

Needs: transformers
Covers: `parallelize` with `model_loss` and `batch="local"`, a data loader and a warm-up schedule,
bfloat16 with float32 sums, `evaluate`, checkpoints with `extra`, `export`. Scenario: the ranks
train a small Llama on the source of Python's standard library. The last rank kills itself. The job
starts again from the newest checkpoint in another layout. In the end transformers loads the
exported model, and computes the same loss of text that was held out.

    python examples/train_llama.py
    python examples/train_llama.py --layout tp=2,pp=2 --then dp=2,zero=3 --float64
"""

import argparse
import os
import signal
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, default_collate
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import unisono
from unisono.parallel import Layout, Precision, model_loss, parallelize

BATCH, LENGTH, WARM_UP, STEPS_PER_SAVE = 16, 64, 4, 3
"""Sequences of a batch, tokens of a sequence, steps of the warm-up, steps between checkpoints."""


def pieces_of_source(first):
    """Returns pieces of 40 files of the standard library, as a data set. A token is a byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[first : first + 40]
    text = torch.tensor(list(b"".join(each.read_bytes() for each in files)))
    return [{"input_ids": each, "labels": each} for each in text.split(LENGTH)[:-1]]


def own_part(run, step):
    """Returns the numbers of the pieces in this rank's part of a batch."""
    share = BATCH // run.data_parallel_size
    first = step * BATCH + run.data_parallel_rank * share
    return range(first, first + share)


def llama():
    """Returns a small Llama with random weights, the same on all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(layout, steps, folder, lost_in_step, dtype):
    """Trains from the newest checkpoint of the folder. Returns the losses by step, and the loss of
    text that was held out.
    """
    dist.init_process_group("unisono")
    torch.set_default_dtype(torch.float64 if dtype is torch.float64 else torch.float32)
    data, held_out = pieces_of_source(0), pieces_of_source(40)
    run = parallelize(
        llama(), layout, loss=model_loss, batch="local", microbatches=2, clip=1.0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 3e-3),
        example=default_collate(data[: BATCH // layout.dp]), precision=Precision(computation=dtype),
    )  # fmt: skip
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        run.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP)
    )
    if any(folder.glob("checkpoint-*")):
        run.load(folder, {"warm_up": warm_up})
    parts = [own_part(run, step) for step in range(run.steps, steps)]
    losses = {}
    for batch in DataLoader(data, batch_sampler=parts):
        if run.steps == lost_in_step and dist.get_rank() == layout.devices - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses[run.steps] = float(run.step(batch))
        warm_up.step()
        if run.steps % STEPS_PER_SAVE == 0:
            run.save(folder, {"warm_up": warm_up}, keep=2)
    loss = float(run.evaluate(default_collate([held_out[i] for i in own_part(run, 0)])))
    run.export(folder / "model")
    return losses, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", type=Layout.parse, default=Layout(dp=2, zero=1))
    parser.add_argument("--then", type=Layout.parse, default=Layout(pp=2), help="after the loss")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lost-in-step", type=int, default=8)
    parser.add_argument("--float64", action="store_true", help="instead of bfloat16")
    given = parser.parse_args()
    dtype = torch.float64 if given.float64 else torch.bfloat16
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            arguments = (given.layout, given.steps, folder, given.lost_in_step, dtype)
            unisono.run(train, ranks=given.layout.devices, args=arguments)
        except unisono.PeerLostError as error:
            print(f"{given.layout.text()}: {error}")
        arguments = (given.then, given.steps, folder, None, dtype)
        losses, loss = unisono.run(train, ranks=given.then.devices, args=arguments)[0]
        for step, each in losses.items():
            print(f"{given.then.text()}: loss {each:.9f} in step {step}")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    again = float(model(**default_collate(pieces_of_source(40)[:BATCH])).loss.detach())
    print(f"held out: loss {loss:.6f}, with transformers {again:.6f}")
    assert abs(loss / again - 1) < (1e-5 if given.float64 else 0.02)


if __name__ == "__main__":
    main()
