"""The parameters that a step used, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from unisono.parallel.run.divided_use import different_calls
from unisono.parallel.run.gathered_module import CallOrder
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
        self._places = torch.tensor([places[name] for name in held], dtype=torch.int64)
        """The place of each parameter of this rank in `names`."""

    def counts(self) -> torch.Tensor:
        """Returns the values of this rank, which are to be added over all ranks.

        1.0 for each parameter that this rank used in the step, else 0.0. Then, for each place in
        the pipeline, the checksum of the calls and its square.
        """
        found = torch.zeros(self._count + 2 * self._mesh.layout.pp, dtype=torch.float64)
        checksum, place = self._calls.checksum(), 2 * self._mesh.coordinates["pp"]
        found[self._count + place] = checksum
        found[self._count + place + 1] = checksum**2
        used = [flag for each in self._sets for flag in each.used()]
        found[self._places] = torch.tensor(used, dtype=torch.float64)
        return found

    def skip_unused(self, counts: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer skip parameters that no rank used.

        `counts`: the sum of `counts()` over all ranks. Raises `ValueError` if ranks with the same
        parameters have called modules in different orders.
        """
        counts, checksums = counts[: self._count], counts[self._count :].tolist()
        ranks = dist.get_world_size() // self._mesh.layout.pp
        for total, squares in zip(checksums[::2], checksums[1::2], strict=True):
            if ranks * int(squares) != int(total) ** 2:  # equal only if all checksums are equal
                raise ValueError(different_calls(self._mesh.layout.zero))
        if bool(counts.all()):
            return
        unused = (counts[self._places] == 0).tolist()
        for each in self._sets:
            own, unused = unused[: len(each.held)], unused[len(each.held) :]
            if any(own):
                each.skip(own, optimizer)
