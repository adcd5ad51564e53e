"""Hand-written digits: 1797 images of 8 x 8 pixels, and a small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CLASSES = 10
_PIXEL_MAX = 16.0
_BACKGROUND = -1.0
_TEST_SHARE = 0.2
_SPLIT_SEED = 0


@dataclass(frozen=True, slots=True)
class Digits:
    """A data set of 1437 training images and 360 test images, stratified by class."""

    train_set: TensorDataset
    test_images: torch.Tensor
    """Images of shape (360, 1, 8, 8), with values between -1 and 1."""
    test_labels: torch.Tensor

    @staticmethod
    def load() -> Digits:
        """Reads the data from scikit-learn. The split is the same for every seed."""
        # Other tasks import this module where scikit-learn is not installed.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        raw = load_digits()
        images = torch.from_numpy(raw.images).float().unsqueeze(1) / (_PIXEL_MAX / 2) - 1
        labels = torch.from_numpy(raw.target).long()
        learn, judge = train_test_split(
            range(len(labels)),
            test_size=_TEST_SHARE,
            random_state=_SPLIT_SEED,
            stratify=raw.target,
        )
        return Digits(TensorDataset(images[learn], labels[learn]), images[judge], labels[judge])

    def model(self) -> nn.Module:
        """Returns a network of 284 thousand parameters.

        Its functions are smooth, so that the network does not amplify rounding errors.
        """
        return nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256),
            nn.GELU(),
            nn.Linear(256, CLASSES),
        )

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=learning_rate, momentum=0.9, nesterov=True, weight_decay=1e-4
        )

    def loss(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the cross entropy of images that are shifted at random by up to one pixel."""
        images, labels = batch
        return functional.cross_entropy(model(_shifted(images)), labels)

    def score(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, float]:
        """Returns (correct predictions, predictions) for this rank's share of the test images."""
        labels = self.test_labels[rank::ranks]
        right = model(self.test_images[rank::ranks]).argmax(dim=1) == labels
        return float(right.sum()), float(len(labels))

    def sample(self, model: nn.Module) -> str:
        return ""


def _shifted(images: torch.Tensor) -> torch.Tensor:
    """Returns the images (count, 1, 8, 8), shifted at random by -1, 0 or 1 pixel on both axes."""
    count, side = len(images), images.shape[-1]
    padded = functional.pad(images, (1, 1, 1, 1), value=_BACKGROUND)
    down, across = torch.randint(0, 3, (2, count, 1)) + torch.arange(side)
    which = torch.arange(count).view(count, 1, 1)
    return padded[which, 0, down.unsqueeze(2), across.unsqueeze(1)].unsqueeze(1)
