"""ZeRO-2 and ZeRO-3 of nested models: their blocks gather their weights one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, sgd
from parallel.worlds.nested_models import NestedDecoder, Wrapper
from unisono.parallel import CrossEntropy, Layout
from unisono.parallel.run import parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
VOCAB = 11


def test_gathered_units(outcome):
    outcome.require_success()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(6)
    return [tuple(torch.randint(0, VOCAB, (2, 8, 5))) for _ in range(3)]


def decoder(**changes) -> nn.Module:
    torch.manual_seed(4)
    return Wrapper(NestedDecoder(vocab=VOCAB, blocks=3, **changes))


def shared_norms() -> nn.Module:
    model = decoder()
    layers = model.inner.model.layers
    layers[2].norm.weight = layers[0].norm.weight
    return model


def own_nested_models_train_as_one_process_does(world):
    for text, microbatches in (("dp=2,zero=2", 1), ("dp=2,zero=3", 1), ("dp=2,zero=3", 2)):
        for name, make_model in (
            ("decoder", decoder),
            ("tied", lambda: decoder(is_tied=True)),
            ("shared", shared_norms),
        ):
            with turn(text=text, microbatches=microbatches, name=name):
                compare_model(
                    text,
                    make_model,
                    lambda: CrossEntropy(VOCAB),
                    batches(),
                    clip=0.01,
                    microbatches=microbatches,
                )


def own_weights_of_one_block_at_a_time(world):
    """Tests that the weights of at most one block and of the modules around it are gathered."""
    torch.set_default_dtype(torch.float64)
    model = NestedDecoder(vocab=VOCAB)
    sizes = {
        name: sum(each.numel() for each in module.parameters())
        for name, module in model.named_modules()
    }
    run = parallelize(model, Layout.parse("dp=2,zero=3"), loss=CrossEntropy(VOCAB), optimizer=sgd)
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        whole = [each.numel() for each in model.parameters() if not isinstance(each, DTensor)]
        most = max(most, sum(whole))

    for module in [each for each in model.modules() if isinstance(each, nn.Linear)]:
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    run.step(*batches()[0])
    around = sizes["model.embed"] + sizes["model.norm"]
    assert most == sizes["model.layers.0"] + around
    run.mesh.close()
