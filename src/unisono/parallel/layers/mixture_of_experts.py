"""A mixture of experts, whose experts are split across the ranks of `ep`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.division import nearest_divisor
from unisono.parallel.divisible.exchanges import gather_copies, keep_part
from unisono.parallel.divisible.interfaces import ALL_ACTIVATIONS, MicrobatchPart
from unisono.parallel.divisible.parameter_block import cut, sum_over_tp
from unisono.parallel.layers.expert_exchange import ExpertExchange, expert_overhead_bytes
from unisono.parallel.layers.expert_loads import add_gradient, balance_loss, within_capacity
from unisono.parallel.layers.feed_forward import activate
from unisono.parallel.layers.tensor_1d import SEQUENCE
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Transformer

_BALANCE = 0.01


class MixtureOfExperts(nn.Module):
    """Sends each token to the `top_k` experts of highest score.

    With a capacity, an expert takes only the first tokens of a sequence that choose it, and adds
    nothing to the other tokens. Input and output have the shape (batch, sequence, hidden).

    Each rank routes different tokens: inside the module, the ranks of `tp` divide the positions,
    also without sequence parallelism.
    """

    serves = ALL_ACTIVATIONS

    def __init__(
        self,
        shape: Transformer,
        *,
        balance: float = _BALANCE,
        capacity_factor: float | None = None,
    ) -> None:
        """`balance`: factor of the loss that balances the experts' loads.

        `capacity_factor`: capacity divided by the mean load of an expert; None: no token is
        dropped. Raises `ValueError` for a capacity factor that is not above 0.
        """
        super().__init__()
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor: expected a number above 0, got {capacity_factor}")
        self.capacity_factor = capacity_factor
        self.experts, self.top_k, self.hidden = shape.experts, shape.top_k, shape.hidden
        self.router = Router(shape.hidden, shape.experts, bias=False)
        self.routed = Experts(shape, count=shape.experts, ffn=shape.expert_ffn)
        shared_ffn = shape.shared_experts * shape.expert_ffn
        self.shared = Experts(shape, count=1, ffn=shared_ffn) if shared_ffn else None
        self.balance = balance
        self.auxiliary_loss = torch.zeros(())
        self.auxiliary_scale: float | None = None
        self.rows_moved = 0
        """Number of rows that forward passes sent to other ranks since `reset_auxiliary`."""
        self.dropped = 0
        """Number of expert choices of this rank's tokens that full experts dropped since
        `reset_auxiliary`."""
        self._mesh: TrainingMesh | None = None

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's experts.

        Raises `ValueError` if the number of experts is not divisible by `ep`.
        """
        layout, parts = mesh.layout, mesh.layout.ep
        if self.experts % parts:
            ranks = layout.dp // layout.dp_replicate * layout.cp * layout.tp  # ep divides it too
            near = nearest_divisor(math.gcd(self.experts, ranks), parts)
            raise ValueError(
                f"ep must divide the experts: {parts} does not divide {self.experts}; {near} does"
            )
        self._mesh = mesh
        for parameter in self.parameters():
            sum_over_tp(parameter)
        # With one rank on `ep`, experts are like other parameters.
        if parts > 1:
            self.routed.keep_own(mesh)

    def reset_auxiliary(self) -> None:
        self.auxiliary_loss = torch.zeros(())
        self.rows_moved = self.dropped = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = self._mesh
        group = mesh.group("tp") if mesh and not mesh.layout.sequence_parallel else None
        own = keep_part(x, group, dim=SEQUENCE)
        with torch.autocast("cpu", enabled=False):  # roundings would choose other experts
            scores = self.router(own).softmax(-1)
        weights, chosen = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        rows = own.reshape(-1, self.hidden)
        length = x.shape[SEQUENCE]
        if mesh is not None and mesh.layout.sequence_parallel:  # x has a part of the positions
            length = mesh.sequence
        taken = self._taken(chosen, length)
        found = self._routed(rows, weights.flatten(), chosen.flatten(), taken)
        if self.shared is not None:
            found = found + self.shared(rows, [len(rows)])
        y = self._with_balance(found.view_as(own), scores, chosen, length)
        return gather_copies(y, group, dim=SEQUENCE, length=x.shape[SEQUENCE])

    def _whole(self, length: int) -> int:
        """Returns the positions of a whole sequence, of which `tp` together has `length`."""
        return length if self._mesh is None else length * self._mesh.layout.cp

    def _taken(self, chosen: torch.Tensor, length: int) -> torch.Tensor | None:
        """Returns a mask: True for each choice that the expert takes; None if all are taken.

        `length`: the positions that the ranks of `tp` have together.
        """
        if self.capacity_factor is None:
            return None
        whole = self._whole(length)
        capacity = math.ceil(self.capacity_factor * whole * self.top_k / self.experts)
        taken = within_capacity(
            chosen, experts=self.experts, capacity=capacity, mesh=self._mesh, length=length
        )
        self.dropped += int((~taken).sum())
        return taken.flatten()

    def _routed(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        taken: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the weighted sum of the experts' results for each row."""
        order = chosen.argsort(stable=True)
        if taken is not None:
            order, chosen = order[taken[order]], chosen[taken]
        sources = order // self.top_k
        counts = torch.bincount(chosen, minlength=self.experts)
        exchange = ExpertExchange(counts, self._mesh.group("ep") if self._mesh else None)
        self.rows_moved += exchange.rows_moved
        arrived = exchange.dispatch(rows[sources])
        computed = exchange.combine(self.routed(arrived, exchange.counts))
        weighted = computed * weights[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, sources, weighted.to(rows.dtype))

    def _with_balance(
        self, y: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, length: int
    ) -> torch.Tensor:
        mesh = self._mesh
        groups = [mesh.group(axis) for axis in ("tp", "cp")] if mesh else []
        loss = balance_loss(scores, chosen, groups=groups, length=self._whole(length))
        scale = 1 / len(y) if self.auxiliary_scale is None else self.auxiliary_scale
        loss = loss * (self.balance * scale)
        self.auxiliary_loss = self.auxiliary_loss + loss.detach()
        return add_gradient(y, loss)

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp`, `cp` and `ep` in a step: those of rows
        come from the routing of the last step. See `Exchanging`."""
        mesh = self._mesh
        if mesh is None:
            return {}
        sent = dict.fromkeys(("tp", "cp", "ep"), 0.0)
        for each in parts:
            for axis in ("tp", "cp"):  # loads for the balance loss
                if mesh.group(axis) is not None:
                    loads = mesh.sum_elements(each.samples * self.experts, axis)
                    sent[axis] += (
                        loads + self._capacity_elements(mesh, each, axis)
                    ) * each.wide_bytes
            if mesh.group("tp") is not None and not mesh.layout.sequence_parallel:
                results = 2 * self._others_tokens(mesh, each) * self.hidden  # and their gradients
                sent["tp"] += results * each.item_bytes
        if (group := mesh.group("ep")) is not None:
            overhead = expert_overhead_bytes(group, experts=self.experts, moves=4)
            sent["ep"] = len(parts) * overhead
            sent["ep"] += 2 * self.rows_moved * self.hidden * parts[0].item_bytes
        return sent

    def _capacity_elements(self, mesh: TrainingMesh, part: MicrobatchPart, axis: str) -> float:
        """Returns the elements sent to gather the chosen experts of a microbatch."""
        if self.capacity_factor is None:
            return 0.0
        if axis == "tp":
            return self._others_tokens(mesh, part) * self.top_k
        return (mesh.layout.cp - 1) * part.tokens * self.top_k

    @staticmethod
    def _others_tokens(mesh: TrainingMesh, part: MicrobatchPart) -> int:
        """Returns the tokens that a rank sends to gather equal parts over `tp`."""
        return (mesh.layout.tp - 1) * -(-mesh.sequence // mesh.layout.tp) * part.samples


class Router(nn.Linear):
    """A linear layer that computes in float32 at least, also with inputs and weights of 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return functional.linear(x.to(wide), self.weight.to(wide))


class Experts(nn.Module):
    """Several feed-forward networks of equal shape, without biases."""

    def __init__(self, shape: Transformer, *, count: int, ffn: int) -> None:
        super().__init__()
        wide, narrow = (count, ffn, shape.hidden), (count, shape.hidden, ffn)
        self.up = nn.Parameter(torch.empty(wide))
        self.gate = nn.Parameter(torch.empty(wide)) if shape.gated else None
        self.down = nn.Parameter(torch.empty(narrow))

    def keep_own(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's experts."""
        for name in ("up", "gate", "down"):
            cut(self, name, mesh, dim=0, axis="ep")

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Applies expert 0 to the first `counts[0]` rows, expert 1 to the next `counts[1]`, and so
        on. An expert without rows gets a gradient of zeros, so that every rank sums gradients
        of the same parameters."""
        found = [
            self._network(number, part) for number, part in enumerate(torch.split(rows, counts))
        ]
        return torch.cat(found)

    def _network(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        gate = None if self.gate is None else functional.linear(rows, self.gate[number])
        inner = activate(functional.linear(rows, self.up[number]), gate)
        return functional.linear(inner, self.down[number])
