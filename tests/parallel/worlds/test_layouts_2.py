"""Layouts of two ranks. With each single strategy, training equals training in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallel.worlds.layout_training import (
    compare_in_float32,
    compare_model,
    compare_schedules,
    compare_traced,
    compare_transformer,
    crowded_model,
    expert_shape,
    small_shape,
    token_batches,
)
from unisono.parallel import CrossEntropy, Layout, TransformerModel
from unisono.parallel.run import ParallelRun, parallelize
from unisono.parallel.run.pipeline.model_stages import stage_names

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)


def test_layouts_2(outcome):
    outcome.require_success()


class NormedDescent(torch.optim.Optimizer):
    """Descent by steps that are as long as a fixed share of a parameter's norm (LARS, Algorithm 1
    of arXiv 1708.03888, without momentum).
    """

    update_unit = "parameter"

    def __init__(self, parameters):
        super().__init__(parameters, {"rate": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                rate = group["rate"] * each.norm() / (each.grad.norm() + 0.1)
                each.sub_(rate * each.grad)


def decayed_matrices(parameters):
    """Returns AdamW with weight decay for matrices only."""
    matrices = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # with a small epsilon, rounding errors decide the steps of gradients that are zero
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def own_optimizers(world):
    """Tests an optimizer of two groups of parameters, and one that uses whole parameters.

    This is the first check of the world's ranks: for collectives of DTensors, torch keeps the
    group of the first mesh with these ranks, even if the group is destroyed.
    """
    shape = small_shape(tied=False)
    for make_optimizer, texts in (
        (NormedDescent, ("dp=2,zero=3", "dp=2", "pp=2")),
        (decayed_matrices, ("dp=2", "dp=2,zero=2", "dp=2,zero=3", "pp=2")),
    ):
        for text in texts:
            compare_model(
                text,
                lambda: TransformerModel(shape, seed=1),
                lambda: CrossEntropy(shape.vocab),
                token_batches(shape),
                microbatches=2,
                make_optimizer=make_optimizer,
                # norms of DTensors send bytes too
                unpredicted=("dp",) if make_optimizer is NormedDescent else (),
            )


def own_data(world):
    compare_transformer("dp=2")
    compare_transformer("dp=2", microbatches=3)  # 8 samples in microbatches of 3, 3 and 2


def own_sharded_states(world):
    compare_transformer("dp=2,zero=1", microbatches=2)


def own_fully_sharded(world):
    compare_transformer("dp=2,zero=3", microbatches=2, tied=False)
    compare_transformer("dp=2,zero=2", microbatches=2)


def own_tensor(world):
    compare_transformer("tp=2", microbatches=2, vocab=7)
    compare_transformer("tp=2", heads=6, kv_heads=2, head_dim=4, gated=True, tied=False, ffn=7)
    compare_transformer("tp=2", microbatches=2, samples=5)  # microbatches of 3 and 2 samples


def own_sequence(world):
    # the ranks have 6 and 5 positions
    compare_transformer("tp=2,sequence_parallel=1", positions=11)


def own_every_schedule(world):
    compare_schedules(2)
    compare_transformer("pp=2,schedule=gpipe", microbatches=2, tied=False)


def own_context(world):
    compare_transformer("cp=2")
    compare_transformer("cp=2,zero=1", microbatches=2)
    compare_transformer("cp=2", context="allgather", is_causal=False)
    # two ranks divide six heads, and three heads of keys and values
    compare_transformer("cp=2", context="ulysses", heads=6, kv_heads=3)


def own_experts(world):
    # microbatches of 3, 3 and 2 samples
    compare_transformer("dp=2,ep=2", microbatches=3, **expert_shape())
    compare_transformer("cp=2,ep=2", **expert_shape())
    compare_transformer("dp=2,zero=3", **expert_shape())
    compare_transformer("dp=2,ep=2,zero=3", microbatches=3, **expert_shape())  # whole experts


def own_experts_with_divided_matrices(world):
    # the ranks route 6 and 5 positions
    compare_transformer("tp=2,ep=2", **expert_shape(positions=11))
    compare_transformer("tp=2,ep=2,sequence_parallel=1", **expert_shape(positions=11))


def own_experts_in_a_pipeline(world):
    """Tests a pipeline of experts, whose balance losses count once for each microbatch."""
    compare_transformer(
        "pp=2,vpp=2,schedule=zbv", microbatches=4, **expert_shape(layers=4, dense_layers=0)
    )


def own_experts_without_tokens(world):
    """Tests training in which two experts get no tokens. The experts have scores s, -s, 0 and 0, so
    that no token chooses the last two, and rank 1 has no rows.
    """
    shape = small_shape(**expert_shape(top_k=1, layers=1, dense_layers=0))

    def model() -> nn.Module:
        made = TransformerModel(shape, seed=1)
        router = made.get_parameter("layer0.network.router.weight").detach()
        router[1], router[2], router[3] = -router[0], 0, 0
        return made

    batches = token_batches(shape)
    compare_model("dp=2,ep=2", model, lambda: CrossEntropy(shape.vocab), batches[:1])


def own_all_tokens_choose_one_expert(world):
    """Tests training in which rank 1 has no rows for its experts."""
    shape = small_shape(**expert_shape(top_k=1, layers=1, dense_layers=0, gated=False))
    run = compare_model(
        "dp=2,ep=2",
        lambda: crowded_model(shape),
        lambda: CrossEntropy(shape.vocab),
        token_batches(shape)[:1],
    )
    # half of the batch goes from rank 1 to rank 0 and back
    assert run.stages[0][1].get_submodule("layer0.network").rows_moved == 4 * shape.positions


def own_targets_that_do_not_count(world):
    """Tests training in which a rank, a microbatch or a part of each sequence has no targets."""
    shape = small_shape()
    halves = [(inputs, targets.clone()) for inputs, targets in token_batches(shape)]
    middles = [(inputs, targets.clone()) for inputs, targets in token_batches(shape)]
    for (_, half), (_, middle) in zip(halves, middles, strict=True):
        half[4:] = -100  # the samples of rank 1, or the second microbatch
        middle[:, 3:9] = -100  # the positions of rank 1
    for text, batches, microbatches in (
        ("dp=2", halves, 1),
        ("dp=2,zero=3", halves, 2),
        ("pp=2", halves, 2),
        ("tp=2", halves, 2),
        ("cp=2", middles, 1),
    ):
        compare_model(
            text,
            lambda: TransformerModel(shape, seed=1),
            lambda: CrossEntropy(shape.vocab),
            batches,
            microbatches=microbatches,
        )


def own_float32(world):
    for text, microbatches in (("dp=2,zero=1", 2), ("tp=2", 1), ("pp=2", 4), ("cp=2", 1)):
        compare_in_float32(text, microbatches=microbatches)
    compare_in_float32("dp=2,zero=3", tied=False)
    compare_in_float32("dp=2,ep=2", **expert_shape())


def plain_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Linear(7, 3))


def own_any_sequence_of_modules(world):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(3)]
    for text in ("dp=2", "dp=2,zero=1", "dp=2,zero=3"):
        compare_model(text, plain_model, lambda: nn.functional.mse_loss, batches)
    other = ("tp",)  # pairs of nn.Linear have no closed form
    compare_model("tp=2", plain_model, lambda: nn.functional.mse_loss, batches, unpredicted=other)


class Containers(nn.Module):
    """Calls modules in a list of lists and a dictionary, and uses parameters of a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.pairs = nn.ModuleList(nn.ModuleList(nn.Linear(6, 6) for _ in range(2)) for _ in "ab")
        self.named = nn.ModuleDict({"head": nn.Linear(6, 3)})
        self.factors = nn.ParameterList(torch.randn(6) for _ in range(2))
        self.named["again"] = self.pairs[0][0]  # counts once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair, factor in zip(self.pairs, self.factors, strict=True):
            x = x + pair[1](torch.tanh(pair[0](x))) * factor
        return self.named["head"](x)


