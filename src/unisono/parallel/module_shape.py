"""The shape of a torch module that is a transformer, for the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unisono.parallel.module_experts import ExpertBlock, find_experts, skipped
from unisono.planner import Transformer, forward_flops

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_KV_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "kv_heads")
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_HEAD_DIM = ("head_dim", "head_size")
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LEAST_MATRICES = 4
"""Least number of matrices in a layer: one for queries, keys and values, one for the attention
output, and two of the feed-forward network."""
_TOLERANCE = 0.02
"""Largest relative difference in parameters or FLOPs between the shape and the module."""


class _Layers(NamedTuple):
    """The layers of a module, and the parameters outside these layers."""

    layers: Sequence[nn.Module]
    outside: list[nn.Parameter]


def model_shape(
    module: nn.Module,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    top_k: int | None = None,
    seq: int = 128,
) -> Transformer:
    """Returns the shape of a decoder, for `unisono.planner`.

    Runs forward on `seq` tokens on the meta device: no memory is used and no value computed.
    `module(tokens)` takes integers of shape (1, seq) and returns logits of shape (1, seq, vocab),
    or a tuple or mapping whose first tensor is the logits. The sizes come from the equal layers,
    the shapes of their matrices, and attributes such as `num_heads` or `n_head`; arguments override
    them. The function compares the shape's parameters and FLOPs with the module's parameters and
    with the FLOPs that torch counts. Raises ValueError if they differ by more than 2 %, and if a
    size cannot be found: latent attention is not recognised.

    Layers may have experts: equal modules in a `ModuleList`, or parameters of three dimensions, in
    a module that also has a router. The first layers may be dense. An attribute such as `top_k`
    gives the number of experts of a token. The run on the meta device skips the experts, because
    routing needs values. So only the FLOPs of the other operators are compared.

    >>> from unisono.parallel import model_shape
    >>> class Bigram(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = nn.Embedding(50, 16)
    ...         self.layers = nn.ModuleList(
    ...             nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=48, batch_first=True)
    ...             for _ in range(3)
    ...         )
    ...         self.head = nn.Linear(16, 50, bias=False)
    ...     def forward(self, tokens):
    ...         x = self.embedding(tokens)
    ...         for layer in self.layers:
    ...             x = layer(x)
    ...         return self.head(x)
    >>> shape = model_shape(Bigram())
    >>> shape.layers, shape.hidden, shape.heads, shape.ffn, shape.vocab, shape.tied
    (3, 16, 2, 48, 50, False)
    """
    found = _equal_layers(module)
    dense, blocks = _expert_blocks(found.layers)
    vocab, flops = _run_on_meta(module, seq, blocks)
    hidden = _hidden(found, vocab)
    heads = heads or _named(module, found.layers[0], _HEADS)
    if heads is None:
        raise ValueError(f"no module names its heads ({', '.join(_HEADS)}); pass heads=")
    head_dim = head_dim or _named(module, found.layers[0], _HEAD_DIM) or hidden // heads
    kv_heads = kv_heads or _named(module, found.layers[0], _KV_HEADS)
    tables = [each for each in found.outside if vocab in each.shape and each.dim() == 2]
    places = [p.shape[0] for p in found.outside if p.dim() == 2 and vocab not in p.shape]
    shape = Transformer(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        **_sizes(found.layers, blocks, kv_heads, hidden=hidden, heads=heads, head_dim=head_dim),
        dense_layers=dense if blocks else 0,
        top_k=(top_k or _top_k(module, blocks)) if blocks else 0,
        layers=len(found.layers),
        vocab=vocab,
        tied=len(tables) < 2,
        positions=sum(places),
    )
    _compare("parameters", sum(p.numel() for p in module.parameters()), shape.parameters)
    computed = sum(forward_flops(shape, seq=seq, batch=1)) - _expert_flops(shape, seq)
    _compare("FLOPs of forward", flops, computed)
    return shape


def _expert_blocks(layers: Sequence[nn.Module]) -> tuple[int, list[ExpertBlock]]:
    """Returns the number of first layers without experts, and the blocks of all other layers."""
    found = [find_experts(layer) for layer in layers]
    blocks = [each for each in found if each is not None]
    dense = len(found) - len(blocks)
    if blocks and any(found[:dense]):
        places = [number for number, each in enumerate(found) if each is not None]
        raise ValueError(
            f"layers {places} have experts; expected dense layers first, then layers with experts"
        )
    if any(each[1:] != blocks[0][1:] for each in blocks):
        sizes = sorted({each[1:] for each in blocks})
        raise ValueError(f"the layers have experts of different sizes: {sizes}")
    return dense, blocks


def _top_k(module: nn.Module, blocks: Sequence[ExpertBlock]) -> int:
    found = _named(module, blocks[0].module, _TOP_K)
    if found is None:
        raise ValueError(
            f"no module names its experts of a token ({', '.join(_TOP_K)}); pass top_k="
        )
    return found


def _expert_flops(shape: Transformer, seq: int) -> float:
    """Returns the FLOPs of routers and experts, which a run that skips experts does not have."""
    active = (shape.top_k + shape.shared_experts) * shape.expert_weights
    return 2 * seq * shape.moe_layers * (active + shape.hidden * shape.experts)


def _compare(name: str, counted: float, computed: float) -> None:
    if abs(computed / counted - 1) > _TOLERANCE:
        raise ValueError(
            f"the module has {counted:.5g} {name}, but the shape that was found has "
            f"{computed:.5g}; state the shape as planner.Transformer(...)"
        )


def _equal_layers(module: nn.Module) -> _Layers:
    """Returns one module's largest group of children of equal type and parameter shapes.

    The group's siblings of the same type are layers too.
    """
    best: list[nn.Module] = []
    most = (0, 0)
    for parent in module.modules():
        groups: dict[object, list[nn.Module]] = {}
        for child in parent.children():
            key = (type(child), tuple(p.shape for p in child.parameters()))
            groups.setdefault(key, []).append(child)
        for group in groups.values():
            matrices = sum(p.dim() in (2, 3) for p in group[0].parameters())
            size = (min(len(group), 2), sum(p.numel() for p in group[0].parameters()) * len(group))
            if matrices >= _LEAST_MATRICES and size > most and isinstance(parent, _CONTAINERS):
                kind = type(group[0])
                best = [child for child in parent.children() if type(child) is kind]
                most = size
    inside = {id(p) for layer in best for p in layer.parameters()}
    outside = [p for p in module.parameters() if id(p) not in inside]
    if not best or not outside:
        raise ValueError(
            f"expected a transformer with equal layers and an embedding, found "
            f"{type(module).__name__}"
        )
    return _Layers(best, outside)


def _run_on_meta(module: nn.Module, seq: int, blocks: Sequence[ExpertBlock]) -> tuple[int, int]:
    """Returns the size of the vocabulary and the FLOPs of a forward pass without experts."""
    if not blocks:
        return _output_and_flops(module, seq)
    try:
        with skipped(blocks, in_pair=False):
            return _output_and_flops(module, seq)
    except ValueError:
        with skipped(blocks, in_pair=True):
            return _output_and_flops(module, seq)


def _output_and_flops(module: nn.Module, seq: int) -> tuple[int, int]:
    tensors = {
        name: torch.empty_like(value, device="meta")
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    counter = FlopCounterMode(display=False)
    try:
        with torch.device("meta"), torch.no_grad(), counter:
            tokens = torch.zeros(1, seq, dtype=torch.int64)
            output = torch.func.functional_call(module, tensors, (tokens,))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"{type(module).__name__} does not run on {seq} tokens on the meta device: {error}"
        ) from error
    logits = next(_tensors(output), None)
    if logits is None or logits.dim() != 3:
        raise ValueError(
            f"expected logits of shape (1, {seq}, vocab), found "
            f"{type(output).__name__ if logits is None else tuple(logits.shape)}"
        )
    return logits.shape[-1], counter.get_total_flops()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)
    elif hasattr(output, "values"):
        yield from _tensors(list(output.values()))


def _hidden(found: _Layers, vocab: int) -> int:
    for parameter in found.outside:
        if parameter.dim() == 2 and vocab in parameter.shape:
            rows, columns = parameter.shape
            return columns if rows == vocab else rows
    raise ValueError(f"no parameter outside the layers has {vocab} rows, as an embedding has")


def _named(module: nn.Module, layer: nn.Module, names: Sequence[str]) -> int | None:
    """Returns the first positive integer among attributes called `names`.

    Searches the modules of a layer, then the `config` of the module.
    """
    for each in (*layer.modules(), getattr(module, "config", None)):
        for name in names:
            value = getattr(each, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _sizes(
    layers: Sequence[nn.Module],
    blocks: Sequence[ExpertBlock],
    kv_heads: int | None,
    *,
    hidden: int,
    heads: int,
    head_dim: int,
) -> dict[str, Any]:
    """Returns the sizes of the feed-forward networks and experts, and `kv_heads` and `gated`."""
    sizes = {"hidden": hidden, "heads": heads, "head_dim": head_dim}
    dense: dict[str, Any] = {}
    if len(blocks) < len(layers):
        dense = _network(layers[0], kv_heads, **sizes)
    if not blocks:
        return dense
    one = blocks[0]
    inside = {id(parameter) for parameter in one.module.parameters()}
    layer = layers[len(layers) - len(blocks)]
    whole = sum(p.numel() for p in layer.parameters() if p.dim() == 2 and id(p) not in inside)
    kinds = [kv_heads] if kv_heads else [n for n in range(heads, 0, -1) if heads % n == 0]
    kv = next((n for n in kinds if 2 * hidden * head_dim * (heads + n) == whole), None)
    if kv is None:
        raise ValueError(
            f"the matrices of a layer outside its experts, with {whole} elements, are not "
            f"attention of {heads} heads of {head_dim}"
        )
    return dense | {
        "kv_heads": kv,
        "gated": one.matrices == 3,
        "experts": one.experts,
        "expert_ffn": one.ffn,
        "shared_experts": one.shared,
    }


def _network(
    layer: nn.Module, kv_heads: int | None, *, hidden: int, heads: int, head_dim: int
) -> dict[str, Any]:
    """Returns the `kv_heads`, `ffn` and `gated` of a shape with as many parameters as the layer."""
    matrices = [p for p in layer.parameters() if p.dim() == 2]
    whole = sum(p.numel() for p in matrices)
    widths = sorted({size for p in matrices for size in p.shape}, reverse=True)
    biases = any(p.dim() == 1 and "bias" in name for name, p in layer.named_parameters())
    kinds = [kv_heads] if kv_heads else [n for n in range(heads, 0, -1) if heads % n == 0]
    for kv, gated in product(kinds, (not biases, biases)):
        attention = 2 * hidden * head_dim * (heads + kv)
        ffn, rest = divmod(whole - attention, hidden * (3 if gated else 2))
        if rest == 0 and ffn in widths:
            return {"kv_heads": kv, "ffn": ffn, "gated": gated}
    raise ValueError(
        f"the matrices of a layer, {[tuple(p.shape) for p in matrices]}, are not attention of "
        f"{heads} heads of {head_dim} and a feed-forward network"
    )
