"""Every collective of JAX gives NumPy's result on the ranks of `unisono.run`.

python collectives.py RANKS [HOSTS]: the ranks pretend to be on several hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unisono

TYPES = ("float32", "float64", "bfloat16", "int32", "int8", "complex64")
COUNTS = (1, 1000, 70_001)
LEAST_CHECKS = 100


class Mesh:
    """A mesh of all processes, with functions that run on it."""

    def __init__(self) -> None:
        import jax

        self.size = jax.device_count()
        self._jax, self._mesh = jax, jax.make_mesh((self.size,), ("ranks",))
        self.checked = 0

    def placed(self, x: Any, *axes: str | None) -> Any:
        sharding = self._jax.sharding
        at = sharding.NamedSharding(self._mesh, sharding.PartitionSpec(*axes))
        return self._jax.make_array_from_callback(x.shape, at, lambda index: x[index])

    def check(
        self, function: Callable[[Any], Any], x: Any, expected: Any, *, whole: bool = False
    ) -> None:
        """Runs a function on the rows of the ranks; its results are one row of each, or equal."""
        spec = self._jax.sharding.PartitionSpec
        mapped = self._jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=spec("ranks"),
            out_specs=spec() if whole else spec("ranks"),
            check_vma=False,
        )
        (shard,) = self._jax.jit(mapped)(self.placed(x, "ranks")).addressable_shards
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected)[shard.index])
        self.checked += 1


def check_type(mesh: Mesh, name: str, count: int) -> None:
    from jax import lax
    from jax import numpy as jnp

    n = mesh.size
    values = np.random.default_rng(count).integers(0, 7, (n, n * count))
    x = values.astype(jnp.dtype(name))
    total = x.sum(0, dtype=x.dtype)[None]
    ring = [(rank, (rank + 1) % n) for rank in range(n)]
    exchanged = x.reshape(n, n, count).transpose(1, 0, 2).reshape(n, -1)
    mesh.check(lambda x: lax.psum(x, "ranks"), x, total, whole=True)
    mesh.check(
        lambda x: lax.psum_scatter(x[0], "ranks", tiled=True)[None], x, total.reshape(n, count)
    )
    mesh.check(lambda x: lax.all_gather(x[0], "ranks"), x, np.concatenate([x] * n))
    mesh.check(lambda x: lax.all_to_all(x, "ranks", 1, 0, tiled=True).reshape(1, -1), x, exchanged)
    mesh.check(lambda x: lax.ppermute(x, "ranks", ring), x, np.roll(x, 1, 0))
    if name != "complex64":
        mesh.check(lambda x: lax.pmax(x, "ranks"), x, x.max(0)[None], whole=True)
        mesh.check(lambda x: lax.pmin(x, "ranks"), x, x.min(0)[None], whole=True)


def check_programs(mesh: Mesh) -> None:
    """Checks a permutation of some ranks in float16, a loop, and a product that JAX divides."""
    import jax

    n, random = mesh.size, np.random.default_rng(0)
    half = random.normal(size=(n, 10)).astype(np.float16)
    moved = np.zeros_like(half)
    moved[-1] = half[0]
    mesh.check(lambda x: jax.lax.ppermute(x, "ranks", [(0, n - 1)]), half, moved)

    def mean_in_a_loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.pmean(y, "ranks") + 1, x)

    mesh.check(mean_in_a_loop, np.ones((n, 3)), np.full((n, 3), 4.0))
    x, y = random.normal(size=(2 * n, 5)), random.normal(size=(5, 4))
    product = jax.jit(lambda x, y: (x @ y).sum())(mesh.placed(x, "ranks"), mesh.placed(y))
    np.testing.assert_allclose(float(product), (x @ y).sum())


def check_two_axes() -> None:
    """Sums over each axis of a mesh of two dimensions, whose groups are some of the ranks."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    n = jax.device_count()
    mesh = jax.make_mesh((2, n // 2), ("a", "b"))
    x = np.arange(n, dtype=np.float32).reshape(2, n // 2)
    placed = jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, PartitionSpec("a", "b")), lambda index: x[index]
    )
    for axis, expected in (("a", x.sum(0, keepdims=True)), ("b", x.sum(1, keepdims=True))):
        left = PartitionSpec(*(None if each == axis else each for each in ("a", "b")))
        summed = jax.shard_map(
            lambda x, axis=axis: jax.lax.psum(x, axis),
            mesh=mesh,
            in_specs=PartitionSpec("a", "b"),
            out_specs=left,
        )
        (shard,) = jax.jit(summed)(placed).addressable_shards
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def body(hosts: int) -> int:
    os.environ["UNISONO_HOST_ID"] = str(int(os.environ["UNISONO_RANK"]) % hosts)
    import unisono.jax  # isort: skip # before jax

    import jax

    unisono.jax.initialize()
    jax.config.update("jax_enable_x64", True)
    mesh = Mesh()
    for name in TYPES:
        for count in COUNTS:
            check_type(mesh, name, count)
    check_programs(mesh)
    if mesh.size % 2 == 0:
        check_two_axes()
    jax.distributed.shutdown()
    assert "libunisono_mpi.so" in Path("/proc/self/maps").read_text()
    return mesh.checked


if __name__ == "__main__":
    ranks, hosts = int(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])
    checked = unisono.run(body, ranks=ranks, args=(hosts,))
    assert checked == [checked[0]] * ranks and checked[0] > LEAST_CHECKS, checked
