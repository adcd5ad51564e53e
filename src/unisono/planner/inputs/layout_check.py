"""The rules that a layout must meet for a model, a cluster and a workload."""

from __future__ import annotations

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layer_division import stage_layers
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload


def check_layout(model: Transformer, cluster: Cluster, layout: Layout, job: Workload) -> None:
    """Raises ValueError if the layout cannot train the model. The text has the nearest valid value.

    >>> gpt = Transformer(layers=12, hidden=768, heads=12, vocab=50304)
    >>> check_layout(gpt, Cluster.parse("a100:8"), Layout(tp=8), Workload(seq=1024, global_batch=8))
    Traceback (most recent call last):
    ValueError: tp must divide the heads: 8 does not divide 12; 6 does
    """
    if layout.devices != cluster.devices:
        rest = layout.tp * layout.pp * layout.cp
        fitting = cluster.devices // rest
        near = f"; dp = {fitting} uses {fitting * rest}" if fitting else ""
        raise ValueError(
            f"dp x tp x pp x cp = {layout.dp} x {layout.tp} x {layout.pp} x {layout.cp} = "
            f"{layout.devices}, but the cluster has {cluster.devices} devices{near}"
        )
    if layout.dp_replicate > 1 and not layout.zero:
        raise ValueError(
            f"dp_replicate = {layout.dp_replicate} makes replicas of the shards of ZeRO, and "
            "zero = 0 has none; dp_replicate = 1, or zero = 1 to 3, works"
        )
    if layout.tensor != "1d":
        raise ValueError(
            f"tensor = {layout.tensor} is not predicted, because no published run uses it; "
            "tensor = 1d works"
        )
    require_heads(model.heads, model.kv_heads, layout.tp)
    stage_layers(model.layers, layout.pp, layout.chunks)
    if layout.ep > 1 and not model.experts:
        raise ValueError(f"ep = {layout.ep} needs a model with experts; ep = 1 works")
    if model.experts:
        _divides("ep", layout.ep, "the experts", model.experts)
        parts = layout.dp // layout.dp_replicate * layout.cp * layout.tp
        _divides("ep", layout.ep, "dp / dp_replicate x cp x tp", parts)
    parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    _divides("cp x tp", parts, "the sequence", job.seq)
    micro = job.micro_batch or 1
    per_replica = job.global_batch / layout.dp
    if per_replica < 1 or job.global_batch % (layout.dp * micro):
        whole = layout.dp * micro
        near_batch = max(round(job.global_batch / whole), 1) * whole
        raise ValueError(
            f"global_batch must be a multiple of dp x micro_batch: {job.global_batch} is not one "
            f"of {layout.dp} x {micro} = {whole}; {near_batch} is"
        )
    _check_schedule(layout, job.global_batch // (layout.dp * micro))


def divides_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Returns True if tensor parallelism on a line can divide attention among the ranks: whole
    heads for each, and whole key-value heads, or several ranks that hold the same one.

    >>> [divides_heads(48, 8, ranks) for ranks in (4, 6, 12, 16)]
    [True, False, False, True]
    """
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def require_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raises ValueError if `divides_heads` is False, with the nearest number of ranks.

    >>> require_heads(48, 8, 12)
    Traceback (most recent call last):
    ValueError: tp must divide the key-value heads or be a multiple: 12 does not fit 8; 8 does
    """
    if divides_heads(heads, kv_heads, ranks):
        return
    _divides("tp", ranks, "the heads", heads)
    near = max(d for d in range(1, ranks) if divides_heads(heads, kv_heads, d))
    raise ValueError(
        f"tp must divide the key-value heads or be a multiple: {ranks} does not fit {kv_heads}; "
        f"{near} does"
    )


def _check_schedule(layout: Layout, microbatches: int) -> None:
    name, rules, pp = layout.schedule, layout.rules, layout.pp
    if rules.chunks is not None and layout.vpp not in (rules.chunks, None):
        raise ValueError(f"the schedule {name} has vpp = {rules.chunks}, not {layout.vpp}")
    if microbatches < rules.least_rounds * pp:
        raise ValueError(
            f"the schedule {name} needs {rules.least_rounds} x pp = {rules.least_rounds * pp} "
            f"microbatches, not {microbatches}; a micro batch of 1 has most"
        )
    if layout.vpp is not None and layout.vpp < rules.least_chunks and pp > 1:
        raise ValueError(f"the schedule {name} needs vpp over 1; 1f1b has vpp = 1")
    if layout.chunks > 1 and pp == 1:
        raise ValueError(f"vpp = {layout.vpp} needs pp over 1; vpp = 1 works")


def _divides(name: str, value: int, what: str, whole: int) -> None:
    if whole % value:
        near = max(d for d in range(1, min(value, whole) + 1) if whole % d == 0)
        raise ValueError(f"{name} must divide {what}: {value} does not divide {whole}; {near} does")
