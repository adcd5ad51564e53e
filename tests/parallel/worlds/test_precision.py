"""Runs that compute in bfloat16: each layout trains like one process with casts made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.checkpoint import checkpoint

from cases_in_turn import turn
from parallel.worlds.dlrm_training import click_batches
from parallel.worlds.dlrm_training import small_shape as dlrm_shape
from parallel.worlds.layout_training import (
    expert_shape,
    rank_block,
    small_shape,
    token_batches,
)
from parallel.worlds.precise_training import (
    BF16,
    CLIP,
    LOSS_BOUND,
    UNIT,
    compare,
    compare_transformer,
    half,
    half_batches,
    half_model,
    sgd,
)
from parallel.worlds.traced_models import TracedDecoder
from unisono.parallel import DLRM, CrossEntropy, Layout, Precision, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_precision(outcome):
    outcome.require_success()


def own_data_parallelism_and_zero(world):
    for text, microbatches in (
        ("dp=4", 1), ("dp=4,zero=1", 2), ("dp=4,zero=2", 1), ("dp=4,zero=2", 2),
        ("dp=4,zero=3", 2), ("dp=4,zero=3,dp_replicate=2", 2),
    ):  # fmt: skip
        with turn(text=text, microbatches=microbatches):
            compare_transformer(text, microbatches=microbatches, tied=False)


def own_embedding_tables(world):
    shape = dlrm_shape()
    batches = [(x, y.float()) for x, y in click_batches(shape, samples=8)[:2]]
    for kind in ("table", "column", "row", "replicated"):
        with turn(kind=kind):
            compare(
                "dp=4",
                lambda kind=kind: DLRM(shape, placement=kind, samples=8),
                lambda: binary_cross_entropy_with_logits,
                batches,
                microbatches=2,
            )


def own_narrow_sums(world):
    """Tests that gradients are summed in the type of `reduction`: half of the bytes."""
    narrow = Precision(computation=torch.bfloat16, reduction=torch.bfloat16)
    for text in ("dp=4", "dp=4,zero=1", "dp=4,zero=3", "dp=4,zero=3,dp_replicate=2"):
        with turn(text=text):
            reports = [compare_transformer(text, tied=False, precision=p) for p in (BF16, narrow)]
            wide, few = (sum(sum(row) for row in each.bytes_sent.values()) for each in reports)
            # with ZeRO-3, 2 gathers of 2 bytes and a sum of 4 bytes become three of 2 bytes
            factor = {"dp=4": 1 / 2, "dp=4,zero=1": 3 / 4, "dp=4,zero=3": 3 / 4}.get(text)
            assert factor is None or few / wide == pytest.approx(factor, rel=0.02)


def own_tensor_parallelism(world):
    for text in ("tp=4", "tp=4,sequence_parallel=1", "tp=2,dp=2,zero=3", "tp=4,tensor=2d"):
        for changes in ({}, {"gated": True}):
            with turn(text=text, **changes):
                compare_transformer(text, microbatches=2, **changes)


def own_pipelines(world):
    for text, microbatches in (
        ("pp=4", 4), ("pp=4,schedule=zb1p", 4), ("pp=2,dp=2,zero=3", 2), ("pp=2,tp=2", 2),
        ("pp=2,dp=2,vpp=2,schedule=zbv", 4),
    ):  # fmt: skip
        with turn(text=text):
            compare_transformer(text, microbatches=microbatches)


def own_messages_of_pipelines(world):
    shape = small_shape(tied=False)
    narrow = compare_transformer("pp=4", microbatches=4, tied=False).bytes_sent["pp"]
    wide = compare_transformer(
        "pp=4", microbatches=4, tied=False,
        precision=Precision(computation=torch.float32),
    ).bytes_sent["pp"]  # fmt: skip
    header = 16
    assert shape.hidden and (sum(narrow) - 3 * header) * 2 == sum(wide) - 3 * header


def own_sequences(world):
    for context in ("ring", "ulysses", "allgather"):
        with turn(context=context):
            compare_transformer("cp=2,dp=2", microbatches=2, context=context)


def own_experts(world):
    for text, microbatches in (
        ("dp=4,ep=4", 1), ("dp=2,tp=2,ep=2", 2), ("pp=2,dp=2,ep=2", 2), ("dp=4,ep=2,zero=3", 2)
    ):  # fmt: skip
        with turn(text=text):
            compare_transformer(text, microbatches=microbatches, **expert_shape())


def own_traced_pipelines(world):
    torch.set_default_dtype(torch.float32)
    shape = small_shape()
    batches = token_batches(shape)[:2]
    compare(
        "pp=2,dp=2",
        lambda: TracedDecoder(shape.vocab, shape.positions),
        lambda: CrossEntropy(shape.vocab),
        batches,
        microbatches=2,
        example=batches[0][0],
    )


class Unusual(nn.Module):
    """Adds a buffer of float32, owns parameters beside its modules, and recomputes a module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.register_buffer("shift", torch.linspace(0, 1, 6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 6))
        self.inner, self.norm = nn.Linear(6, 6), nn.RMSNorm(6)
        self.recurrent, self.last = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        x = checkpoint(lambda y: torch.tanh(self.inner(y)), x + self.shift, use_reentrant=False)
        x = self.norm(x * self.scale) + self.shift
        return self.last(self.recurrent(x.unsqueeze(1))[0].squeeze(1))


