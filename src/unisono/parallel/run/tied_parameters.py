"""Parameters that are used by several modules, which may be on different pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import distributed as dist
from torch import nn

from unisono.parallel.run.model_stages import stages_of_rank
from unisono.parallel.training_mesh import TrainingMesh

Tie = tuple[str, ...]
"""All names of one parameter, in the model's order. The first name identifies the parameter."""


def find_ties(model: nn.Module) -> list[Tie]:
    """Returns the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(found) for found in names.values() if len(found) > 1]


def tie_again(model: nn.Module, ties: Sequence[Tie]) -> None:
    """Makes all names of each tie refer to one parameter again.

    Division has given each module a block of its own.
    """
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, kept)


def tie_groups(
    ties: Sequence[Tie], stages: Sequence[Sequence[str]], mesh: TrainingMesh
) -> dict[str, dist.ProcessGroup | None]:
    """Returns this rank's process group for each tie (shared parameter). Collective.

    A tie needs a group if its modules are on pipeline stages of several ranks.

    The key is the first name of the tie. `stages`: the names of the modules of each stage.
    """
    holders = {
        module: place
        for place in range(mesh.layout.pp if stages else 0)
        for stage in stages_of_rank(mesh.layout, place)
        for module in stages[stage]
    }
    found: dict[str, dist.ProcessGroup | None] = {}
    for tie in ties:
        places = sorted({holders.get(name.split(".")[0], 0) for name in tie})
        if len(places) == 1:
            continue
        for pipeline in mesh.grid.groups("pp"):  # every rank makes every group, as torch requires
            ranks = [pipeline[place] for place in places]
            group = dist.new_group(ranks)
            if mesh.rank in ranks:
                found[tie[0]] = cast(dist.ProcessGroup, group)
    return found
