"""Models that know nothing of a layout, whose attention is torch's, and their training in one
process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from parallel.worlds.layout_training import compare_weights
from parallel.worlds.own_loss_models import ModelOutput
from unisono.parallel import Layout, model_loss, parallelize
from unisono.parallel.run import ParallelRun

WINDOW, VOCAB, WIDTH, HEADS, KV_HEADS, HEAD = 5, 13, 12, 4, 2, 4
POSITIONS, SAMPLES, STEPS, CLIP = 16, 6, 2, 0.5
TOLERANCE = 1e-10
STYLES = {
    "tokens": "embedding_rowwise",
    "attention.query": "colwise",
    "attention.pair": "packed_colwise",
    "attention.out": "rowwise",
    "wide": "colwise",
    "narrow": "rowwise",
    "head": "colwise_gather_output",
}


class Attention(nn.Module):
    """Attention with grouped keys and rotary positions, a window, or another mask."""

    def __init__(
        self, *, scale: float | None = None, repeats: bool = False, is_eager: bool = False
    ) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD)
        self.pair = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.scale, self.repeats, self.is_eager = scale, repeats or is_eager, is_eager

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        samples, length, _ = x.size()
        query = self.query(x).view(samples, length, -1, HEAD).transpose(1, 2)
        pair = self.pair(x)
        key, value = (
            each.view(*x.shape[:-1], -1, HEAD).transpose(1, 2)
            for each in pair.split(pair.shape[-1] // 2, dim=-1)
        )
        if rotation is not None:
            query, key = rotated(query, *rotation), rotated(key, *rotation)
        if self.repeats:
            groups = HEADS // KV_HEADS
            key, value = (
                each[:, :, None]
                .expand(samples, each.shape[1], groups, length, HEAD)
                .reshape(samples, -1, length, HEAD)
                for each in (key, value)
            )
        if self.is_eager:
            scores = query @ key.transpose(-1, -2) / HEAD**0.5
            causal = torch.ones(length, length, dtype=torch.bool).tril() | (not is_causal)
            scores = scores.masked_fill(~causal, -torch.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            mixed = torch.matmul(scores.softmax(-1), value).transpose(1, 2)
            return self.out(mixed.reshape(samples, length, -1))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=self.scale,
            enable_gqa=not self.repeats,
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).reshape(samples, length, -1))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    turned = x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return turned.to(x.dtype)


class Experts(nn.Module):
    """Experts with stacked weights, which choose rows by values."""

    is_per_position = True

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.activation = nn.SiLU()

    def forward(self, rows: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> Any:
        out = torch.zeros_like(rows)
        for number in index.unique().tolist():
            chosen, place = torch.where(index == number)
            found = self.activation(rows[chosen] @ self.weights[number])
            out.index_add_(0, chosen, found * scores[chosen, place, None])
        return out


class Routed(nn.Module):
    """Two experts of each position, with a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        scores, index = self.router(rows).softmax(-1).topk(2, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True)
        return self.experts(rows, index, scores).reshape(x.shape)


class Block(nn.Module):
    def __init__(self, *, has_experts: bool = False, **options: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(**options)
        self.wide, self.narrow = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.routed = Routed() if has_experts else nn.Identity()

    def forward(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), *arguments)
        y = self.routed(self.norms[1](x))
        return x + self.narrow(functional.gelu(self.wide(y)))


