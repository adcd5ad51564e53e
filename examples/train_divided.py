"""The program of `train_alone.py` on eight ranks: data, tensor and pipeline parallelism together.

Covers: `parallelize`, `torchrun`. Scenario: six lines replace five, and the losses are the same.
`diff examples/train_alone.py examples/train_divided.py` shows the changes.

    torchrun --standalone --nproc-per-node 8 examples/train_divided.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from unisono.parallel import Layout, parallelize


def main():
    torch.distributed.init_process_group("unisono")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    digits = load_digits()
    images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    blocks = [each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    run = parallelize(
        model, Layout(dp=2, tp=2, pp=2), loss=nn.functional.cross_entropy, microbatches=2,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2))  # fmt: skip
    for first in range(0, 512, 64):
        batch = slice(first, first + 64)
        loss = run.step(images[batch], labels[batch])
        print(f"loss {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
