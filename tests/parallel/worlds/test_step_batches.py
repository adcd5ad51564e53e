"""Steps on batches of any nesting, with losses that models compute themselves."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import small_shape
from parallel.worlds.own_loss_models import (
    POSITIONS,
    VOCAB,
    WIDTH,
    Classifier,
    Decoder,
    compare,
    refused,
    run_of,
    sequence,
    token_batches,
    values,
)
from unisono.parallel import TransformerModel, model_loss

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
LAYOUTS = (
    ("dp=2", 1),
    ("dp=2", 3),
    ("dp=2,zero=1", 2),
    ("dp=2,zero=2", 2),
    ("dp=2,zero=3", 2),
)


def test_step_batches(outcome):
    outcome.require_success()


def own_losses_of_models(world):
    batches = token_batches()
    for text, microbatches in LAYOUTS:
        with turn(text=text, microbatches=microbatches):
            compare(text, Decoder, batches, microbatches=microbatches)
    for schedule, microbatches in (("1f1b", 2), ("gpipe", 4), ("zb1p", 4)):
        with turn(schedule=schedule):
            compare(
                f"pp=2,schedule={schedule}",
                Decoder,
                batches,
                microbatches=microbatches,
                example=batches[0],
            )


@dataclass(frozen=True)
class Tokens:
    input_ids: torch.Tensor
    labels: torch.Tensor
    note: list = field(default_factory=lambda: ["kept", 3])


class Encoding(UserDict):
    """As the batches of transformers: a mapping with attributes of its own."""

    def __init__(self, data, source):
        super().__init__(data)
        self.source = source


Named = namedtuple("Named", ["labels", "input_ids"])


class Positional(Decoder):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels=labels)


class Whole(Decoder):
    def forward(self, batch):
        inner = batch["texts"][0] if isinstance(batch, dict) else batch
        return super().forward(inner.input_ids, labels=inner.labels)


def own_nested_batches(world):
    batches = token_batches()
    plain = [{"input_ids": each["input_ids"], "labels": each["labels"]} for each in batches]
    forms = (
        (Decoder, lambda each: Encoding(each, "tokenizer")),
        (Decoder, lambda each: Tokens(each["input_ids"], each["labels"])),
        (Decoder, lambda each: Named(each["labels"], each["input_ids"])),
        (Positional, lambda each: (each["input_ids"], each["labels"])),
        (Positional, lambda each: [each["input_ids"], each["labels"]]),
        (Whole, lambda each: {"texts": [Tokens(each["input_ids"], each["labels"])]}),
    )
    for number, (make_model, form) in enumerate(forms):
        for text, microbatches in LAYOUTS[1:2]:
            with turn(number=number):

                def alone(model, batch, make_model=make_model):
                    arguments = batch["input_ids"], batch["labels"]
                    if make_model is Whole:
                        return model_loss(model(Tokens(*arguments)), batch)
                    return model_loss(model(arguments[0], labels=arguments[1]), batch)

                compare(
                    text,
                    make_model,
                    plain,
                    alone=alone,
                    passed=lambda _, each, form=form: (form(each),),
                    microbatches=microbatches,
                    loss=model_loss,
                )


def own_plain_values_reach_every_part(world):
    batches = [each | {"scale": 0.5 + step} for step, each in enumerate(token_batches())]
    compare("dp=2", Decoder, batches, microbatches=2)
    valid = [int((each["labels"][:, 1:] != -100).sum()) for each in batches]
    compare(
        "dp=2",
        Decoder,
        [each | {"num_items_in_batch": 3 * n} for each, n in zip(batches, valid, strict=True)],
        microbatches=3,
    )


def of_batch(output, batch):
    logits = output.logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())


def as_pair(output, batch):
    labels = batch["labels"][:, 1:].flatten()
    losses = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, reduction="none")
    return losses.sum(), (labels != -100).sum()


def as_mean(output, batch):
    total, weight = as_pair(output, batch)
    return total / weight


def valid_labels(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def own_losses_of_output_and_batch(world):
    batches = token_batches()
    for loss, options in (
        (of_batch, {}),
        (as_pair, {}),
        (as_mean, {"weight": valid_labels}),
        (as_mean, {"weight": lambda output, batch: valid_labels(batch)}),
        (model_loss, {"weight": valid_labels}),
    ):
        for text, microbatches in LAYOUTS[1:2] + LAYOUTS[4:]:
            with turn(loss=loss.__name__, text=text):
                compare(text, Decoder, batches, loss=loss, microbatches=microbatches, **options)
        with turn(loss=loss.__name__, text="pp=2"):
            compare(
                "pp=2", Decoder, batches, loss=loss, microbatches=2, example=batches[0], **options
            )


def own_weights_of_losses_of_targets(world):
    torch.set_default_dtype(torch.float64)

    def pair(output, targets):
        mask = targets > 0.3
        return (output - targets)[mask].square().sum(), mask.sum()

    def mean(output, targets):
        total, weight = pair(output, targets)
        return total / weight

    losses = []
    for loss, weight in ((pair, None), (mean, lambda targets: (targets > 0.3).sum())):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, 4))
        run = run_of(model, loss=loss, weight=weight, microbatches=2)
        losses.append([float(run.step(*each.values())) for each in values("labels")])
        run.mesh.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for bad, match in ((3, "a function of the batch"), (lambda x, y, z: 1, "needs 3 arguments")):
        with pytest.raises(ValueError, match=match):
            run_of(nn.Linear(2, 2), loss=mean, weight=bad)


def own_kinds_of_losses_of_models(world):
    for kind in ("classes", "labels", 1, "tuple", "scaled"):
        with turn(kind=kind):
            compare(
                "dp=2", lambda kind=kind: Classifier(kind), values(kind), microbatches=3,
            )  # fmt: skip


def own_weights_that_are_not_known_are_refused(world):
    for kind, match in (
        ("two", "combined with others, so the weight of a part is not known; pass weight=f"),
        ("in place", "is not the result of one loss of torch"),
        ("masked", "is not the result of one loss of torch"),
        (None, "without a loss of one number; pass the labels"),
    ):
        with turn(kind=kind):
            run = run_of(Classifier(kind))
            refused(run, match, values(kind)[0])
            run.mesh.close()
    run = run_of(Classifier("two"), "pp=2", microbatches=2, example=values("two", 8)[0])
    refused(run, "so the weight of a part is not known", values("two", 8)[0])
    run.mesh.close()
    batch = values("labels")[0]
    run = run_of(Classifier("labels"), loss=nn.MSELoss())
    refused(run, r"needs to know the targets of the batch; call step\(inputs, targets\)", batch)
    run.mesh.close()
    run = run_of(Classifier("labels"), loss=lambda output, batch: (output.loss, 1), weight=len)
    refused(run, "returned a pair, which states a weight", batch)
    run.mesh.close()
    run = run_of(Classifier("labels"), "dp=2,zero=3")
    with pytest.raises(ValueError, match="but Classifier returns SimpleNamespace; return tensors"):
        run.step(batch)
    with pytest.raises(ValueError, match="cp = 2 divides the positions of a sequence, which the"):
        run_of(TransformerModel(small_shape(), seed=0), "cp=2")


def own_batches_that_cannot_be_divided_are_refused(world):
    run = run_of(Classifier("labels"))
    batch = values("labels")[0]
    inputs, labels = batch["values"], batch["labels"]
    for bad, match in (
        (batch | {"labels": labels[:5]}, "labels: expected 7 samples, as values has, got 5"),
        (batch | {"more": [1, {"x": labels[:2]}]}, r"more\[1\].x: expected 7 samples"),
        (batch | {"rate": torch.tensor(0.1)}, "rate: expected a tensor .* pass a Python number"),
        (batch | {"labels": labels.numpy()}, "labels: expected a tensor, got a NumPy array"),
        ({"values": inputs.to_sparse(), "labels": labels}, "values: expected a dense tensor"),
        (batch | {"more": SimpleNamespace(x=labels)}, "more: the tensors inside of SimpleNamesp"),
        ({"values": 1, "labels": 2}, "dict without a tensor"),
        ({"values": inputs}, "Classifier.forward needs labels, but the batch has values"),
        (batch | {"mask": labels}, "does not take mask, and the model's own loss does not see"),
        ({key: each[:0] for key, each in batch.items()}, "at least one sample, got values of"),
        ([inputs], "Classifier.forward needs labels, but the batch has 1 values by position"),
        (np.ones(3), "batch: expected a tensor, got a NumPy array"),
        (None, "NoneType without a tensor"),
    ):
        with turn(match=match):
            refused(run, match, bad)
    own = batch if world.rank == 0 else batch | {"values": inputs + 1}
    refused(run, "ranks 0 and 1 passed different batches", own)
    own = batch if world.rank == 0 else batch | {"values": [inputs]}
    refused(run, "ranks 0 and 1 passed different batches|could not take this step", own)
    if world.rank == 1:
        refused(run, "labels: expected 7 samples", batch | {"labels": labels[:5]})
    else:
        refused(run, "rank 1 could not take this step.*labels: expected 7 samples", batch)
    run.step(batch)
    run.mesh.close()


def own_calls_of_the_program(world):
    batches = token_batches()

    def call(model, batch):
        return model(batch["input_ids"], labels=batch["labels"])

    compare(
        "dp=2", Decoder, batches, alone=lambda model, each: call(model, each).loss, call=call,
        microbatches=2,
    )  # fmt: skip
    compare(
        "pp=2", Decoder, batches, alone=lambda model, each: call(model, each).loss, call=call,
        microbatches=2, example=batches[0],
    )  # fmt: skip


def own_layers_that_tp_divides(world):
    shape = small_shape(vocab=VOCAB, positions=POSITIONS)
    batches = token_batches()

    def call(model, batch):
        return model(batch["input_ids"])

    def loss(output, batch):
        return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

    for text, microbatches in (("tp=2", 2), ("tp=2,sequence_parallel=1", 1), ("pp=2", 2)):
        with turn(text=text):
            compare(
                text,
                lambda: TransformerModel(shape, seed=1),
                batches,
                alone=lambda model, batch: loss(call(model, batch), batch),
                loss=loss,
                call=call,
                microbatches=microbatches,
            )


def own_pipelines_of_modules(world):
    batches = [{"left": each["values"], "right": each["values"].flip(0)} for each in values(1, 8)]
    for text, microbatches in (("pp=2", 4), ("pp=2,vpp=2,schedule=zbv", 4), ("dp=2,zero=3", 2)):
        with turn(text=text):
            compare(
                text,
                sequence,
                batches,
                alone=lambda model, batch: model(batch).loss,
                microbatches=microbatches,
            )
