"""Bytes and memory of layouts of four ranks, compared with formulas written out by hand.

Section 3 of Rajbhandari et al., "ZeRO", 2020, has the memory of ZeRO. The bytes are those of
docs/parallel/strategies.md. All sizes are divisible by the number of ranks.
"""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel.worlds.layout_training import small_shape, token_batches
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
MEMORY_TOLERANCE = 0.02
ITEM, MICROBATCHES, SAMPLES = 8, 4, 16
SHAPE = small_shape(layers=4, hidden=128, heads=4, vocab=16, positions=8, tied=False)
P, WIDTH, LAYERS = SHAPE.parameters, SHAPE.hidden, SHAPE.layers
TOKENS = SAMPLES // MICROBATCHES * SHAPE.positions
"""Number of tokens of a microbatch."""
REST = (RANKS - 1) / RANKS
LAST = WIDTH * SHAPE.vocab + 2 * WIDTH
"""Number of parameters of the last module: a matrix and a norm."""


def test_layout_figures(outcome):
    outcome.require_success()


def live_bytes():
    """Returns the bytes of all arrays of tensors in this process, each counted once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    arrays = [each.untyped_storage() for each in local]
    return sum({each.data_ptr(): each.nbytes() for each in arrays}.values())


def figures(text):
    """Trains for two steps. Returns the report and the bytes of all arrays of the run."""
    torch.set_default_dtype(torch.float64)
    batch = token_batches(SHAPE, samples=SAMPLES)[0]
    before = live_bytes()
    run = parallelize(
        TransformerModel(SHAPE, seed=1),
        Layout.parse(text),
        loss=CrossEntropy(SHAPE.vocab),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        microbatches=MICROBATCHES,
    )
    for _ in range(2):
        run.step(*batch)
    report, used = run.report(), live_bytes() - before
    assert report.tokens == SAMPLES * SHAPE.positions
    run.mesh.close()
    return report, used


def require_memory(text, *, weights, gradients, states, activations=0):
    """Fails if a rank does not hold these numbers of elements after a step.

    `activations`: the most elements that a pipeline keeps for the activations of the next step.
    """
    report, found = figures(text)
    rank = torch.distributed.get_rank()
    expected = {"weights": weights, "gradients": gradients, "optimizer": states}
    for kind, elements in expected.items():
        for memory in (report.memory, report.predicted.memory):
            assert memory[kind][rank] == pytest.approx(elements * ITEM, rel=MEMORY_TOLERANCE), kind
    total = sum(expected.values()) * ITEM
    most = total * (1 + MEMORY_TOLERANCE) + activations * ITEM
    assert total * (1 - MEMORY_TOLERANCE) <= found <= most, (text, found, total)
    return report


def own_data_parallelism_and_zero(world):
    for zero, weights, gradients, states, gathers in (
        (0, P, P, 2 * P, 0),
        (1, P, P, 2 * P / 4, 0),
        (2, P / 4, P / 4, 2 * P / 4, 1),  # between steps
        (3, P / 4, P / 4, 2 * P / 4, 2),
    ):
        report = require_memory(
            f"dp=4,zero={zero}", weights=weights, gradients=gradients, states=states
        )
        kept = LAST if zero == 3 else 0  # the last module is not gathered again
        gathered = MICROBATCHES * ((gathers + 1) * P - kept)
        exchanged = REST * (2 * P if zero < 2 else gathered)
        assert report.bytes_sent == {"dp": (exchanged * ITEM,) * RANKS}


def own_zero_2_keeps_gathered_weights_and_zero_3_those_of_the_last_module(world):
    """Tests how many weights a rank has between the forward and the backward pass."""
    torch.set_default_dtype(torch.float64)
    for zero, expected in ((2, P), (3, LAST)):
        model, gathered = TransformerModel(SHAPE, seed=1), []

        def loss(logits, targets, model=model, gathered=gathered):
            whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
            gathered.append(sum(each.numel() for each in whole))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        run = parallelize(model, Layout(dp=4, zero=zero), loss=loss, optimizer=torch.optim.AdamW)
        run.step(*token_batches(SHAPE, samples=SAMPLES)[0])
        assert gathered == [expected]
        run.mesh.close()


def own_tensor_parallelism(world):
    report = require_memory("tp=4", weights=P / 4, gradients=P / 4, states=2 * P / 4)
    layers, ends = LAYERS * 8 * TOKENS * WIDTH, 4 * TOKENS * WIDTH + 6 * TOKENS
    sent = MICROBATCHES * REST * (layers + ends) * ITEM
    assert report.bytes_sent == {"tp": (sent,) * RANKS}


def own_pipeline(world):
    exchanged = MICROBATCHES * TOKENS * WIDTH  # inputs, outputs, and their gradients
    report = require_memory(
        "pp=4", weights=P / 4, gradients=P / 4, states=2 * P / 4, activations=4 * exchanged
    )
    assert sum(report.memory["weights"]) == P * ITEM
    sent, form = exchanged * ITEM, 16  # a header tells the next stage the form of all results
    results = sent + form
    assert report.bytes_sent == {"pp": (results, results + sent, results + sent, sent)}


def own_context_parallelism(world):
    report = require_memory("cp=4,zero=1", weights=P, gradients=P, states=2 * P / 4)
    own_tokens = TOKENS / 4  # 3 blocks of keys and values forward; 3, and 4 of gradients, backward
    attention = MICROBATCHES * LAYERS * (2 * 3 + 4) * 2 * own_tokens * WIDTH
    assert report.bytes_sent == {"cp": ((attention + 2 * REST * P) * ITEM,) * RANKS}


def own_data_and_tensor_parallelism(world):
    report = require_memory("dp=2,tp=2,zero=1", weights=P / 2, gradients=P / 2, states=2 * P / 4)
    layers, ends = LAYERS * 8 * TOKENS / 2 * WIDTH, (4 * WIDTH + 6) * TOKENS / 2
    assert report.bytes_sent["tp"] == (MICROBATCHES / 2 * (layers + ends) * ITEM,) * RANKS
    held = report.memory["weights"][0] / ITEM
    assert report.bytes_sent["dp"] == (2 / 2 * held * ITEM,) * RANKS


def sequence(*frozen, widths=(16, 16, 16, 16, 4)):
    """Returns linear layers with Tanh between them; those of `frozen` numbers are not trained."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b).double() for a, b in pairwise(widths)]
    for number in frozen:
        layers[number].requires_grad_(requires_grad=False)
    between = [each for layer in layers for each in (layer, nn.Tanh())]
    return nn.Sequential(*between[:-1])


