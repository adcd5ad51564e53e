"""The parameters that one device holds, before ZeRO: what tensor and expert parallelism divide."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer


class DeviceParameters(NamedTuple):
    """Numbers of parameters of one device: those of its routed experts, and all others."""

    dense: float
    routed: float


def layer_parameters(model: Transformer, layout: Layout, *, experts: bool) -> DeviceParameters:
    """Returns the parameters of one layer on one device. `experts`: True for a layer with experts.

    Tensor parallelism divides matrices. It replicates norms, biases, the router, the first
    matrices of latent attention, and key-value heads if there are fewer of them than ranks.

    >>> model = Transformer(layers=1, hidden=64, heads=8, kv_heads=2, gated=True, vocab=9)
    >>> one = layer_parameters(model, Layout(tp=8), experts=False)
    >>> 8 * one.dense - model.dense_layer_parameters
    7040.0
    >>> 7 * 2 * 64 + 6 * 2 * 8 * 64  # norms on 7 more ranks, and keys and values on 6
    7040
    """
    whole = model.shared_layer_parameters if experts else model.dense_layer_parameters
    split = layout.tp if layout.ep == 1 else layout.ep
    routed = model.experts * model.expert_parameters / split if experts else 0.0
    once = model.vector_parameters + (model.hidden * model.experts if experts else 0)
    copies = 1.0
    if model.kv_rank:
        once += model.hidden * (model.query_rank + model.kv_rank + model.rope_dim)
    else:
        copies = max(layout.tp / model.kv_heads, 1.0)
    keys = 0 if model.kv_rank else model.hidden * model.key_value_width
    divided = whole - once + (copies - 1) * keys
    return DeviceParameters(once + divided / layout.tp, routed)


def stage_parameters(
    model: Transformer, layout: Layout, layers: int, dense: int, *, first: bool, last: bool
) -> DeviceParameters:
    """Returns the parameters of a stage of `layers` layers, of which `dense` have no experts.

    The first stage holds the embedding. The last stage holds the output projection, which is a
    copy of the embedding if both are tied and on different stages, and the MTP layers.
    """
    plain = layer_parameters(model, layout, experts=False)
    mixed = layer_parameters(model, layout, experts=True) if model.experts else plain
    more = model.mtp_layers if last else 0
    moe = layers - dense + more
    outer = (model.embedding_parameters if first else 0) + more * model.mtp_parameters
    if last and (not first or not model.tied):
        outer += model.vocab * model.hidden
    found = dense * plain.dense + moe * mixed.dense + outer / layout.tp
    return DeviceParameters(found, moe * mixed.routed)
