"""The tree that explains a step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unisono.planner.inputs.layer_division import stage_layers
from unisono.planner.inputs.layout import Layout
from unisono.planner.step_times.step_time import StepModel

_TITLES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "kernels between matrix products",
    "recompute": "recomputation",
    "output": "output projection and loss",
    "tensor": "tensor-parallel exchanges",
    "context": "context-parallel exchanges, exposed",
    "expert": "expert exchanges",
    "shards": "weights and gradients of ZeRO-2 and 3, exposed",
    "host": "waiting for the host to launch kernels",
    "send": "messages between stages, exposed",
    "sums": "sums of gradients over microbatches",
    "bubble": "pipeline bubble",
    "gradients": "gradient exchange, exposed",
    "optimizer": "optimizer",
    "step": "host time of a step",
    "straggler": "waiting for the slowest device",
}


@dataclass(frozen=True, kw_only=True)
class TimeNode:
    """A node of the tree: a part of the step time, its formula with numbers, and its own parts as
    children.
    """

    name: str
    seconds: float
    formula: str = ""
    children: tuple[TimeNode, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines(self.seconds, 0))

    def _lines(self, whole_s: float, depth: int) -> Iterator[str]:
        share = self.seconds / whole_s if whole_s else 0.0
        name = "  " * depth + self.name
        line = f"{name:48s} {self.seconds:11.6f} s {share:6.1%}  {self.formula}"
        yield line.rstrip()
        for child in self.children:
            yield from child._lines(whole_s, depth + 1)


def time_tree(
    times: StepModel,
    layout: Layout,
    micro_batch: int,
    recompute: str,
    kinds: Mapping[str, float],
) -> TimeNode:
    """Returns the tree of a step time by kind."""
    microbatches = times.workload.global_batch // (layout.dp * micro_batch)
    layers = max(stage_layers(times.model.layers, layout.pp, layout.chunks))
    formulas = _formulas(times, layout, microbatches, layers, recompute)
    operators = _operators(times, layout, micro_batch)
    nodes = []
    for kind, seconds in kinds.items():
        if not seconds:
            continue
        own = [each for each in operators if each[0] == kind]
        nodes.append(
            TimeNode(
                name=_TITLES[kind],
                seconds=seconds,
                formula=formulas.get(kind, ""),
                children=_scaled(own, seconds),
            )
        )
    nodes.sort(key=lambda node: -node.seconds)
    name = f"step of {layout.text()}, micro batch {micro_batch}, recompute {recompute}"
    return TimeNode(name=name, seconds=sum(kinds.values()), children=tuple(nodes))


def _scaled(own: list[tuple[str, str, float, str]], seconds: float) -> tuple[TimeNode, ...]:
    """Divides the seconds of one kind of time among its operators, in proportion to their times in
    a layer.
    """
    whole = sum(each[2] for each in own)
    return tuple(
        TimeNode(name=name, seconds=seconds * layer_s / whole, formula=formula)
        for _, name, layer_s, formula in own
    )


def _operators(
    times: StepModel, layout: Layout, micro_batch: int
) -> list[tuple[str, str, float, str]]:
    experts = times.model.moe_layers > 0
    shape = times.shape(layout, micro_batch, experts=experts)
    found = []
    for each in times.layers.operators(shape):
        parts = []
        if each.flops:
            parts.append(f"{each.flops:.3g} FLOPs")
        if each.nbytes:
            parts.append(f"{each.nbytes:.3g} bytes")
        formula = (
            f"a layer: {' and '.join(parts)} in {each.forward_s * 1e6:.0f} us forward, "
            f"{each.backward_s * 1e6:.0f} us backward"
        )
        if each.flops and each.kind == "matmul":
            formula += f" ({each.flops / each.forward_s / times.kernels.peak:.0%} of the peak)"
        found.append((each.kind, each.name, each.forward_s + each.backward_s, formula))
    return found


def _formulas(
    times: StepModel, layout: Layout, microbatches: int, layers: int, recompute: str
) -> dict[str, str]:
    kernels, exchanges = times.kernels, times.exchanges
    passes = 3 if recompute == "full" else 2
    count = f"{microbatches} microbatches x {layers} layers"
    group = exchanges.place(layout.dp * layout.cp, layout.tp)
    return {
        "matmul": f"{count}; peak {kernels.peak:.4g} FLOP/s, at most "
        f"{kernels.matrix_rate / kernels.peak:.0%} of it",
        "attention": count,
        "memory": f"{count}; {kernels.memory_Bps:.4g} bytes/s",
        "recompute": f"{count}; {recompute}",
        "tensor": f"{count} x {passes} passes x 2 all_reduce among {layout.tp}",
        "context": f"{count} x {passes} passes among {layout.cp}",
        "expert": f"{count} x {passes} passes x 2 all_to_all among {layout.ep}",
        "send": _messages_text(times, layout, microbatches),
        "bubble": f"(p - 1) / (v m) = ({layout.pp} - 1) / ({layout.chunks} x {microbatches}) of "
        "equal stages; unequal stages wait for the slowest",
        "gradients": f"among {group.ranks}, {group.local} in a domain",
        "optimizer": f"{times.constants.optimizer_bytes:.0f} bytes a parameter",
        "straggler": f"slowest of {layout.devices}: standard deviation "
        f"{times.constants.straggler:.2%}",
    }


def _messages_text(times: StepModel, layout: Layout, microbatches: int) -> str:
    if times.sends_behind_compute(layout):
        hidden = f"{microbatches} microbatches x 2 x {layout.chunks} hidden messages"
        return f"2 x ({layout.pp} - 1) messages while the pipeline fills, slowdown by {hidden}"
    return f"{microbatches} microbatches x 2 x {layout.chunks} messages"
