"""Models on the device meta: each layout trains them like the same model on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from cases_in_turn import turn
from parallel.worlds.dlrm_training import click_batches
from parallel.worlds.dlrm_training import small_shape as dlrm_shape
from parallel.worlds.layout_training import (
    expert_shape,
    rank_block,
    small_shape,
    token_batches,
)
from unisono.parallel import DLRM, CrossEntropy, Layout, Precision, TransformerModel, parallelize
from unisono.parallel.checkpoint import safetensors_folder

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
LAYOUTS = ("dp=4", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "pp=4", "dp=2,pp=2,zero=3",
           "tp=2,dp=2,zero=3", "tp=4", "tp=2,pp=2")  # fmt: skip


def test_meta_weights(outcome):
    outcome.require_success()


class Shifted(nn.Module):
    """Adds a buffer that is not saved, and one that is."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.register_buffer("scale", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        self.shift.copy_(torch.arange(len(self.shift)))
        self.scale.fill_(0.5)

    def forward(self, x):
        return x * self.scale + self.shift


def model(width=10):
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6), Shifted(6), nn.LayerNorm(6),
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6), nn.Tanh(),
    )  # fmt: skip


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def start(made, text, **options):
    return parallelize(
        made,
        Layout.parse(text),
        **{"loss": mse_loss, "optimizer": sgd, "microbatches": 4} | options,
    )


def on_meta(make):
    with torch.device("meta"):
        return make()


def require_values(run, expected):
    for each in (held for found in run.sets for held in found.held):
        values, block = rank_block(run, each)
        assert values.device.type == "cpu"
        assert torch.equal(values, expected.get_parameter(each.name).detach()[block]), each.name


def batch():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 6, generator=generator, dtype=torch.get_default_dtype())
    return inputs, inputs.roll(1, 0)


def own_seeds(world):
    """Tests values, and losses, of the seed of rank 0."""
    torch.set_default_dtype(torch.float32)
    for text in LAYOUTS:
        with turn(text=text):
            torch.manual_seed(5)
            whole, after = model(), torch.get_rng_state()
            made = on_meta(model)
            torch.manual_seed(5 if dist.get_rank() == 0 else 6)
            run = start(made, text)
            require_values(run, whole)
            if dist.get_rank() == 0:
                assert torch.equal(torch.get_rng_state(), after)
            loss = float(run.step(*batch()))
            assert loss == pytest.approx(float(mse_loss(whole(batch()[0]), batch()[1])), rel=1e-5)
            run.mesh.close()


def own_models_of_this_package(world):
    torch.set_default_dtype(torch.float64)
    for text, changes in (
        ("tp=2,pp=2", {}), ("dp=4,zero=3", {}), ("dp=2,tp=2,zero=3", {"tied": False}),
        ("dp=4,ep=4", expert_shape()), ("tp=4,tensor=2d", {}), ("cp=2,dp=2,zero=3", {}),
    ):  # fmt: skip
        with turn(text=text):
            shape = small_shape(**changes)
            tokens, targets = token_batches(shape, samples=16)[0]
            loss = CrossEntropy(shape.vocab)
            runs = [
                start(made, text, loss=loss)
                for made in (
                    TransformerModel(shape, seed=1),
                    on_meta(lambda shape=shape: TransformerModel(shape, seed=1)),
                )
            ]
            losses = [[float(run.step(tokens, targets)) for _ in range(2)] for run in runs]
            assert losses[0] == losses[1]
            for run in runs:
                run.mesh.close()


def own_embedding_tables(world):
    torch.set_default_dtype(torch.float32)
    shape = dlrm_shape()
    inputs, clicks = click_batches(shape, samples=16)[0]
    losses = []
    for make in (DLRM, lambda *given, **more: on_meta(lambda: DLRM(*given, **more))):
        made = make(shape, seed=2, placement="row", samples=16)
        run = start(made, "dp=4", loss=nn.functional.binary_cross_entropy_with_logits)
        losses.append([float(run.step(inputs, clicks.float())) for _ in range(2)])
        run.mesh.close()
    assert losses[0] == losses[1]


