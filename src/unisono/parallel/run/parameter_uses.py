"""The parameters that a step used, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.parallel.run.parameter_sets import ParameterSet


class ParameterUses:
    """Counts the ranks that used each trained parameter of the whole model in a step.

    A parameter that no rank used has no gradient, as in one process: the optimizer skips it.
    """

    def __init__(self, names: Sequence[str], sets: Sequence[ParameterSet]) -> None:
        """`names`: the trained parameters of the whole model, in the same order on all ranks."""
        places = {name: place for place, name in enumerate(names)}
        self._count, self._sets = len(names), sets
        held = [each.name for found in sets for each in found.held]
        self._places = torch.tensor([places[name] for name in held], dtype=torch.int64)
        """The place of each parameter of this rank in `names`."""

    def counts(self) -> torch.Tensor:
        """Returns 1.0 for each parameter that this rank used in the step, else 0.0."""
        found = torch.zeros(self._count, dtype=torch.float64)
        used = [flag for each in self._sets for flag in each.used()]
        found[self._places] = torch.tensor(used, dtype=torch.float64)
        return found

    def skip_unused(self, counts: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer skip parameters that no rank used.

        `counts`: the sum of `counts()` over all ranks.
        """
        if bool(counts.all()):
            return
        unused = (counts[self._places] == 0).tolist()
        for each in self._sets:
            own, unused = unused[: len(each.held)], unused[len(each.held) :]
            if any(own):
                each.skip(own, optimizer)
