"""Parameters that are used by several modules, which may be on different pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import distributed as dist
from torch import nn

from unisono.parallel.divisible.parameter_block import block_of
from unisono.parallel.run.pipeline.model_stages import stages_of_rank
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout

Tie = tuple[str, ...]
"""All names of one parameter, in the model's order. The first name identifies the parameter."""


def find_ties(model: nn.Module) -> list[Tie]:
    """Returns the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(found) for found in names.values() if len(found) > 1]


def first_names(ties: Sequence[Tie]) -> dict[str, str]:
    """Returns the first name of the tie of each tied parameter."""
    return {name: tie[0] for tie in ties for name in tie}


def tie_again(model: nn.Module, ties: Sequence[Tie]) -> None:
    """Makes all names of each tie refer to one parameter again.

    Division has given each module a block of its own. Raises `ValueError` if these blocks differ.
    """
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            other = model.get_parameter(name)
            if block_of(other) != block_of(kept) or other.shape != kept.shape:
                raise ValueError(
                    f"{first} and {name} are one parameter, but the layout divides only one of "
                    "them, or each differently; give each module a parameter of its own; tp = 1 "
                    "works"
                )
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, kept)


def stages_of_parameters(
    ties: Sequence[Tie], stages: Sequence[nn.Module]
) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of the stages that hold each parameter, under the parameter's first name.

    `stages`: all stages of the pipeline.
    """
    first = first_names(ties)
    found: dict[str, dict[int, None]] = {}
    for number, stage in enumerate(stages):
        for name, _ in stage.named_parameters(remove_duplicate=False):
            found.setdefault(first.get(name, name), {})[number] = None
    return {name: tuple(numbers) for name, numbers in found.items()}


def tie_groups(
    holders: Mapping[str, Sequence[int]], mesh: TrainingMesh
) -> dict[str, dist.ProcessGroup | None]:
    """Returns this rank's process group for each parameter that stages of several ranks hold.
    Collective.

    `holders`: the numbers of the stages that hold each parameter. The result has the same keys.
    """
    shared = {
        name: tuple(sorted(set(places))) for name, places in _places(holders, mesh.layout).items()
    }
    several = sorted({each for each in shared.values() if len(each) > 1})
    groups = {places: mesh.make_tie_group(places) for places in several}
    return {name: groups[places] for name, places in shared.items() if groups.get(places)}


def held_twice(holders: Mapping[str, Sequence[int]], layout: Layout) -> set[str]:
    """Returns the parameters that several stages of one rank hold, as the ends of a V do.

    `holders`: the numbers of the stages that hold each parameter.
    """
    places = _places(holders, layout)
    return {name for name, found in places.items() if len(set(found)) < len(found)}


def _places(holders: Mapping[str, Sequence[int]], layout: Layout) -> dict[str, list[int]]:
    """Returns the place in the pipeline of each stage that holds a parameter."""
    place_of = {
        stage: place for place in range(layout.pp) for stage in stages_of_rank(layout, place)
    }
    return {name: [place_of[stage] for stage in stages] for name, stages in holders.items()}
