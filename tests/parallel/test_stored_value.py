"""Values in checkpoints: they keep their types, and equal values have equal digests."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from unisono.parallel.checkpoint import StoredValue, restored  # noqa: E402

pytestmark = pytest.mark.torch


def read(stored: StoredValue) -> object:
    return restored(torch.load(io.BytesIO(stored.data), weights_only=True), None, "extra")


def values() -> dict[str, object]:
    """Returns values of all kinds, made anew by each call."""
    generator = torch.Generator().manual_seed(3)
    return {
        "plain": [None, True, -3, 10**30, 0.1, float("inf"), 1j, "text", b"\x00bytes"],
        "tuple": (1, ("a",), []),
        "set": {3, 1, 2},
        "counter": Counter({30: 2, 80: 1}),
        "ordered": OrderedDict(b=1, a=2),
        4: {(1, "key"): torch.float32},
        "size": torch.Size((2, 3)),
        "tensor": torch.arange(12.0).reshape(3, 4)[:, 1:3],
        "narrow": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "complex": torch.tensor([1j]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "generator": generator.get_state(),
        "array": np.arange(6.0).reshape(2, 3).T,
        "number": np.float64(0.1),
        "date": np.datetime64("2024-01-02"),
        "names": np.array(["a", "bc"]),
        "numpy state": np.random.RandomState(5).get_state(),
    }


def require_equal(left: object, right: object, where: str = "") -> None:
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            require_equal(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for place, pair in enumerate(zip(left, right, strict=True)):
            require_equal(*pair, f"{where}/{place}")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), where
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right), where
    else:
        assert left == right, where


def test_values_come_back_with_their_types():
    require_equal(read(StoredValue.of(values(), "extra")), values())


def test_a_view_is_stored_without_the_rest_of_its_storage():
    assert len(StoredValue.of(torch.zeros(10**6)[:2], "extra").data) < 5000


def test_the_program_may_change_a_value_after_it_is_stored():
    live = {"tensor": torch.ones(2), "list": [1]}
    stored = StoredValue.of(live, "extra")
    live["tensor"].zero_()
    live["list"].append(2)
    require_equal(read(stored), {"tensor": torch.ones(2), "list": [1]})


def test_digests_tell_values_apart():
    assert StoredValue.of(values(), "").digest == StoredValue.of(values(), "").digest
    different = [
        1, 1.0, True, "1", b"1", None, [1], (1,), {1: 1}, {1}, [[1], 2], [[1, 2]], [], [[]],
        ["", ""], torch.tensor(1), torch.tensor([1]), torch.tensor([1], dtype=torch.int32),
        np.array([1]), np.array([[1]]), np.int64(1), ["a", "b"], ["ab"], {"a": 1, "b": 2},
        {"a": {"b": 2}},
    ]  # fmt: skip
    assert len({StoredValue.of(each, "").digest for each in different}) == len(different)


@pytest.mark.parametrize(
    "value",
    [object(), Path("x"), lambda: 0, np.array([object()]), {Path("x"): 1}, {(1, Path("x")): 1},
     torch.nn.Linear(1, 1), slice(1), torch.ones(2).to_sparse(), {np.float64(1): 2},
     np.zeros(1, dtype=[("a", "i4")]), {(1, torch.ones(1))}],
)  # fmt: skip
def test_other_values_are_refused_in_one_line(value):
    with pytest.raises(ValueError, match=r"^extra\['x'\]\[0\].*: expected .*, got \w+") as caught:
        StoredValue.of([value], "extra['x']")
    assert "\n" not in str(caught.value)