def own_containers_of_modules(world):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(3)]
    for text in ("dp=2,zero=2", "dp=2,zero=3"):
        compare_model(text, Containers, lambda: nn.functional.mse_loss, batches, microbatches=2)


class OddParameters(nn.Module):
    """Has a parameter without dimensions, a transposed one and one with channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(3, 8).t())
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).flatten(1) @ self.matrix * self.factor


def own_odd_parameters(world):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    batches = [(torch.randn(8, 3, 3, 3), torch.randn(8, 3)) for _ in range(3)]
    for text in ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"):
        compare_model(text, OddParameters, lambda: nn.functional.mse_loss, batches, microbatches=2)


class Summed(nn.Module):
    """Sums the positions of each sample, so its gradient is an expansion."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


def own_stages_with_views(world):
    """Tests stages whose results or gradients are views: rows of `nn.Linear`, and sums."""
    torch.set_default_dtype(torch.float64)

    def four_linears() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def summed() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(Summed(), nn.Linear(6, 6)))

    def reshaped() -> nn.Module:
        return nn.Sequential(*list(four_linears())[:3], nn.Sequential(Summed(), nn.Flatten()))

    torch.manual_seed(6)
    batches = [(torch.randn(8, 5, 6), torch.randn(8, 5, 6)) for _ in range(2)]
    sums = [(inputs, targets[:, 0]) for inputs, targets in batches]
    zbv = "pp=2,vpp=2,schedule=zbv"
    for text, make_model, data in (
        (zbv, four_linears, batches),
        ("pp=2", summed, sums),
        (zbv, reshaped, sums),
    ):
        compare_model(
            text,
            make_model,
            lambda: nn.functional.mse_loss,
            data,
            microbatches=4,
            clip=None,
            unpredicted=("pp",),  # the sizes of messages have no closed form
        )


