"""Modules and parameters of unusual kinds: each trains as in one process, or is refused in a line
that says what works.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, sgd
from parallel.worlds.test_foreign_parameters import WIDTH, a_run, batches, refused, small_model

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
ZEROS = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3")


def test_unusual_modules(outcome):
    outcome.require_success()


def compare_losses(text: str, make_model: Callable[[], nn.Module], rel: float = 1e-12) -> None:
    """Fails unless three losses equal those of one process; for models that torch cannot copy."""
    alone = make_model()
    optimizer, expected = sgd(list(alone.parameters())), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(alone(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    run = a_run(text, make_model(), microbatches=1)
    found = [float(run.step(*batch)) for batch in batches()]
    assert found == pytest.approx(expected, rel=rel), (text, found, expected)
    run.mesh.close()


class Kinds(nn.Module):
    """A linear layer, and parameters that are complex or empty."""

    def __init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(4)
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.empty = nn.Linear(0, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = (x.to(torch.complex128) @ self.turn).abs()
        return self.linear(inner) + self.empty(x[:, :0]) + self.nothing.sum()


def own_kinds_of_parameters(world):
    for text in ZEROS:
        with turn(text=text):
            compare_model(text, Kinds, lambda: functional.mse_loss, batches(), clip=0.01)


class Counted(Kinds):
    """Has integers too, and a matrix of another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.ones(WIDTH, dtype=torch.int64), requires_grad=False)
        self.rough = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.float() @ self.rough).double() * self.counts)


def own_kinds_of_parameters_beside_each_other(world):
    for text in ZEROS:
        with turn(text=text):
            compare_losses(text, Counted, rel=1e-6)


class Sparse(nn.Module):
    """A parameter without a dense array."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.weight, x.T).T


def own_parameters_without_values(world):
    torch.set_default_dtype(torch.float64)
    for text in ZEROS:
        with turn(text=text):
            refused("weight: expected a dense tensor", lambda text=text: a_run(text, Sparse()))
            lazy = nn.Sequential(nn.LazyLinear(WIDTH))
            refused("0.weight: expected a parameter with a shape",
                    lambda text=text, lazy=lazy: a_run(text, lazy))  # fmt: skip
            empty = nn.Sequential(nn.Bilinear(WIDTH, WIDTH, WIDTH, device="meta"))
            empty[0].reset_parameters = None
            refused("0.weight: the parameter is on the device meta, and no init_weights",
                    lambda text=text, empty=empty: a_run(text, empty))  # fmt: skip


class Table(nn.Module):
    """Looks rows up, in a module or by a function."""

    def __init__(self, module: nn.Module | None, **options: object) -> None:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(4)
        super().__init__()
        self.module, self.options = module, options
        if module is None:
            self.weight = nn.Parameter(torch.randn(10, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.abs() * 3).long().clamp(max=9)
        if self.module is None:
            return functional.embedding(rows, self.weight, **self.options).sum(1)
        found = self.module(rows)
        return found if found.dim() == 2 else found.sum(1)


OPTIONS = ({"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True})


def tables(options: dict[str, object]) -> list[Callable[[], nn.Module]]:
    def seeded(make_module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make_model() -> nn.Module:
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(4)
            return Table(make_module())

        return make_model

    return [
        seeded(lambda: nn.Embedding(10, WIDTH, **options)),
        seeded(lambda: nn.EmbeddingBag(10, WIDTH, mode="sum", **options)),
        lambda: Table(None, **options),
    ]


def own_lookups_that_depend_on_the_part(world):
    for options in OPTIONS:
        for number, make_model in enumerate(tables(options)):
            with turn(options=options, number=number):
                if "sparse" in options:
                    for text in ("dp=2", "dp=2,zero=1"):
                        compare_losses(text, make_model)
                    message, texts = "sparse = True", ("dp=2,zero=2", "dp=2,zero=3")
                else:
                    message = "max_norm|scale_grad_by_freq"
                    texts = ("dp=2", "dp=2,zero=1", "dp=2,zero=3")
                for text in texts:
                    refused(f"({message}).* works",
                            lambda text=text, make=make_model: a_run(text, make()))  # fmt: skip
    refused(
        "SparseAdam updates the rows",
        lambda: a_run("dp=2", tables({"sparse": True})[0](), optimizer=torch.optim.SparseAdam),
    )


def weight_normed(model: nn.Sequential) -> nn.Module:
    weight_norm(model[0])
    return model


def spectrally_normed(model: nn.Sequential) -> nn.Module:
    spectral_norm(model[2])
    return model


def parametrized(model: nn.Sequential) -> nn.Module:
    parametrizations.weight_norm(model[2])
    return model


def pruned(model: nn.Sequential) -> nn.Module:
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


def own_layers_that_compute_their_weights(world):
    for change in (weight_normed, spectrally_normed, parametrized, pruned):
        with turn(change=change.__name__):

            def make_model(change=change) -> nn.Module:
                return nn.Sequential(*small_model()[:3], change(small_model()))

            refused("found nothing to divide in Sequential .[02] ",
                    lambda change=change: a_run("tp=2", change(small_model())))  # fmt: skip
            for text in ("tp=2", "dp=2", "dp=2,zero=3"):
                compare_losses(text, make_model)


class Doubled(nn.Sequential):
    """A sequence with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Scaled(nn.Sequential):
    """A sequence with a parameter of its own."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.scale = nn.Parameter(torch.ones(WIDTH))


def own_sequences_that_do_more_than_call_their_modules(world):
    torch.set_default_dtype(torch.float64)
    hooked = small_model()
    hooked.register_forward_hook(lambda _, inputs, result: 2 * result)
    for model in (Doubled(*small_model()), Scaled(*small_model()), hooked):
        with turn(kind=type(model).__name__):
            refused("a pipeline cuts an nn.Sequential without own forward, hooks, parameters",
                    lambda model=model: a_run("pp=2", model))  # fmt: skip
    compare_model(
        "pp=2",
        lambda: Doubled(*small_model()),
        lambda: functional.mse_loss,
        batches(),
        microbatches=2,
        clip=None,
        example=batches()[0][0],
        unpredicted=("pp",),
    )
    refused("found nothing to divide", lambda: a_run("tp=2", Doubled(*small_model())))


class Turned(nn.Module):
    """Calls a norm of channels on vectors, as one channel for each element."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x):
        rows = x.view(len(x), 2, -1)
        return x + self.norm(torch.cat([rows, rows.square()], 2)).mean(2).repeat_interleave(
            x.shape[1] // 2, 1
        )


def own_instance_norms_are_no_batch_norms(world):
    """Tests that norms of each sample train, also first in a model and on parts of one sample."""
    for affine in (False, True):
        for text, microbatches in (("dp=2", 1), ("dp=2,zero=3", 4)):
            with turn(affine=affine, text=text):
                compare_model(
                    text,
                    lambda affine=affine: nn.Sequential(
                        Turned(nn.InstanceNorm1d(2, affine=affine)), *linear_pair()
                    ),
                    lambda: functional.mse_loss,
                    batches(),
                    microbatches=microbatches,
                    unpredicted=("dp",),
                )
    tracking = nn.Sequential(*linear_pair(), Turned(nn.InstanceNorm1d(2, track_running_stats=True)))
    run = a_run("dp=2", tracking)
    with pytest.raises(ValueError, match=r"norm\.running_mean: the forward pass writes"):
        run.step(*batches()[0])
    run.mesh.close()


def linear_pair() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
