"""The tensors of nested batches, and the arguments that a model gets from them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from unisono.parallel.run.batch.batch_tree import BatchTree, replace_leaves, tensors_in
from unisono.parallel.run.batch.model_call import ModelCall

pytestmark = pytest.mark.torch
Point = namedtuple("Point", ["x", "y"])
ROWS = torch.arange(12).reshape(4, 3)


@dataclass(frozen=True, slots=True)
class Frozen:
    rows: torch.Tensor
    count: int = field(init=False, default=3)


class Encoding(UserDict):
    def __init__(self, data, source):
        super().__init__(data)
        self.source = source


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (ROWS, [""]),
        ({"a": ROWS, 3: [ROWS]}, ["a", "[3][0]"]),
        (OrderedDict(a=(ROWS, Point(ROWS, 1))), ["a[0]", "a[1].x"]),
        (Encoding({"ids": ROWS}, "tokenizer"), ["ids"]),
        ([Frozen(ROWS), {"more": Frozen(ROWS)}], ["[0].rows", "[1].more.rows"]),
        (MappingProxyType({"a": ROWS}), ["a"]),
    ],
)
def test_tensors_have_names_and_places(value, names) -> None:
    tree = BatchTree.of(value)
    assert list(tree.names) == names
    assert tree.samples == 4
    part = tree.with_tensors([each[:2] for each in tree.tensors])
    if not isinstance(value, MappingProxyType):
        assert type(part) is type(value)
    assert [each.tolist() for each in tensors_in(part)] == [ROWS[:2].tolist()] * len(names)
    assert all(each is ROWS for each in tensors_in(value))  # the batch itself is unchanged
    assert getattr(part, "source", "tokenizer") == "tokenizer"


def test_plain_values_stay() -> None:
    marker = object()
    value = {"rows": ROWS, "flags": [True, None, "text"], "other": marker, "count": Frozen(ROWS)}
    part = BatchTree.of(value).with_tensors([ROWS[:1], ROWS[1:2]])
    assert part["flags"] == value["flags"]
    assert part["other"] is marker
    assert part["count"].count == 3
    assert BatchTree.of(value).text == BatchTree.of(dict(value)).text
    assert BatchTree.of(value).text != BatchTree.of(value | {"flags": [False]}).text


def test_leaves_are_replaced_under_their_names() -> None:
    found = replace_leaves({"a": [1, Point(2, 3)]}, lambda name, leaf: (name, leaf))
    assert found == {"a": [("a[0]", 1), Point(("a[1].x", 2), ("a[1].y", 3))]}


def model(forward) -> nn.Module:
    made = nn.Module()
    made.forward = forward
    return made


def named(input_ids, labels=None):
    return input_ids, labels


def any_name(input_ids=None, **others):
    return input_ids, others


def one(batch):
    return batch


def no_value(*values):
    return values


@pytest.mark.parametrize(
    ("forward", "batch", "expected"),
    [
        (named, {"input_ids": 1, "labels": 2, "weights": 3}, (1, 2)),
        (named, Encoding({"input_ids": 1}, ""), (1, None)),
        (named, (1, 2), (1, 2)),
        (named, [1, 2, 3], (1, 2)),
        (named, Point(1, 2), (1, 2)),
        (named, 1, (1, None)),
        (any_name, {"input_ids": 1, "x": 2}, (1, {"x": 2})),
        (one, {"x": 1}, {"x": 1}),
        (one, Point(1, 2), 1),
        (no_value, [1, 2, 3], (1, 2, 3)),
        (lambda x, y: (x, y), Point(y=1, x=2), (2, 1)),
        (lambda y, x: (y, x), Point(y=1, x=2), (1, 2)),
    ],
)
def test_arguments_of_a_model(forward, batch, expected) -> None:
    made = model(forward)
    call = ModelCall(made)
    call.check(batch, is_for_loss=True)
    assert call(made, batch) == expected


def test_missing_and_unused_arguments() -> None:
    call = ModelCall(model(lambda input_ids, *, labels: 0))
    with pytest.raises(ValueError, match="needs labels, but the batch has 1 values by position"):
        call.check((1,), is_for_loss=True)
    with pytest.raises(ValueError, match="needs labels, but the batch has input_ids"):
        call.check({"input_ids": 1}, is_for_loss=True)
    batch = {"input_ids": 1, "labels": 2, "weights": ROWS, "note": "text"}
    call.check(batch, is_for_loss=True)
    with pytest.raises(ValueError, match="forward does not take weights, and the model's own"):
        call.check(batch, is_for_loss=False)