def own_what_cannot_be_is_refused_in_one_line(world):
    def refused(model: nn.Module, text: str, pattern: str, **options: int) -> None:
        with pytest.raises(ValueError, match=pattern) as caught:
            parallelize(
                model,
                Layout.parse(text),
                loss=nn.functional.mse_loss,
                optimizer=torch.optim.SGD,
                **options,
            )
        assert "\n" not in str(caught.value)

    refused(nn.Conv1d(1, 1, 1), "tp=2", r"nothing to divide in Conv1d;.* dp = 2 without tp works")
    refused(nn.Conv1d(1, 1, 1), "pp=2", r"a pipeline cuts an nn.Sequential, not Conv1d")
    refused(nn.Sequential(nn.Linear(1, 1)), "pp=2", r"2 stages.*has 1; dp = 2 without pp")
    few, many = nn.Sequential(*map(nn.Identity, range(7))), "pp=4,vpp=2,schedule=interleaved"
    with pytest.raises(ValueError, match=r"8 stages.* has 7; pp = 2, dp = 2 works"):
        stage_names(few, Layout.parse(many))
    assert len(stage_names(few, Layout.parse("pp=2,dp=2,vpp=2,schedule=interleaved"))) == 4
    dense = TransformerModel(small_shape(), seed=0)
    refused(dense, "dp=2,ep=2", r"ep = 2 divides experts, but TransformerModel has none")
    refused(plain_model(), "dp=3", r"expected 2 ranks")
    refused(
        plain_model(),
        "pp=2,vpp=2,schedule=dualpipev",
        r"at least 4 microbatches, not 2",
        microbatches=2,
    )
    refused(plain_model(), "dp=2", r"microbatches: expected at least 1, got 0", microbatches=0)


def own_clipping_at_the_norm(world):
    """Tests that a norm equal to the limit is scaled as by torch.nn.utils.clip_grad_norm_, and that
    steps which cannot train are refused.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(2)
    inputs, targets = torch.randn(4, 3), torch.randn(4, 1)
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()

    def a_run(clip: float | None) -> ParallelRun:
        return parallelize(
            copy.deepcopy(model),
            Layout(dp=2),
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 1.0),
            clip=clip,
        )

    def change(run: ParallelRun) -> torch.Tensor:
        run.step(inputs, targets)
        ((_, stage),) = run.stages
        return next(stage.parameters()).detach() - before

    free = a_run(None)
    whole = change(free)
    norm = free.gradient_norm
    ratios = change(a_run(norm)) / whole
    assert torch.allclose(ratios, torch.full_like(ratios, norm / (norm + 1e-6)), rtol=1e-9, atol=0)
    with torch.no_grad(), pytest.raises(ValueError, match=r"call it outside of torch\.no_grad"):
        free.step(inputs, targets)
    with pytest.raises(ValueError, match="at least one sample, got inputs of length 0"):
        free.step(inputs[:0], targets[:0])
    assert free.steps == 1


def own_traced_model(world):
    for text in ("pp=2,schedule=gpipe", "pp=2,vpp=2,schedule=interleaved"):
        compare_traced(text, microbatches=4)
    compare_traced("pp=2,vpp=2,schedule=zbv", microbatches=2)
    run = compare_traced("pp=2", microbatches=2)
    with pytest.raises(
        ValueError, match=r"traced for microbatches of shape \(4, 12\), got \(2, 12"
    ):
        run.step(torch.zeros(4, 12, dtype=torch.int64), torch.zeros(4, 12, dtype=torch.int64))
