"""Blocks with unusual forward or backward passes: in place, hooks, recomputation, tuples."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from random_models.block import Block, block
from unisono.parallel.layers import LayoutDropout


class Split(nn.Module):
    """Returns two tensors, in a tuple, a list or a dictionary."""

    def __init__(self, width: int, kind: type = tuple) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(width, width), kind

    def forward(self, x):
        y = self.inner(x)
        return {"x": x, "y": y} if self.kind is dict else self.kind((x, y))


class Join(nn.Module):
    """Adds the two tensors of `Split`."""

    def forward(self, both):
        x, y = both.values() if isinstance(both, dict) else both
        return x + y


class SplitWithIds(nn.Module):
    """Returns its input and whole numbers."""

    def forward(self, x):
        return x, (x.detach()[..., 0] > 0).long()


class LookUpIds(nn.Module):
    """Adds the rows of a table for the numbers of `SplitWithIds`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(2, width)

    def forward(self, both):
        x, ids = both
        return x + self.table(ids)


class Recomputed(nn.Module):
    """Recomputes its inner module in the backward pass."""

    def __init__(self, inner: nn.Module, *, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.inner, self.reentrant, self.times = inner, reentrant, times

    def forward(self, x):
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x


class InPlace(nn.Module):
    """Changes its input in place."""

    def forward(self, x):
        return x.mul_(0.9).add_(0.1)


class AfterLinear(nn.Module):
    """Changes the result of a linear layer in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        y = self.inner(x)
        y += 0.5
        return y.relu_()


class Cube(torch.autograd.Function):
    """x cubed, with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class OwnFunction(nn.Module):
    def forward(self, x):
        return x + Cube.apply(x) / 10


class Branch(nn.Module):
    """Chooses a linear layer by the shape, and a factor by the values of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x) if x.shape[-1] > 1 and bool((x.detach() < 1e9).all()) else x


class GradientHook(nn.Module):
    """Halves the gradient of an activation by a hook on the tensor."""

    def forward(self, x):
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return y


class Detached(nn.Module):
    """Stops the gradient of half of its result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x.detach())


class Strided(nn.Module):
    """Returns a view with other strides."""

    def forward(self, x):
        return x.flip(-1).transpose(0, -1).contiguous().transpose(0, -1)


class View(nn.Module):
    """Returns a view of its input."""

    def forward(self, x):
        return x.view(-1, x.shape[-1]).view(x.shape)


class Merged(nn.Module):
    """Merges samples and positions into one dimension and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x.flatten(0, -2)).reshape(x.shape)


class Keywords(nn.Module):
    """Calls its inner module with keyword arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x, *, factor=0.5):
        return self.inner(input=x) * factor


class Gradient(nn.Module):
    """Takes a derivative inside the forward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (found,) = torch.autograd.grad(torch.tanh(self.inner(y)).sum(), y, create_graph=True)
        return x + found


def _hooked(kind: str):
    def make(width: int) -> nn.Module:
        made = nn.Linear(width, width)
        if kind == "before":
            made.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 2,))
        elif kind == "after":
            made.register_forward_hook(lambda _, arguments, result: result * 0.5 + arguments[0])
        elif kind == "backward":
            made.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 0.5,))
        else:
            made.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 0.5,))
        return made

    return make


def _dropping(width: int) -> nn.Module:
    dropout = LayoutDropout(0.3, seed=4, site="recomputed", width=width)
    return nn.Sequential(nn.Linear(width, width), dropout)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


FLOW_BLOCKS: dict[str, Block] = {
    "relu_in_place": block(lambda w: nn.Linear(w, w), lambda _: nn.ReLU(inplace=True)),
    "relu_in_place_first": block(lambda _: nn.ReLU(inplace=True), lambda w: nn.Linear(w, w)),
    "in_place": block(lambda w: nn.Linear(w, w), lambda _: InPlace()),
    "after_linear": block(AfterLinear),
    "tuple": block(Split, lambda _: Join()),
    "list": block(lambda w: Split(w, list), lambda _: Join()),
    "dict": block(lambda w: Split(w, dict), lambda _: Join()),
    "tuple_inside": block(lambda w: nn.Sequential(Split(w), Join())),
    "dict_inside": block(lambda w: nn.Sequential(Split(w, dict), Join())),
    "ids_between": block(lambda _: SplitWithIds(), LookUpIds),
    "checkpoint": block(lambda w: Recomputed(_mlp(w), reentrant=False)),
    "checkpoint_reentrant": block(lambda w: Recomputed(_mlp(w), reentrant=True)),
    "checkpoint_twice": block(lambda w: Recomputed(_mlp(w), reentrant=False, times=2)),
    "checkpoint_reentrant_twice": block(lambda w: Recomputed(_mlp(w), reentrant=True, times=2)),
    "checkpoint_dropout": block(
        lambda w: Recomputed(_dropping(w), reentrant=False), needs_positions=True
    ),
    "own_function": block(lambda _: OwnFunction()),
    "branch": block(Branch),
    "gradient_hook": block(lambda _: GradientHook()),
    "hook_before": block(_hooked("before")),
    "hook_after": block(_hooked("after")),
    "hook_backward": block(_hooked("backward")),
    "hook_before_backward": block(_hooked("before_backward")),
    "hooks_in_pair": block(_hooked("after"), lambda _: nn.ReLU(), _hooked("before")),
    "detached": block(Detached),
    "strided": block(lambda _: Strided()),
    "view": block(lambda _: View()),
    "merged": block(Merged),
    "keywords": block(Keywords),
    "gradient": block(Gradient),
    "identity": block(lambda _: nn.Identity()),
}
