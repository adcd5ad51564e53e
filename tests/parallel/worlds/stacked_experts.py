"""Modules with stacked experts, in the manner of those of transformers, and models of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from parallel.worlds.planned_models import VOCAB, WIDTH, GroupedAttention

EXPERTS, INNER, CHOICES = 4, 10, 2


class StackedExperts(nn.Module):
    """Gated experts that a loop calls, as in Mixtral."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_tok = experts, CHOICES
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH) / 5)
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, INNER) / 3)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        found = torch.zeros_like(hidden_states)
        mask = functional.one_hot(top_k_index, self.num_experts).permute(2, 1, 0)
        for expert in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            choice, token = torch.where(mask[expert])
            result = self.result(hidden_states[token], expert)
            weighted = result * top_k_weights[token, choice, None]
            found.index_add_(0, token, weighted.to(found.dtype))
        return found

    def result(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = functional.linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down_proj[expert])


class BiasedExperts(nn.Module):
    """Transposed experts with biases, of which all compute all rows, as one product; also for
    (samples, positions, width). The weights come before the numbers of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 5)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, INNER) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)
        self.scale = nn.Parameter(torch.rand(EXPERTS) + 0.5)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, x: torch.Tensor, routing_weights: torch.Tensor, router_indices: torch.Tensor
    ) -> torch.Tensor:
        inner = torch.einsum("...h,ehi->...ei", x, self.up) + self.up_bias
        results = self.norm(torch.einsum("...ei,eih->...eh", inner.relu(), self.down))
        chosen = functional.one_hot(router_indices, self.experts).to(x.dtype)
        return torch.einsum(
            "...eh,...ke,...k,e->...h", results, chosen, routing_weights, self.scale
        )


class SortingExperts(StackedExperts):
    """Sorts all rows by expert and computes them in groups, as grouped products do."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        chosen, order = top_k_index.flatten().sort()
        rows = hidden_states[order // top_k_index.shape[1]]
        counts = chosen.bincount(minlength=self.gate_up_proj.shape[0]).tolist()
        assert len(counts) == self.num_experts
        parts = [self.result(part, expert) for expert, part in enumerate(rows.split(counts))]
        weighted = torch.cat(parts) * top_k_weights.flatten()[order, None]
        return weighted[order.argsort()].unflatten(0, top_k_index.shape).sum(1)


class CountedExperts(nn.Module):
    """Gets rows that are sorted by expert, and the number of each expert's rows, as in torchtitan.

    `is_list`: the numbers are a list.
    """

    def __init__(self, is_list: bool = False) -> None:
        super().__init__()
        self.is_list = is_list
        self.w1 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)

    def forward(self, x: torch.Tensor, num_tokens_per_expert: Any) -> torch.Tensor:
        parts = x.split(num_tokens_per_expert if self.is_list else num_tokens_per_expert.tolist())
        return torch.cat([
            (part @ first.T).relu() @ last.T
            for part, first, last in zip(parts, self.w1, self.w2, strict=True)
        ])  # fmt: skip


class ListedExperts(CountedExperts):
    def __init__(self) -> None:
        super().__init__(is_list=True)


class EqualExperts(nn.Module):
    """Gets as many rows for each expert, as in Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(self.up.shape[0], -1, WIDTH)
        return torch.bmm(torch.bmm(x, self.up).relu(), self.down).view(-1, WIDTH)


class NestedExperts(EqualExperts):
    """Gets (experts, rows, width)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.shape[0] == self.num_experts
        return torch.bmm(torch.bmm(hidden_states, self.up).relu(), self.down)


class Mixture(nn.Module):
    """A router, stacked experts and a shared expert."""

    def __init__(self, experts: nn.Module, count: int = EXPERTS) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts, self.shared = experts, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(CHOICES)
        if isinstance(self.experts, BiasedExperts):
            return self.shared(x) + self.experts(x, router_indices=chosen, routing_weights=weights)
        rows, chosen, weights = (each.flatten(0, 1) for each in (x, chosen, weights))
        if isinstance(self.experts, CountedExperts):
            found = self.of_sorted_rows(rows, chosen, weights)
        elif isinstance(self.experts, EqualExperts):
            found = self.of_all_rows(rows, scores.flatten(0, 1))
        else:
            found = self.experts(rows, chosen, weights)
        return self.shared(x) + found.view(x.shape)

    def of_sorted_rows(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        flat = chosen.flatten()
        order, counts = flat.argsort(stable=True), flat.bincount(minlength=EXPERTS)
        sources = order // CHOICES
        given = counts.tolist() if self.experts.is_list else counts
        results = self.experts(rows[sources], given) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, sources, results.to(rows.dtype))

    def of_all_rows(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        every = rows * scores.T.unsqueeze(-1)
        is_nested = isinstance(self.experts, NestedExperts)
        found = self.experts(every if is_nested else every.flatten(0, 1))
        return found.view(every.shape).sum(0)


class MixtureBlock(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn, self.mlp = GroupedAttention(4, 2, bias=True), Mixture(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MixtureDecoder(nn.Module):
    """A decoder with stacked experts, of one kind in each layer, that states its styles."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self._tp_plan = {
            **{f"layers.*.self_attn.{each}_proj": "colwise" for each in "qkv"},
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.experts": "moe_tp_experts",
        }
        self.embed_tokens, self.lm_head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        chosen = kinds or (StackedExperts, BiasedExperts, SortingExperts)
        self.layers = nn.ModuleList(MixtureBlock(kind()) for kind in chosen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)
