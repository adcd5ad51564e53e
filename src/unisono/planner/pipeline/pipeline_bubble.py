"""The bubble of a pipeline schedule, in closed form."""

from __future__ import annotations

from unisono.planner.inputs.layout import Layout


def bubble_share(layout: Layout, recompute: str, microbatches: int | None = None) -> float:
    """Returns the bubble, divided by the sum of a microbatch's times on all stages except the
    slowest.

    The ratio is 1 for 1F1B and GPipe, and 1 / vpp for the interleaved schedule. In the other
    schedules, forward F, the input gradient I and the weight gradient W take equal times, and I
    also includes recomputation. The bubble of ZB1P is F + I - W, out of F + I + W. The bubble of
    ZB-V is half of F, because all stages wait for a common end (arXiv 2401.10241). It is up to
    twice as long if the `microbatches` do not fill the pipeline, as in torch's order of the tasks.
    The bubble of DualPipeV is F&B + B - 3 W of a chunk (github deepseek-ai/DualPipe), with F&B = F
    + B.

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
