"""Weights that a run exports as files of safetensors, and loads in another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn

from parallel.worlds.layout_training import STEPS, small_shape, token_batches, train_alone
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import Layout, parallelize
from unisono.parallel.checkpoint import safetensors_folder
from unisono.parallel.layers import CrossEntropy, TransformerModel
from unisono.parallel.run import ParallelRun
from unisono.parallel.run.parameters.tied_parameters import find_ties

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
LAYOUTS = ("dp=4,zero=3", "dp=2,tp=2,zero=1", "tp=2,pp=2", "dp=2,pp=2,zero=2", "tp=4,tensor=2d")
SCALE, EMPTY, TURNS, PHASES = (f"layer0.{name}" for name in ("scale", "empty", "turns", "phases"))
"""Buffers that DCP does not write: without dimensions or elements, integers, complex numbers."""


def test_exported_weights(outcome):
    outcome.require_success()


class Config:
    """A configuration that writes itself, as those of transformers do."""

    architectures = None

    def save_pretrained(self, folder: Path) -> None:
        text = json.dumps({"architectures": self.architectures})
        (Path(folder) / "config.json").write_text(text)


def model(seed: int = 1) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    made = TransformerModel(small_shape(layers=2), seed=seed)
    layer = made.get_submodule("layer0")
    layer.register_buffer("scale", torch.tensor(float(seed)))
    layer.register_buffer("empty", torch.ones(0, 3))
    layer.register_buffer("turns", torch.arange(6).reshape(2, 3) + seed)
    layer.register_buffer("phases", torch.arange(3).to(torch.complex64) * 1j * seed)
    made.config = Config()
    return made


def a_run(text: str, seed: int = 1) -> ParallelRun:
    shape = small_shape()
    return parallelize(
        model(seed),
        Layout.parse(text),
        loss=CrossEntropy(shape.vocab),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        microbatches=2,
    )


def trained_alone() -> tuple[list[float], nn.Module]:
    alone = model()
    losses, _ = train_alone(
        alone,
        CrossEntropy(),
        token_batches(small_shape()),
        None,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    )
    return losses, alone


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def own_layouts_export_the_weights_of_one_process(world):
    _, alone = trained_alone()
    expected = {name: each.detach() for name, each in alone.named_parameters()}
    for text in LAYOUTS:
        run, folder = a_run(text), shared_folder()
        for batch in token_batches(small_shape()):
            run.step(*batch)
        run.export(folder)
        run.mesh.close()
        found = exported(folder)
        assert found.keys() == {*expected, SCALE, EMPTY, TURNS, PHASES}
        for name in (SCALE, TURNS, PHASES):
            assert torch.equal(found[name], alone.get_buffer(name)), name
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=1e-10, atol=1e-10)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        assert json.loads((folder / "config.json").read_text()) == {
            "architectures": ["TransformerModel"]
        }
        assert not list(folder.glob("checkpoint-*"))
        dist.barrier()


def own_layouts_load_the_weights_of_others(world):
    losses, _ = trained_alone()
    batches = token_batches(small_shape())
    folder = shared_folder()
    for before, after in zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], strict=True):
        run = a_run(before)
        run.export(folder)  # replaces the export of the layout before
        run.mesh.close()
        other = a_run(after, seed=2)
        assert float(other.step(*batches[0])) != pytest.approx(losses[0], rel=1e-3)
        other.mesh.close()
        other = a_run(after, seed=2)
        other.load_weights(folder)
        found = [float(other.step(*batch)) for batch in batches]
        other.mesh.close()
        assert found == pytest.approx(losses, rel=1e-10)
    assert len(losses) == STEPS


def own_files_have_a_largest_size(world):
    run, folder = a_run("dp=2,tp=2"), shared_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_folder, "_FILE_BYTES", 20_000)
        run.export(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    other = a_run("dp=2,pp=2", seed=2)
    other.load_weights(folder)
    again = shared_folder()
    other.export(again)
    for name, values in exported(folder).items():
        assert torch.equal(exported(again)[name], values), name
    dist.barrier()


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Writes a file on the first rank; returns its path on all ranks."""
    path = folder / "weights.safetensors"
    if dist.get_rank() == 0:
        save_file(tensors, path, metadata={"format": "pt"})
    dist.barrier()
    return path


def own_other_names_and_types_of_a_file(world):
    tensors = {name: each.detach() for name, each in model(3).named_parameters()}
    ((first, other),) = find_ties(model())
    tied = {first: other}
    renamed = {tied.get(name, name): each.float() for name, each in tensors.items()}
    others = {
        SCALE: torch.tensor(7.0), EMPTY: torch.ones(0, 3), TURNS: torch.arange(6).reshape(2, 3),
        PHASES: torch.ones(3, dtype=torch.complex64),
    }  # fmt: skip
    path = write(shared_folder(), renamed | others)
    run, folder = a_run("dp=2,tp=2,zero=3"), shared_folder()
    run.load_weights(str(path))
    run.export(folder)
    for name, values in exported(folder).items():
        expected = others[name] if name in others else tensors[name].float()
        assert torch.equal(values, expected.to(values.dtype)), name
    dist.barrier()


def refusal(run: ParallelRun, path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        run.load_weights(path)
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, str(caught.value))
    assert len({text.partition("safetensors")[2] for text in found}) == 1, found
    return found[0]


def own_types_without_files_are_refused(world):
    whole = model()
    whole.get_submodule("layer0").register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    run = parallelize(
        whole, Layout(dp=4), loss=CrossEntropy(small_shape().vocab), optimizer=torch.optim.SGD
    )
    with pytest.raises(ValueError, match="complex128, which files of safetensors") as caught:
        run.export(shared_folder())
    assert "\n" not in str(caught.value)


def own_refusals_change_nothing(world):
    run, folder, good = a_run("tp=2,pp=2"), shared_folder(), shared_folder()
    run.export(good)
    tensors = exported(good)
    name = next(name for name in tensors if name.startswith("layer1"))
    cases = [
        ({k: v for k, v in tensors.items() if k != name}, f"has no tensor '{name}'"),
        (tensors | {name: tensors[name][:1]}, f"{name}: expected the shape"),
        (tensors | {name: tensors[name].long()}, f"{name}: expected torch.float64, got I64"),
        (tensors | {"lora": torch.ones(1)}, "has 'lora', which this model does not have"),
    ]
    for changed, text in cases:
        path = write(folder, {k: v.contiguous() + 1 for k, v in changed.items()})
        assert text in refusal(run, path)
    assert "expected a file of safetensors" in refusal(run, folder / "nothing")
    (folder / "weights.safetensors").unlink(missing_ok=True)
    run.export(folder)
    for key, values in exported(good).items():
        assert torch.equal(exported(folder)[key], values), key
    dist.barrier()


def own_an_interrupted_export_leaves_the_weights_before_it(world):
    run, folder = a_run("dp=4,zero=3"), shared_folder()
    run.export(folder)
    before = exported(folder)
    dist.barrier()

    class Broken(Config):
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left")

    broken = model(2)
    broken.config = Broken()
    other = parallelize(
        broken, Layout(dp=4), loss=CrossEntropy(11), optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    with pytest.raises(ValueError, match="no space left"):
        other.export(folder)
    assert not list(folder.glob("checkpoint-*"))
    found = exported(folder)
    assert found.keys() == before.keys()
    for name, values in found.items():
        assert torch.equal(values, before[name])
    dist.barrier()