def require_predicted_bytes(model, text, *, autocast=False):
    """Fails if a step sends other bytes than predicted; returns them."""
    run = parallelize(
        model,
        Layout.parse(text),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        microbatches=MICROBATCHES,
    )
    inputs, targets = torch.randn(SAMPLES, 16).double(), torch.arange(SAMPLES) % 4
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            run.step(inputs, targets)
    report = run.report()
    run.mesh.close()
    predicted = report.predicted.bytes_sent
    assert report.bytes_sent.keys() == predicted.keys()
    for name, sent in report.bytes_sent.items():
        assert sent == pytest.approx(predicted[name], rel=1e-12), name
    return report.bytes_sent


def own_gathers_of_frozen_parameters(world):
    for zero in (2, 3):
        require_predicted_bytes(sequence(0), f"dp=4,zero={zero}")
        require_predicted_bytes(sequence(0, 1), f"dp=4,zero={zero}")
        require_predicted_bytes(sequence(2), f"dp=4,zero={zero}", autocast=True)
    require_predicted_bytes(sequence(1), "dp=2,pp=2,zero=3")
    # forward all weights, backward all but those of the first frozen layer and of the last layer
    layer, head = 16 * 16 + 16, 16 * 4 + 4
    moved = (3 * layer + head) + 2 * layer + (layer + head)
    sent = require_predicted_bytes(sequence(0, 1), "dp=4,zero=3")
    assert sent["dp"] == (MICROBATCHES * REST * moved * ITEM,) * RANKS


def own_messages_and_sums_of_other_models(world):
    sent = require_predicted_bytes(sequence(), "pp=4")["pp"]
    activations = SAMPLES * 16 * ITEM
    assert sent == (activations + 16, 2 * activations + 16, 2 * activations + 16, activations)
    sent = require_predicted_bytes(sequence(), "tp=4")["tp"]
    assert sent == (2 * REST * SAMPLES * (16 + 16 + 4) * ITEM,) * RANKS
    require_predicted_bytes(sequence(), "tp=4", autocast=True)
    require_predicted_bytes(sequence(), "tp=2,pp=2", autocast=True)
