"""Random models: a stem for the inputs, blocks, and a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from random_models.blocks import BLOCKS
from random_models.case import Case
from unisono.parallel import TransformerModel
from unisono.planner import Transformer

CLASSES = 5
VOCABULARY = 7
FEATURES = 3
POSITIONS = 12
"""Most positions of a sequence."""


class Chain(nn.Module):
    """Calls modules one after the other, in a loop."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Skipping(nn.Module):
    """Adds the result of the stem to the input of the head."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stem, *inner, self.head = parts
        self.inner = nn.ModuleList(inner)

    def forward(self, x):
        first = x = self.stem(x)
        first = first * 1.0
        for part in self.inner:
            x = part(x)
        return self.head(x + first)


class Named(nn.Module):
    """Returns a dictionary or a tuple with the result of its inner module."""

    def __init__(self, inner: nn.Module, kind: type) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x):
        y = self.inner(x)
        return {"logits": y, "scale": y.detach().mean()} if self.kind is dict else (y, y.detach())


class Images(nn.Module):
    """Maps images (samples, channels, height, width) to positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(FEATURES, width, 3, padding=1)

    def forward(self, x):
        return self.inner(x).flatten(2).transpose(1, 2)


class Pooled(nn.Module):
    """A head with one result for each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.inner(x.mean(dim=1) if x.dim() == 3 else x)


class ChannelHead(nn.Module):
    """A head whose classes are dimension 1, as torch's losses expect."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, CLASSES)

    def forward(self, x):
        y = self.inner(x)
        return y.transpose(1, 2) if y.dim() == 3 else y


class MaskedHead(nn.Module):
    """A head with logits of minus infinity for the last class, which is no target."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.inner(x).masked_fill(torch.arange(CLASSES) == CLASSES - 1, -torch.inf)


STEMS: dict[str, Callable[[int], nn.Module]] = {
    "features": lambda width: nn.Linear(FEATURES, width),
    "vectors": lambda width: nn.Linear(FEATURES, width),
    "tokens": lambda width: nn.Embedding(VOCABULARY, width),
    "padded_tokens": lambda width: nn.Embedding(VOCABULARY, width, padding_idx=0),
    "images": Images,
    "raw": lambda width: nn.Identity(),
}
"""First modules: they map inputs to (samples, positions, width); "vectors" to (samples, width)."""

HEADS: dict[str, Callable[[int], nn.Module]] = {
    "positions": lambda width: nn.Linear(width, CLASSES),
    "pooled": Pooled,
    "channels": ChannelHead,
    "masked": MaskedHead,
}

CONTAINERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "sequential": lambda parts: nn.Sequential(*parts),
    "chain": Chain,
    "skipping": Skipping,
    "nested": lambda parts: nn.Sequential(
        parts[0], nn.Sequential(*parts[1:-1], nn.Identity()), parts[-1]
    ),
    "dict_result": lambda parts: Named(nn.Sequential(*parts), dict),
    "tuple_result": lambda parts: nn.Sequential(*parts[:-1], Named(parts[-1], tuple)),
}
"""How the parts of a model are put together. "decoder" inserts the blocks in a decoder."""


def make_model(case: Case) -> nn.Module:
    """Returns the model of a case, in training mode. The same in every process."""
    torch.manual_seed(case.seed)
    inner = [module for name in case.blocks for module in BLOCKS[name].make(case.width)]
    if case.container == "decoder":
        return _decoder(case, inner)
    parts = [STEMS[case.inputs](case.width), *inner, HEADS[case.head](case.width)]
    return CONTAINERS[case.container](parts)


def _decoder(case: Case, inner: Sequence[nn.Module]) -> nn.Module:
    """Returns a decoder of two layers, with the blocks between them."""
    experts = {"experts": 4, "top_k": 2, "expert_ffn": 5, "dense_layers": 1}
    shape = Transformer(
        layers=2,
        hidden=case.width,
        heads=2,
        ffn=7,
        vocab=VOCABULARY,
        positions=POSITIONS,
        tied=case.head != "pooled",
        **(experts if case.inputs == "padded_tokens" else {}),
    )
    model = TransformerModel(shape, seed=case.seed)
    children = dict(model.named_children())
    return nn.Sequential(
        children["embedding"],
        children["layer0"],
        *inner,
        children["layer1"],
        children["head"],
    )