class Unsequenced(nn.Module):
    """Is no sequence, so a pipeline traces it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shifted = Shifted(6)

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = torch.tanh(self.shifted(layer(x))) + first
        return x


def own_traced_pipelines(world):
    torch.set_default_dtype(torch.float32)
    for precision in (None, Precision(computation=torch.bfloat16)):
        losses = []
        for make in (Unsequenced, lambda: on_meta(Unsequenced)):
            torch.manual_seed(2)
            run = start(make(), "pp=4", example=batch()[0], precision=precision)
            losses.append([float(run.step(*batch())) for _ in range(2)])
            run.mesh.close()
        assert losses[0] == losses[1], precision


def shared_folder():
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return Path(found[0])


def own_files(world):
    torch.set_default_dtype(torch.float32)
    safetensors_folder._OPEN_BYTES = 100  # so that a file is opened several times
    folder = shared_folder()
    torch.manual_seed(7)
    run = start(model(), "dp=4")
    run.step(*batch())
    run.export(folder / "all")
    expected = float(run.step(*batch()))
    run.mesh.close()
    for text in LAYOUTS:
        with turn(text=text):
            torch.manual_seed(8)
            before = torch.get_rng_state()
            run = start(on_meta(model), text, weights=folder / "all")
            assert torch.equal(torch.get_rng_state(), before)
            assert float(run.step(*batch())) == pytest.approx(expected, rel=1e-5)
            run.mesh.close()
    run = start(model(), "dp=4,zero=3", weights=folder / "all")  # in place of its own values
    assert float(run.step(*batch())) == pytest.approx(expected, rel=1e-5)
    run.mesh.close()
    run = start(on_meta(lambda: model().double()), "dp=4,zero=3", weights=folder / "all")
    assert {each.values.dtype for found in run.sets for each in found.held} == {torch.float64}
    assert float(run.step(*(each.double() for each in batch()))) == pytest.approx(expected, 1e-5)
    run.mesh.close()


def own_refused_files(world):
    """Tests that faults of a file are told in one line on all ranks."""
    torch.set_default_dtype(torch.float32)
    folder, state = shared_folder(), model().state_dict()
    rest = {name: each for name, each in state.items() if name != "2.bias"}
    for number, (tensors, message) in enumerate((
        (rest, "has no tensor '2.bias'"),
        ({**state, "9.bias": torch.ones(1)}, "has '9.bias', which this model does not have"),
        ({**state, "2.bias": torch.ones(5)}, r"2.bias: expected the shape \(6,\), got \(5,\)"),
    )):  # fmt: skip
        path = folder / f"{number}.safetensors"
        if dist.get_rank() == 0:
            save_file({name: each.clone() for name, each in tensors.items()}, path)
        dist.barrier()
        with turn(message=message), pytest.raises(ValueError, match=message) as caught:
            start(on_meta(model), "dp=2,pp=2", weights=path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="expected a file of safetensors"):
        start(on_meta(model), "dp=4", weights=folder / "none")


def own_refused_models(world):
    torch.set_default_dtype(torch.float32)
    with pytest.raises(ValueError, match=r"1.weight: the parameter is on the device meta, and no"):
        mixed = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device="meta"))
        mixed[1].reset_parameters = None
        start(mixed, "dp=4,zero=3")
    place = "meta" if dist.get_rank() == 2 else "cpu"
    made = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device=place))
    with pytest.raises(
        ValueError, match=r"1.bias: is on the device meta on rank 2, but has values"
    ):
        start(made, "dp=4")


def own_blocks_on_meta_are_refused(world):
    torch.set_default_dtype(torch.float32)
    with pytest.raises(ValueError, match="meta, but pp = 2 with zero = 3 runs the model once to"):
        start(on_meta(Unsequenced), "pp=2,dp=2,zero=3", example=batch()[0])


def own_partly_on_meta(world):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device="meta"), Shifted(6))
    made[2].reset_parameters = None  # its buffers have values
    expected = made[0].weight.detach().clone()
    run = start(made, "dp=4,zero=3")
    assert torch.equal(made[2].shift, torch.arange(6.0))
    (first,) = (each for found in run.sets for each in found.held if each.name == "0.weight")
    values, block = rank_block(run, first)
    assert torch.equal(values, expected[block])
    run.mesh.close()
