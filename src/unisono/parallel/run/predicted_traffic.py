"""The bytes that a rank sends in one step, from closed forms.

With n ranks and N bytes, a rank sends 2 (n-1)/n N bytes in a sum (all_reduce), and (n-1)/n N bytes
in a gather or a reduce_scatter. docs/parallel.md lists the closed forms of each strategy. Modules
that communicate compute their own bytes; see `Exchanging`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from unisono.parallel.divisible.interfaces import MicrobatchPart, exchanging
from unisono.parallel.precision import Precision
from unisono.parallel.run.fully_sharded_set import gather_traffic
from unisono.parallel.run.measured_schedule import MessageBytes
from unisono.parallel.run.model_stages import stage_count, stages_of_rank
from unisono.parallel.run.parameter_sets import ParameterSet
from unisono.parallel.run.stage_messages import HEADER_BYTES
from unisono.parallel.training_mesh import TrainingMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The size of a step on one rank."""

    parts: tuple[MicrobatchPart, ...]
    """This rank's microbatches."""
    regathers: Mapping[int, int] = field(default_factory=dict)
    """By stage: how many times a pipeline gathers weights that ZeRO-2 or ZeRO-3 split, after the
    first time in a step."""
    result_bytes: Mapping[int, MessageBytes] = field(default_factory=dict)
    """By stage of the pipeline: the sizes of the last step's results."""


def predicted_bytes(
    stages: Sequence[tuple[int, nn.Module]],
    sets: Sequence[ParameterSet],
    mesh: TrainingMesh,
    size: StepSize,
    precision: Precision,
) -> dict[str, float]:
    """Returns the bytes that this rank sends, under the group names of `TrainingMesh.bytes_sent`.

    The bytes of messages of pipelines, and of exchanges whose sizes the values of a batch
    determine, come from the last step.
    """
    found: defaultdict[str, float] = defaultdict(float)

    def add(sent: Mapping[str, float], times: int = 1) -> None:
        for name, nbytes in sent.items():
            found[mesh.counted_as(name)] += nbytes * times

    for each in sets:
        add(each.traffic(len(size.parts)))
    for number, stage in stages:
        add(gather_traffic(stage, mesh, precision), size.regathers.get(number, 0))
        add({"pp": _messages(number, mesh, size)})
        for module in exchanging(stage):
            add(module.bytes_sent(size.parts))
    return dict(found)


def _messages(number: int, mesh: TrainingMesh, size: StepSize) -> int:
    """Returns the bytes of a stage's messages to other ranks: results, gradients and a header."""
    own = stages_of_rank(mesh.layout, mesh.coordinates["pp"]) if mesh.layout.pp > 1 else [0]
    neighbours = {number - 1, number + 1} - set(own) - {-1, stage_count(mesh.layout)}
    _, gradients = size.result_bytes.get(number - 1, (0, 0))
    results, _ = size.result_bytes.get(number, (0, 0))
    sent = gradients * (number - 1 in neighbours) + results * (number + 1 in neighbours)
    return sent * len(size.parts) + HEADER_BYTES * (number + 1 in neighbours)
