"""Exact FLOPs of the matrix products of a training step."""

from __future__ import annotations

from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import RECOMPUTE
from unisono.planner.positive_values import require_positive


def forward_flops(model: Transformer, *, seq: int, batch: int) -> tuple[float, float, float]:
    """Returns the FLOPs of the forward pass: all layers' weights, attention, and the output.

    Attention counts all pairs of positions, as the published formulas do, although causal kernels
    skip half of them. With windows, it counts the same share of the pairs that causal kernels
    compute. MTP layers are included.

    >>> gpt = Transformer(layers=2, hidden=8, heads=2, vocab=10)
    >>> forward_flops(gpt, seq=4, batch=1)
    (12288.0, 1024.0, 640.0)
    """
    tokens = float(seq * batch)
    layers, moe = model.layers + model.mtp_layers, model.moe_layers
    moe += model.mtp_layers if model.experts else 0
    active = model.top_k + model.shared_experts
    expert = active * model.expert_weights + model.hidden * model.experts
    weights = layers * model.attention_weights + (layers - moe) * model.ffn_weights
    weights += moe * expert + model.mtp_layers * 2 * model.hidden**2
    width = model.query_width + model.heads * model.head_dim
    return (
        2 * tokens * weights,
        2 * tokens * seq * width * layers * model.attended_share(seq),
        2 * tokens * model.hidden * model.vocab * (1 + model.mtp_layers),
    )


def step_flops(
    model: Transformer, *, seq: int, batch: int, recompute: str = "none", frozen: bool = False
) -> float:
    """Returns the FLOPs of forward and backward of one step, with recomputation. With `frozen`
    weights, backward computes only the gradients of inputs; adapters are not counted.

    For a GPT with batch B, sequence length s, L layers, width h and vocabulary V, this is
    72 B s L h^2 (1 + s / 6h + V / 12 L h) without recomputation and
    96 B s L h^2 (1 + s / 6h + V / 16 L h) with full recomputation (arXiv 2104.04473, section 5.1).
    Raises ValueError for another recomputation than none, selective and full.

    >>> gpt = Transformer(layers=96, hidden=12288, heads=96, vocab=51200)
    >>> b, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    >>> formula = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    >>> abs(step_flops(gpt, seq=s, batch=b, recompute="full") / formula - 1) < 1e-12
    True
    """
    _check_recompute(recompute)
    weights, attention, output = forward_flops(model, seq=seq, batch=batch)
    again = {"none": 0.0, "selective": attention, "full": weights + attention}[recompute]
    return (2 if frozen else 3) * (weights + output) + 3 * attention + again


def training_days(
    *, tokens: float, parameters: float, devices: int, rate: float, recompute: str = "full"
) -> float:
    """Returns the days of a training run: 8 T P / (n X), or 6 T P / (n X) without recomputation.

    T is `tokens`, P `parameters`, n `devices` and X `rate`. The formula ignores attention and the
    output, so it is 1.4 to 3 % low (arXiv 2104.04473). Raises ValueError for values that are not
    positive, and for another recomputation than none, selective and full.

    >>> round(training_days(tokens=300e9, parameters=175e9, devices=1024, rate=140e12))
    34
    """
    _check_recompute(recompute)
    require_positive({"tokens": tokens, "parameters": parameters, "devices": devices, "rate": rate})
    passes = 8 if recompute == "full" else 6
    return passes * tokens * parameters / (devices * rate) / 86400


def _check_recompute(recompute: str) -> None:
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}")
