"""The batches of a case."""

from __future__ import annotations

from collections.abc import Callable

import torch

from random_models.case import Case
from random_models.losses import LOSSES
from random_models.models import CLASSES, FEATURES, VOCABULARY

Batch = tuple[torch.Tensor, torch.Tensor]


def _nothing(targets: torch.Tensor, value: int) -> None:
    """Ignores no target."""


def _some(targets: torch.Tensor, value: int) -> None:
    targets.view(-1)[::3] = value


def _sample(targets: torch.Tensor, value: int) -> None:
    targets[0] = value


def _half(targets: torch.Tensor, value: int) -> None:
    targets[: (len(targets) + 1) // 2] = value


def _last_half(targets: torch.Tensor, value: int) -> None:
    targets[len(targets) // 2 :] = value


IGNORED_PARTS: dict[str, Callable[[torch.Tensor, int], None]] = {
    "none": _nothing,
    "some": _some,
    "sample": _sample,
    "half": _half,
    "last_half": _last_half,
}
"""Which targets are ignored."""


def make_batches(case: Case) -> list[Batch]:
    """Returns the batches of all steps. The same in every process."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    return [_batch(case, samples, length, generator) for samples, length in case.batches]


def _height(length: int) -> int:
    """Returns the height of images, which is odd for an odd length."""
    return 2 + length % 2


def _batch(case: Case, samples: int, length: int, generator: torch.Generator) -> Batch:
    has_tokens = "tokens" in case.inputs or case.container == "decoder"
    if has_tokens:
        inputs = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    else:
        features = case.width if case.inputs == "raw" else FEATURES
        shape = {
            "vectors": (samples, features),
            "images": (samples, features, _height(length), length),
        }
        inputs = torch.randn(
            shape.get(case.inputs, (samples, length, features)), generator=generator
        )
    positions = {"vectors": (), "images": (_height(length) * length,)}.get(case.inputs, (length,))
    places = (
        (samples,)
        if case.head == "pooled" and case.container != "decoder"
        else (samples, *positions)
    )
    kind = LOSSES[case.loss]
    if kind.targets == "classes":
        classes = CLASSES - 1 if case.head == "masked" else CLASSES
        targets = torch.randint(0, classes, places, generator=generator)
        IGNORED_PARTS[case.ignored](targets, kind.ignored)
        return inputs, targets
    shape = (*places, VOCABULARY if case.container == "decoder" else CLASSES)
    targets = torch.randn(shape, generator=generator)
    if kind.targets == "probabilities":
        targets = targets.softmax(dim=-1)
    elif kind.targets == "bits":
        targets = (targets > 0).to(targets.dtype)
    if case.head == "channels" and len(shape) == 3:
        targets = targets.transpose(1, 2)
    return inputs, targets
