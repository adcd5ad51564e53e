"""Trains a small model in one process. `train_divided.py` is the same program on many ranks.

Covers: nothing of Unisono. Scenario: the digits of scikit-learn, a plain training loop.

    python examples/train_alone.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    digits = load_digits()
    images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    blocks = [each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for first in range(0, 512, 64):
        batch = slice(first, first + 64)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