def own_unusual_modules(world):
    torch.manual_seed(6)
    batches = [(torch.randn(8, 6), torch.rand(8, 3)) for _ in range(2)]
    for text, microbatches in (("dp=4", 1), ("dp=4,zero=1", 2), ("dp=4,zero=3", 2)):
        with turn(text=text):
            run = parallelize(
                Unusual(), Layout.parse(text), loss=mse_loss, optimizer=sgd, clip=CLIP,
                microbatches=microbatches, precision=BF16,
            )  # fmt: skip
            exact = parallelize(
                Unusual(), Layout.parse(text), loss=mse_loss, optimizer=sgd, clip=CLIP,
                microbatches=microbatches,
            )  # fmt: skip
            for batch in batches:
                assert float(run.step(*batch)) == pytest.approx(float(exact.step(*batch)), rel=0.02)
                assert run.gradient_norm == pytest.approx(exact.gradient_norm, rel=0.05)
            run.mesh.close()
            exact.mesh.close()


def own_bounds_from_float64(world):
    """Tests the error of gradients against float64: a unit for each of the roundings in sequence,
    of weights, activations and gradients of a layer."""
    depth = 4
    for seed in range(4):
        torch.manual_seed(seed)
        batch = torch.randn(16, 12), torch.randn(16, 12)

        def make(dtype=torch.float32, seed=seed):
            torch.manual_seed(seed)
            layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(depth)]
            return nn.Sequential(*layers).to(dtype)

        exact = make(torch.float64)
        mse_loss(exact(batch[0].double()), batch[1].double()).backward()
        gradients = {name: each.grad for name, each in exact.named_parameters()}
        largest = max(float(each.abs().max()) for each in gradients.values())
        for text in ("dp=4", "dp=2,pp=2", "dp=4,zero=3"):
            run = parallelize(
                make(), Layout.parse(text), loss=mse_loss, optimizer=sgd, microbatches=2,
                precision=BF16,
            )  # fmt: skip
            before = dict(make().named_parameters())
            run.step(*batch)
            for held in (held for each in run.sets for held in each.held):
                values, block = rank_block(run, held)
                change = (before[held.name].detach()[block] - values).double()
                error = (change - gradients[held.name][block]).abs()
                worst = float(error.max()) if error.numel() else 0.0
                assert worst < 3 * depth * UNIT * largest, (seed, text, held.name, worst)
            run.mesh.close()


def own_types_of_parameters(world):
    """Tests that `parameters` converts a model, and that an export has this type."""
    model = half_model().bfloat16()
    run = parallelize(
        model, Layout(dp=4, zero=1), loss=mse_loss, optimizer=sgd,
        precision=Precision(parameters=torch.float32, computation=torch.bfloat16),
    )  # fmt: skip
    run.step(*half_batches()[0])
    assert {each.values.dtype for found in run.sets for each in found.held} == {torch.float32}
    weights = sum(each.numel() for each in half_model().parameters())
    assert run.report().memory["weights"][0] == 4 * weights
    run.mesh.close()


def own_refusals(world):
    run = parallelize(half_model(), Layout(dp=4), loss=mse_loss, optimizer=sgd, precision=BF16)
    batch = half_batches()[0]
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(ValueError, match=r"autocast converts to torch.float16, but the precision"),
    ):
        run.step(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        run.step(*batch)
    run.mesh.close()
    with pytest.raises(ValueError, match=r"expected Precision\(\.\.\.\), .*, got torch.bfloat16"):
        parallelize(
            half_model(), Layout(dp=4), loss=mse_loss, optimizer=sgd, precision=torch.bfloat16
        )
    own = BF16 if dist.get_rank() == 1 else None
    with pytest.raises(
        ValueError, match=r"one precision on all .* None on rank 0 and Precision\(.*on rank 1"
    ):
        parallelize(half_model(), Layout(dp=4), loss=mse_loss, optimizer=sgd, precision=own)
    with pytest.raises(ValueError, match=r"0.weight is kept in float16, .* parameters = torch.flo"):
        parallelize(
            half_model().half(), Layout(dp=4), loss=mse_loss, optimizer=sgd, precision=half()
        )


class Partial(nn.Module):
    """Has a parameter that no pass uses, in a module with others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.used, self.unused = nn.Linear(6, 6), nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return torch.tanh(self.used(x))


def own_unused_parameters(world):
    torch.set_default_dtype(torch.float32)
    inputs = half_batches()[0][0]
    found = []
    for text in ("dp=4", "dp=4,zero=3", "dp=2,pp=2,zero=3", "dp=2,pp=2,zero=2"):
        with turn(text=text):
            torch.manual_seed(2)
            run = parallelize(
                nn.Sequential(Partial(), Partial()), Layout.parse(text), loss=mse_loss,
                optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, weight_decay=0.5),
                microbatches=4, precision=BF16,
            )  # fmt: skip
            found.append([float(run.step(inputs, inputs)) for _ in range(2)])
            held = {each.name: each for group in run.sets for each in group.held}
            if "0.unused" in held:
                values, _ = rank_block(run, held["0.unused"])
                assert torch.equal(values, torch.ones_like(values))  # not decayed
            run.mesh.close()
    assert all(each == pytest.approx(found[0], rel=LOSS_BOUND) for each in found)


class Bessel(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * torch.special.bessel_j0(y.detach())


def own_functions_without_the_type(world):
    torch.set_default_dtype(torch.float32)
    inputs = half_batches()[0][0]
    for text in ("dp=4", "dp=4,zero=3", "pp=4"):
        run = parallelize(
            nn.Sequential(*(Bessel(6, 6) for _ in range(4))), Layout.parse(text), loss=mse_loss,
            optimizer=sgd, microbatches=4, precision=BF16,
        )  # fmt: skip
        match = r"the model cannot compute in torch.bfloat16: .*not implemented for 'BFloat16'; "
        with turn(text=text), pytest.raises((ValueError, RuntimeError), match=match) as caught:
            run.step(inputs, inputs)
        assert "\n" not in str(caught.value)
        run.mesh.close()
