"""Every collective of MLX gives NumPy's result on the ranks of a launcher.

UNISONO_RANK=0 UNISONO_SIZE=2 UNISONO_RENDEZVOUS=a python collectives.py, and so on for each rank.
Prints the number of checks.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import unisono.mlx  # noqa: F401 # isort: skip # before MLX

import mlx.core as mx

TYPES = (
    *("bool_", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)
COUNTS = (0, 1, 1000, 70_001)


class Checks:
    """The group of all ranks, and the number of checks so far."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size, self.done = group, group.rank(), group.size(), 0

    def equal(self, found: Any, expected: Any) -> None:
        assert list(found.shape) == list(expected.shape), (found.shape, expected.shape)
        np.testing.assert_array_equal(as_numpy(found), as_numpy(expected))
        self.done += 1


def as_numpy(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def values(name: str, shape: tuple[int, ...]) -> Any:
    """Returns small integers, which all types represent exactly, as an array of NumPy."""
    signed = not name.startswith(("uint", "bool"))
    drawn = np.random.default_rng(len(name)).integers(-4 if signed else 0, 5, shape)
    if name == "complex64":
        return (drawn + 1j * drawn[::-1, ::-1]).astype(np.complex64)
    if name == "bfloat16":
        return drawn.astype(np.float32)
    return drawn.astype(name)


def check_type(checks: Checks, name: str, count: int) -> None:
    dtype = getattr(mx, name)
    n, rank, group = checks.size, checks.rank, checks.group
    all_x = values(name, (n, count))
    x = mx.array(all_x[rank]).astype(dtype)
    total = all_x.any(0) if name == "bool_" else all_x.sum(0, dtype=all_x.dtype)
    checks.equal(mx.distributed.all_sum(x, group=group), total)
    checks.equal(mx.distributed.all_sum(mx.where(True, x, x)), total)  # into memory of its own
    checks.equal(mx.distributed.all_max(x), all_x.max(0))
    checks.equal(mx.distributed.all_min(x), all_x.min(0))
    checks.equal(mx.distributed.all_gather(x), all_x.reshape(-1))
    if count % 2 == 0:
        turned = x.reshape(2, count // 2).T  # not contiguous
        expected = all_x.reshape(n, 2, count // 2).transpose(0, 2, 1)
        checks.equal(mx.distributed.all_gather(turned), expected.reshape(n * (count // 2), 2))
    to, source = (rank + 1) % n, (rank - 1) % n
    if rank % 2 == 0:
        mx.eval(mx.distributed.send(x, to))
        came = mx.distributed.recv_like(x, source)
        mx.eval(came)
    else:
        came = mx.distributed.recv_like(x, source)
        mx.eval(came)
        mx.eval(mx.distributed.send(x, to))
    assert came.dtype == dtype
    checks.equal(came, all_x[source])


def check_special_floats(checks: Checks) -> None:
    """Sums of 16-bit floats are rounded once; what is not a number stays."""
    for dtype in (mx.float16, mx.bfloat16):
        all_x = mx.array(np.random.default_rng(0).normal(size=(checks.size, 333))).astype(dtype)
        expected = all_x.astype(mx.float32).sum(0).astype(dtype)
        checks.equal(mx.distributed.all_sum(all_x[checks.rank]), expected)
        odd = mx.array([np.nan if checks.rank == 1 else 1.0, np.inf, -np.inf]).astype(dtype)
        summed = as_numpy(mx.distributed.all_sum(odd))
        assert np.isnan(summed[0]) and summed[1] == np.inf and summed[2] == -np.inf
        checks.done += 1


def check_groups(checks: Checks) -> None:
    """Groups of some ranks, made twice, in another order, and of groups."""
    rank, size = checks.rank, checks.size
    for kind in range(2):
        part = checks.group.split(rank % 2, key=size - rank)
        members = [each for each in range(size) if each % 2 == rank % 2][::-1]
        assert (part.rank(), part.size()) == (members.index(rank), len(members))
        x = mx.array([rank + 1.0, kind])
        expected = np.array([sum(each + 1.0 for each in members), kind * len(members)])
        checks.equal(mx.distributed.all_sum(x, group=part), expected)
        gathered = mx.distributed.all_gather(mx.array([rank]), group=part)
        checks.equal(gathered, np.array(members))
        alone = part.split(part.rank())
        checks.equal(mx.distributed.all_sum(x, group=alone), np.array([rank + 1.0, kind]))


def check_programs(checks: Checks) -> None:
    """A gradient, a compiled function, unequal arrival, and messages on a stream of their own."""
    rank, size = checks.rank, checks.size
    factors = size * (size + 1) // 2
    value, slope = mx.value_and_grad(lambda w: mx.distributed.all_sum(w * (rank + 1)).sum())(
        mx.ones(3)
    )
    checks.equal(value, np.array(3.0 * factors))
    checks.equal(slope, np.full(3, rank + 1.0))  # MLX passes gradients of sums on unchanged
    summed = mx.compile(lambda x: mx.distributed.all_sum(x * 2) + 1)
    for step in range(3):
        checks.equal(summed(mx.full((5,), step)), np.full(5, 2.0 * step * size + 1))
    for late in range(size):
        time.sleep(0.2 * (rank == late))
        checks.equal(mx.distributed.all_sum(mx.array([1])), np.array([size]))
    pending = [mx.distributed.all_sum(mx.full((7 + each,), rank)) for each in range(30)]
    mx.async_eval(*pending)
    mx.synchronize()  # also while new collectives are prepared
    for each, found in enumerate(pending):
        checks.equal(found, np.full(7 + each, size * (size - 1) / 2))
    other = mx.new_stream(mx.cpu)
    sent = mx.distributed.send(mx.ones(100_000), (rank + 1) % size, stream=other)
    came = mx.distributed.recv((100_000,), mx.float32, (rank - 1) % size)
    mx.eval(sent, came)
    checks.equal(came, np.ones(100_000))
    # nobody waits for these: they end with the program, which keeps no group
    part = checks.group.split(0)
    mx.async_eval(mx.distributed.all_sum(mx.ones(11)))
    mx.async_eval(mx.distributed.all_sum(mx.ones(13), group=part, stream=other))


def main() -> None:
    checks = Checks(mx.distributed.init())
    for name in TYPES:
        for count in COUNTS:
            check_type(checks, name, count)
    check_special_floats(checks)
    check_groups(checks)
    check_programs(checks)
    print(f"rank {checks.rank} of {checks.size}: {checks.done} checks")


if __name__ == "__main__":
    main()