class Decoder(nn.Module):
    """A language model with its own loss.

    `kind`: "rotary", "learned", "window", or "packed" (sequences that begin at position 0) for
    causal attention, and "full" for attention in both directions, without shifted labels.
    """

    def __init__(
        self, kind: str, *, checkpoints: bool | None = None, layers: int = 2, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kind, self.checkpoints = kind, checkpoints
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        if kind == "learned":
            self.positions = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block(**options) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> ModelOutput:
        samples, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length).expand(samples, length)
        x, rotation = self.tokens(input_ids), None
        if self.kind == "learned":
            x = x + self.positions(torch.arange(0, length))
        else:
            speeds = 10.0 ** -torch.arange(HEAD // 2)
            angles = position_ids[..., None] * torch.cat([speeds, speeds])
            rotation = (angles.cos(), angles.sin())
        mask = self.mask(attention_mask, position_ids)
        is_causal = mask is None and self.kind != "full"
        for layer in self.layers:
            if self.checkpoints is None:
                x = layer(x, rotation, mask, is_causal)
            else:
                x = checkpoint(layer, x, rotation, mask, is_causal, use_reentrant=self.checkpoints)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            if self.kind != "full":
                labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            loss = functional.cross_entropy(
                logits.view(-1, VOCAB), labels.view(-1), ignore_index=-100
            )
        return ModelOutput(loss, logits)

    def mask(
        self, attention_mask: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor | None:
        query, key = position_ids[:, None, :, None], position_ids[:, None, None, :]
        found = None
        if self.kind == "window":
            found = (key <= query) & (query - key < WINDOW)
        elif self.kind == "packed":
            documents = (position_ids == 0).cumsum(-1)
            found = (key <= query) & (documents[:, None, :, None] == documents[:, None, None, :])
        elif attention_mask is not None:
            found = (key >= 0) if self.kind == "full" else (key <= query)
        if attention_mask is not None and found is not None:
            found = found & attention_mask[:, None, None, :].bool()
        return found


def token_batches(*, masked: bool = False, packed: bool = False) -> list[dict[str, torch.Tensor]]:
    """Returns batches whose samples have different numbers of labels."""
    generator = torch.Generator().manual_seed(8)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(0, VOCAB, (SAMPLES, POSITIONS), generator=generator)
        labels = ids.clone()
        labels[0, 5:], labels[3:, 1:4], labels[-1] = -100, -100, -100
        batch = {"input_ids": ids, "labels": labels}
        if masked:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1, 11:] = 0
            batch["labels"][1, 11:] = -100
        if packed:
            lengths = (POSITIONS // 2 - 1, POSITIONS // 2 + 1)
            positions = torch.cat([torch.arange(each) for each in lengths])
            batch["position_ids"] = positions.repeat(SAMPLES, 1)
        found.append(batch)
    return found


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def compare_sequences(
    text: str,
    make_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    alone: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    tolerance: float = TOLERANCE,
    weights_tolerance: float = 1e-9,
    passed: Callable[[ParallelRun, Any], tuple[Any, ...]] = lambda _, batch: (batch,),
    check: Callable[[ParallelRun, nn.Module], None] | None = None,
    **options: Any,
) -> float:
    """Trains with a layout and in one process; fails if losses, norms or weights differ.

    Returns the largest relative difference of losses and norms. `alone`: the loss of a batch in one
    process.
    """
    whole = make_model()
    before, optimizer = copy.deepcopy(whole), adamw(whole.parameters())
    loss_of = alone or (lambda model, batch: model(**batch).loss)
    run = parallelize(
        make_model(), Layout.parse(text), optimizer=adamw, clip=CLIP,
        **{"loss": model_loss} | options,
    )  # fmt: skip
    largest = 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(whole, batch)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), CLIP))
        optimizer.step()
        found = float(run.step(*passed(run, batch)))
        for a, b in ((found, float(loss)), (run.gradient_norm, norm)):
            largest = max(largest, abs(a / b - 1))
            assert abs(a / b - 1) < tolerance, (text, a, b)
    with torch.no_grad():
        expected = float(loss_of(whole.eval(), batches[0]))
    whole.train()
    found = float(run.evaluate(*passed(run, batches[0])))
    assert abs(found / expected - 1) < tolerance, (text, found, expected)
    assert run.report().steps == len(batches)
    compare_weights(run, whole, before, tolerance=weights_tolerance)
    if check is not None:
        check(run, whole)
    run.mesh.close()
    return largest
