"""The modules that gather their parameters separately."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from parallel.worlds.nested_models import Block, NestedDecoder, Wrapper
from unisono.parallel.run.parameters.gathered_units import gathered_units


def names(model: nn.Module) -> list[str]:
    units = gathered_units(model)
    return sorted(name for name, each in model.named_modules() if each in units)


BLOCKS = [f"model.layers.{number}" for number in range(3)]


def test_blocks_of_a_nested_model_and_the_modules_around_them():
    model = NestedDecoder(blocks=3)
    assert names(model) == sorted(["head", "model", *BLOCKS])
    assert names(Wrapper(Wrapper(model))) == sorted(
        ["inner", "inner.inner", *(f"inner.inner.{each}" for each in ["model", *BLOCKS])]
    )


def test_inner_modules_come_first():
    units = gathered_units(Wrapper(NestedDecoder(blocks=3)))
    sizes = [len(list(each.modules())) for each in units]
    assert sizes[-1] == max(sizes)
    assert all(type(each) is Block for each in units[:3])


def test_parameters_that_modules_outside_use_belong_to_the_stage():
    assert names(NestedDecoder(blocks=3, is_tied=True)) == BLOCKS
    model = NestedDecoder(blocks=3)
    model.model.layers[2].norm.weight = model.model.layers[0].norm.weight
    assert names(model) == sorted(["head", "model", "model.layers.1"])
    model = NestedDecoder(blocks=3)
    model.model.layers[0].norm.bias = model.model.norm.bias
    assert names(model) == sorted(["head", "model", *BLOCKS[1:]])


def test_modules_of_several_blocks_belong_to_the_module_around_them():
    model = NestedDecoder(blocks=3)
    model.model.layers[2].mixer = model.model.layers[0].mixer
    assert names(model) == sorted(["head", "model", "model.layers.1"])
    model = NestedDecoder(blocks=3)
    model.model.layers[2] = model.model.layers[0]
    assert names(model) == sorted(["head", "model", *BLOCKS[:2]])


def test_blocks_without_a_container():
    model = Wrapper(nn.Identity())
    for number in range(3):
        setattr(model, f"block{number}", Block(24))
    assert names(Wrapper(model)) == ["inner", "inner.block0", "inner.block1", "inner.block2"]


def test_a_single_block_is_not_cut():
    assert names(Wrapper(Block(24).mixer)) == ["inner"]
    assert names(nn.Sequential(Block(8), Block(8))) == ["0", "1"]


def test_small_modules_are_gathered_with_their_parent():
    model = Wrapper(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
    assert names(model) == ["inner"]


class Routed(nn.Module):
    """Experts that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(24, 5)
        self.experts = nn.ModuleList(Block(24) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(self.router(x).sum(0).argmax())](x)


def test_experts_are_no_units():
    assert names(Wrapper(Routed())) == ["inner"]
    assert names(Routed()) == ["router"]
