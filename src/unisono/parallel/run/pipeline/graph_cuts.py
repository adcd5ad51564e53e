"""The cuts of a traced graph into stages: its operations, and the values that cross a cut."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from unisono.parallel.run.pipeline.model_stages import Floats, best_parts
from unisono.parallel.run.pipeline.traced_graph import TracedGraph


@dataclass(frozen=True, kw_only=True)
class GraphOperations:
    """The operations of a graph in order, without those that each stage repeats."""

    traced: TracedGraph
    nodes: list[fx.Node]
    repeated: set[fx.Node]
    """Attributes, and operations on buffers and constants only. Each stage that needs their results
    computes these results itself, so the results cross no cut."""
    lifetimes: dict[fx.Node, tuple[int, int]]
    """For each value, the first and the last place of a cut that the value crosses. The output of
    the model crosses the end of the graph."""

    @classmethod
    def of(cls, traced: TracedGraph) -> GraphOperations:
        """Returns the operations of a graph."""
        changed = {memory_of(each, traced) for node in traced.flops for each in written_by(node)}
        repeated: set[fx.Node] = set()
        nodes: list[fx.Node] = []
        made: dict[fx.Node, int] = {}
        used: dict[fx.Node, int] = {}
        for node in traced.module.graph.nodes:
            if node.op == "get_attr" or _is_repeatable(node, repeated, changed, traced):
                repeated.add(node)
                continue
            place = len(nodes)
            used.update(dict.fromkeys(node.all_input_nodes, place))
            if node.op == "placeholder":
                made[node] = 0
            elif node.op != "output":
                nodes.append(node)
                made[node] = len(nodes)
        lifetimes = {node: (made[node], used[node]) for node in made if node in used}
        return cls(traced=traced, nodes=nodes, repeated=repeated, lifetimes=lifetimes)

    def costs(self) -> list[float]:
        """Returns the FLOPs of each operation; if no operation has any, the size of its result."""
        costs = [float(self.traced.flops[node]) for node in self.nodes]
        if any(costs):
            return costs
        values = [self.traced.values[node] for node in self.nodes]
        return [float(v.numel()) if isinstance(v, torch.Tensor) else 0.0 for v in values]

    def live(self, place: int) -> list[fx.Node]:
        """Returns the values that cross a cut before the operation at a place."""
        return [node for node, (first, last) in self.lifetimes.items() if first <= place <= last]

    def inputs(self) -> list[fx.Node]:
        """Returns the inputs of the graph, also those that it does not use."""
        return [node for node in self.traced.module.graph.nodes if node.op == "placeholder"]

    def results(self) -> list[fx.Node]:
        """Returns the results of the graph, in order."""
        (output,) = (node for node in self.traced.module.graph.nodes if node.op == "output")
        found = output.args[0]
        nodes = found if isinstance(found, (tuple, list)) else (found,)
        return [node for node in nodes if isinstance(node, fx.Node)]

    def crossing_bytes(self) -> list[float]:
        """Returns the bytes of the values that cross a cut before each operation; infinite if a cut
        is not possible.

        A cut is not possible where a value that is not a tensor crosses, and where both parts use
        the memory of a buffer that an operation changes. It is also not possible where several
        crossing values share memory that a later operation changes: a message would copy them.
        """
        steps = [0.0] * (len(self.nodes) + 2)
        blocked = [0] * (len(self.nodes) + 2)
        for node, (first, last) in self.lifetimes.items():
            value = self.traced.values[node]
            if isinstance(value, torch.Tensor):
                _add(steps, first, last, value.nbytes)
            else:
                _add(blocked, first, last, 1)
        for first, last in self._changed_in_place():
            _add(blocked, first, last, 1)
        counts = zip(accumulate(steps), accumulate(blocked), strict=True)
        return [math.inf if count else size for size, count in counts][: len(self.nodes)]

    def _changed_in_place(self) -> Iterator[tuple[int, int]]:
        """Yields the first and last places of cuts that a change in place makes impossible."""
        last_write: dict[Hashable, int] = {}
        uses: defaultdict[Hashable, list[int]] = defaultdict(list)
        for place, node in enumerate(self.nodes):
            for each in written_by(node):
                last_write[memory_of(each, self.traced)] = place
            for each in node.all_input_nodes:
                if each in self.repeated:
                    uses[memory_of(each, self.traced)].append(place)
        for memory, written in last_write.items():
            if places := uses.get(memory):
                yield min(places) + 1, max(places)
            shared = [0] * (len(self.nodes) + 2)
            for node, (first, last) in self.lifetimes.items():
                if memory_of(node, self.traced) == memory:
                    _add(shared, first, last, 1)
            for place, count in enumerate(accumulate(shared)):
                if count > 1 and place <= written:
                    yield place, place


def written_by(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose memory an operation changes, by torch's names of operations."""
    if node.op != "call_function":
        return []
    name = str(node.target).split(".")[1:2]
    if name == ["batch_norm"]:
        return [each for each in node.args[3:5] if isinstance(each, fx.Node)]
    if name and name[0].endswith("_") and not name[0].endswith("__"):
        return [each for each in node.args[:1] if isinstance(each, fx.Node)]
    return []


