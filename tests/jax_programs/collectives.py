"""Every collective of JAX gives NumPy's result on the ranks of `unisono.run`.

python collectives.py RANKS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unisono


def body() -> dict[str, Any]:
    import unisono.jax

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    unisono.jax.initialize()
    jax.config.update("jax_enable_x64", True)
    n = jax.device_count()
    assert jax.local_device_count() == 1 and n == jax.process_count()
    mesh = jax.make_mesh((n,), ("ranks",))
    split, whole = PartitionSpec("ranks"), PartitionSpec()
    checked = 0

    def placed(x: Any, spec: PartitionSpec = split) -> Any:
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda index: x[index]
        )

    def check(
        function: Callable[[Any], Any], x: Any, expected: Any, spec: PartitionSpec = split
    ) -> None:
        nonlocal checked
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=split, out_specs=spec, check_vma=False
        )
        out = jax.jit(mapped)(placed(x))
        found = np.concatenate([np.asarray(each.data) for each in out.addressable_shards])
        index = out.addressable_shards[0].index
        np.testing.assert_array_equal(found, np.asarray(expected)[index])
        checked += 1

    random = np.random.default_rng(0)
    for name in ("float32", "float64", "bfloat16", "int32", "int8", "complex64"):
        for count in (1, 1000, 70_001):
            x = random.integers(0, 7, (n, n * count)).astype(jnp.dtype(name))
            total = x.sum(0, dtype=x.dtype)[None]
            check(lambda x: jax.lax.psum(x, "ranks"), x, total, whole)
            pieces = total.reshape(n, count)
            check(
                lambda x: jax.lax.psum_scatter(x[0], "ranks", tiled=True)[None], x, pieces
            )
            check(lambda x: jax.lax.all_gather(x[0], "ranks"), x, np.concatenate([x] * n))
            check(
                lambda x: jax.lax.all_to_all(x, "ranks", 1, 0, tiled=True).reshape(1, -1),
                x,
                x.reshape(n, n, count).transpose(1, 0, 2).reshape(n, -1),
            )
            ring = [(rank, (rank + 1) % n) for rank in range(n)]
            check(lambda x: jax.lax.ppermute(x, "ranks", ring), x, np.roll(x, 1, 0))  # noqa: B023
            if name != "complex64":
                check(lambda x: jax.lax.pmax(x, "ranks"), x, x.max(0)[None], whole)
                check(lambda x: jax.lax.pmin(x, "ranks"), x, x.min(0)[None], whole)
    half = random.normal(size=(n, 10)).astype(np.float16)
    check(lambda x: jax.lax.ppermute(x, "ranks", [(0, n - 1)]), half, _only_last(half))
    check(_axis_sums(jax, n), np.ones((n, 3)), np.full((n, 3), float(n)))
    x, y = random.normal(size=(2 * n, 5)), random.normal(size=(5, 4))
    product = jax.jit(lambda x, y: (x @ y).sum(), out_shardings=NamedSharding(mesh, whole))
    np.testing.assert_allclose(float(product(placed(x), placed(y, whole))), (x @ y).sum())
    groups = _two_axes(jax, np, n)
    jax.distributed.shutdown()
    assert jax.config.jax_cpu_collectives_implementation == "mpi"
    assert "libunisono_mpi.so" in Path("/proc/self/maps").read_text()
    return {"checked": checked, "groups": groups}


def _only_last(x: Any) -> Any:
    found = np.zeros_like(x)
    found[-1] = x[0]
    return found


def _axis_sums(jax: Any, n: int) -> Callable[[Any], Any]:
    """A program with several collectives, in a loop."""

    def function(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.pmean(y, "ranks"), x) * n

    return function


def _two_axes(jax: Any, np: Any, n: int) -> int:
    """Sums over each axis of a mesh of two dimensions; returns the number of groups."""
    if n % 2:
        return 0
    PartitionSpec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2, n // 2), ("a", "b"))
    x = np.arange(n, dtype=np.float32).reshape(2, n // 2)
    placed = jax.make_array_from_callback(
        x.shape,
        jax.sharding.NamedSharding(mesh, PartitionSpec("a", "b")),
        lambda index: x[index],
    )
    for axis, expected in (("a", x.sum(0, keepdims=True)), ("b", x.sum(1, keepdims=True))):
        summed = jax.shard_map(
            lambda x, axis=axis: jax.lax.psum(x, axis),
            mesh=mesh,
            in_specs=PartitionSpec("a", "b"),
            out_specs=PartitionSpec(*(None if each == axis else each for each in ("a", "b"))),
        )
        out = jax.jit(summed)(placed)
        (shard,) = out.addressable_shards
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    return 2


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    results = unisono.run(body, ranks=ranks)
    print(results)
    assert len({str(each) for each in results}) == 1
    assert results[0]["checked"] > 100
