"""The names of a model's parameters, of which several modules may use one, on several stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from unisono.parallel.divisible.parameter_block import block_of
from unisono.parallel.run.parameters.parameter_sets import Group, HeldParameter
from unisono.parallel.run.pipeline.model_stages import stages_of_rank
from unisono.parallel.training_mesh import TrainingMesh

Tie = tuple[str, ...]
"""All names of one parameter, in the model's order. The first name identifies the parameter."""

Stages = Sequence[tuple[int, nn.Module]]


def find_ties(model: nn.Module) -> list[Tie]:
    """Returns the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(found) for found in names.values() if len(found) > 1]


class NamedParameters:
    """The names of the parameters of a whole model, and the stages that hold them."""

    def __init__(self, model: nn.Module) -> None:
        """Notes the names, before the model is divided."""
        self._ties = find_ties(model)
        self._first = {name: tie[0] for tie in self._ties for name in tie}
        named = list(model.named_parameters())
        self._order = {name: place for place, (name, _) in enumerate(named)}
        self.trained = [name for name, each in named if each.requires_grad]
        """The names of the trained parameters."""
        self._groups: dict[str, Group] = {}
        self._twice: set[str] = set()

    def tie_again(self, model: nn.Module) -> None:
        """Makes all names of each tie refer to one parameter again.

        Division has given each module a block of its own. Raises `ValueError` if these blocks
        differ.
        """
        for first, *others in self._ties:
            kept = model.get_parameter(first)
            for name in others:
                other = model.get_parameter(name)
                if block_of(other) != block_of(kept) or other.shape != kept.shape:
                    raise ValueError(
                        f"{first} and {name} are one parameter, but the layout divides only one of "
                        "them, or each differently; give each module a parameter of its own; tp = "
                        "1 works"
                    )
                path, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(path), attribute, kept)

    def place(self, stages: Sequence[nn.Module], mesh: TrainingMesh) -> None:
        """Notes the stages that hold each parameter, and makes this rank's process group for each
        parameter that stages of several ranks hold. Collective. `stages`: all of the pipeline."""
        layout, holders = mesh.layout, dict[str, dict[int, int]]()
        place_of = {n: place for place in range(layout.pp) for n in stages_of_rank(layout, place)}
        for number, stage in enumerate(stages):
            for name, _ in stage.named_parameters(remove_duplicate=False):
                holders.setdefault(self._first.get(name, name), {})[number] = place_of[number]
        places = {name: tuple(sorted(set(found.values()))) for name, found in holders.items()}
        several = sorted({each for each in places.values() if len(each) > 1})
        groups = {each: mesh.make_tie_group(each) for each in several}
        self._groups = {name: groups[each] for name, each in places.items() if groups.get(each)}
        self._twice = {name for name, each in holders.items() if len(places[name]) < len(each)}

    def held(self, stages: Stages) -> list[HeldParameter]:
        """Returns this rank's parameters under their names in the whole model, each once.

        They are in the model's order, because the ranks that share parameters sum them in this
        order.
        """
        return [
            HeldParameter(name=name, values=each, block=block_of(each), tie=self._groups.get(name))
            for name, each in self._named(stages)
        ]

    def held_twice(self, held: Sequence[HeldParameter]) -> set[nn.Parameter]:
        """Returns the parameters that several stages of one rank hold, as the ends of a V do."""
        return {each.values for each in held if each.name in self._twice}

    def held_again(self, held: Sequence[HeldParameter], stages: Stages) -> list[HeldParameter]:
        """Returns parameters with the values that the stages have now."""
        known = {each.name: each for each in held}
        return [replace(known[name], values=values) for name, values in self._named(stages)]

    def _named(self, stages: Stages) -> list[tuple[str, nn.Parameter]]:
        found: dict[str, nn.Parameter] = {}
        for _, stage in stages:
            for name, parameter in stage.named_parameters():
                found.setdefault(self._first.get(name, name), parameter)
        return sorted(found.items(), key=lambda item: self._order[item[0]])
