"""The bubble of a pipeline schedule, in closed form."""

from __future__ import annotations

from unisono.planner.inputs.layout import Layout


def bubble_share(layout: Layout, recompute: str, microbatches: int | None = None) -> float:
    """Returns the bubble over the time of a microbatch on all stages but the slowest.

    1F1B and GPipe: all of it; interleaved: 1 / vpp. ZB1P: F + I - W of F + I + W, where the input
    gradient I (with recomputation) and the weight gradient W take as long as forward F each. ZB-V:
    half of F, as all stages wait for a common end (arXiv 2401.10241); up to twice as much if the
    `microbatches` do not fill it, as torch's order of its tasks shows. DualPipeV: F&B + B - 3 W of
    a chunk (github deepseek-ai/DualPipe), with F&B = F + B.

    >>> bubble_share(Layout(pp=4, vpp=2), "none"), bubble_share(Layout(pp=4), "none")
    (0.5, 1.0)
    """
    again = 1.0 if recompute == "full" else 0.0
    if layout.schedule == "zb1p":
        return (1 + again) / (3 + again)
    if layout.schedule == "dualpipev":
        return (2 + 2 * again) / (2 * (3 + again))
    if layout.schedule == "zbv":
        few = 0.0
        if microbatches is not None and layout.pp > 1:
            few = 2 - 2 * (microbatches - layout.pp) / (layout.pp - 1)
        return max(1.0, few) * 0.5 / (3 + again)
    return 1 / layout.chunks