def memory_of(node: fx.Node, traced: TracedGraph) -> Hashable:
    """Returns an identity that tensors with common memory share."""
    value = traced.values.get(node)
    if not isinstance(value, torch.Tensor):
        return node
    storage: Any = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
    return int(storage.cdata)


def _is_repeatable(
    node: fx.Node, repeated: set[fx.Node], changed: set[Hashable], traced: TracedGraph
) -> bool:
    """Returns True for an operation on buffers and constants that gives the same value again."""
    if node.op != "call_function" or not all(each in repeated for each in node.all_input_nodes):
        return False
    value = traced.values[node]
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return False
    tags = getattr(node.target, "tags", [])
    memories = {memory_of(each, traced) for each in (node, *node.all_input_nodes)}
    return torch.Tag.nondeterministic_seeded not in tags and not memories & changed


def _add(steps: list[Any], first: int, last: int, value: float) -> None:
    """Adds a value to all places from `first` to `last`, in a list of differences."""
    steps[first] += value
    steps[last + 1] -= value


_SLACK = 0.1
"""Share by which the most expensive stage may exceed the least possible cost, if fewer bytes cross
the cuts then."""


def choose_cuts(costs: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """Returns the number of the first operation of each stage.

    `costs`: the cost of each operation, in FLOPs. `crossing`: for each operation, the bytes of all
    values that cross a cut before it; infinite where no cut is possible. The largest cost of a
    stage is at most 10 % above the least possible one. Among these cuts, the sum of the crossing
    bytes is minimal, and then the largest cost. Every stage has an operation with a cost. Raises
    `ValueError` if there are too few possible cuts.

    >>> choose_cuts([4, 4, 0, 0, 4, 4], [0, 8, 8, 2, 8, 8], 2)
    [0, 3]
    >>> choose_cuts([4, 4, 0, 0, 4, 4], [0, 8, 8, 2, 8, 8], 4)
    [0, 1, 3, 5]
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    places = _candidates(crossing, sums)
    if len(places) < stages:
        raise ValueError(
            f"{stages} stages need {stages - 1} cuts, but the values of the graph allow "
            f"{len(places) - 1}; {len(places)} stages work"
        )
    weights = sums[[*places, len(costs)]]
    sizes = np.array([0.0, *(crossing[place] for place in places[1:])])
    _, least = best_parts(weights, np.zeros(len(places)), stages)
    firsts, _ = best_parts(weights, sizes, stages, least * (1 + _SLACK))
    return [places[first] for first in firsts]


def _candidates(crossing: Sequence[float], sums: Floats) -> list[int]:
    """Returns the possible first operations of stages, the first operation included.

    `sums`: the cost before each operation, and the whole cost. Of cuts between the same two
    operations with costs, only the cut with the fewest bytes remains.
    """
    best: dict[float, int] = {}
    for place in range(1, len(crossing)):
        cost = float(sums[place])
        if not np.isfinite(crossing[place]) or not 0 < cost < sums[-1]:
            continue
        if cost not in best or crossing[place] < crossing[best[cost]]:
            best[cost] = place
    return [0, *best.values()]
