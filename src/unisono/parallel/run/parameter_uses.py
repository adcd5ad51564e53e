"""The parameters that a step used, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import distributed as dist

from unisono.parallel.run.divided_use import different_calls
from unisono.parallel.run.gathered_module import CallOrder
from unisono.parallel.run.optimizers import Optimizers
from unisono.parallel.run.parameter_sets import ParameterSet
from unisono.parallel.training_mesh import TrainingMesh


class ParameterUses:
    """Counts the ranks that used each trained parameter of the whole model in a step.

    A parameter that no rank used has no gradient, as in one process: the optimizer skips it.
    Compares the calls of modules that gather parameters, too.
    """

    def __init__(
        self,
        names: Sequence[str],
        sets: Sequence[ParameterSet],
        mesh: TrainingMesh,
        calls: CallOrder,
    ) -> None:
        """`names`: the trained parameters of the whole model, in the same order on all ranks."""
        self._mesh, self._calls = mesh, calls
        places = {name: place for place, name in enumerate(names)}
        self._count, self._sets = len(names), sets
        held = [each.name for found in sets for each in found.held]
        self._places = [places[name] for name in held]
        """The place of each parameter of this rank in `names`."""

    def counts(self) -> list[float]:
        """Returns the values of this rank, which are to be added over all ranks.

        1.0 for each parameter that this rank used in the step, else 0.0. Then, for each place in
        the pipeline, the checksum of the calls and its square.
        """
        found = [0.0] * (self._count + 2 * self._mesh.layout.pp)
        used = (flag for each in self._sets for flag in each.used())
        for place, flag in zip(self._places, used, strict=True):
            found[place] = float(flag)
        checksum, place = self._calls.checksum(), self._count + 2 * self._mesh.coordinates["pp"]
        found[place : place + 2] = checksum, checksum**2
        return found

    def skip_unused(self, counts: Sequence[float], optimizers: Optimizers) -> None:
        """Makes the optimizers skip parameters that no rank used.

        `counts`: the sum of `counts()` over all ranks. Raises `ValueError` if ranks with the same
        parameters have called modules in different orders.
        """
        counts, checksums = counts[: self._count], counts[self._count :]
        ranks = dist.get_world_size() // self._mesh.layout.pp
        for total, squares in zip(checksums[::2], checksums[1::2], strict=True):
            if ranks * int(squares) != int(total) ** 2:  # equal only if all checksums are equal
                raise ValueError(different_calls(self._mesh.layout))
        if all(counts):
            return
        unused = [counts[place] == 0 for place in self._places]
        for each in self._sets:
            own, unused = unused[: len(each.held)], unused[len(each.held) :]
            if any(own):
                each.skip(own, optimizers)
