"""Reasons for which a case will probably be refused, so that the generator can draw fewer of them.

These are guesses, and no test depends on them: a case with a reason may hold, and a case without a
reason may be refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from random_models.case import Case
from random_models.habits import HABITS

_CUT_CONTAINERS = ("sequential", "nested", "decoder")
_DIVISIBLE = ("linear_pair", "mlp", "attention", "feed_forward", "experts")
_EXPERTS = 4
_WRITING = (
    "batch_norm", "tracking_instance_norm", "running_mean", "running_maximum", "observer",
    "counter", "max_norm", "scale_by_frequency",
)  # fmt: skip
_RANDOM = ("dropout", "dropout_in_place", "rrelu", "dropping_attention")
_PER_POSITION = (
    "linear", "linear_pair", "no_bias", "tanh", "prelu", "layer_norm", "plain_norm", "rms_norm",
    "mlp", "feature_norm", "layout_dropout", "no_dropout", "identity",
)  # fmt: skip
_ELEMENTWISE = ("tanh", "layout_dropout", "no_dropout", "identity")
_WHOLE_LOSSES = (
    "shifted", "mask_mean", "samples_mean", "counting", "counting_pairs", "vector", "root",
    "plain_number", "written_mean", "written_sum", "sum_over_samples", "module_none",
    "squares_and_penalty",
)  # fmt: skip
_BALANCED_LOSSES = (
    "cross_entropy", "sized_cross_entropy", "decoder_cross_entropy", "squares", "squares_module",
    "absolute", "huber", "bits", "module", "function", "module_pad", "module_smooth",
)  # fmt: skip
_ELEMENTWISE_ONLY = ("adafactor", "own")


def refusal_reasons(case: Case) -> Iterator[str]:
    """Yields the reasons, of the layout and of the layout after a checkpoint."""
    if HABITS[case.habit].is_refused or case.habit in ("train_loss", "collect_first"):
        yield "habit"
    if "lazy" in case.blocks:
        yield "lazy"
    for layout in filter(None, (case.layout, case.resumed)):
        yield from _reasons(case, _Sizes(layout))


class _Sizes:
    """The options of a layout."""

    def __init__(self, layout: str) -> None:
        self.found = dict(part.partition("=")[::2] for part in layout.split(","))

    def __getattr__(self, name: str) -> int:
        return int(self.found.get(name, name in ("dp", "tp", "pp", "cp", "ep", "vpp")))


def _reasons(case: Case, layout: _Sizes) -> Iterator[str]:
    parts = layout.dp * layout.cp * layout.pp * case.microbatches
    if parts > 1:
        yield from _of_parts(case)
    if layout.tp > 1:
        yield from _of_tensor(case, layout)
    if layout.cp > 1:
        yield from _of_context(case, layout)
    if layout.pp > 1:
        yield from _of_pipeline(case, layout)
    if layout.ep > 1:
        if not _has_experts(case):
            yield "no experts"
        if layout.dp * layout.cp * layout.tp % layout.ep:
            yield "size of ep"
    is_divided = layout.zero or layout.tp > 1 or layout.pp > 1
    if case.optimizer in _ELEMENTWISE_ONLY and is_divided:
        yield "optimizer"


def _has_experts(case: Case) -> bool:
    is_decoder = case.container == "decoder" and case.inputs == "padded_tokens"
    return is_decoder or "experts" in case.blocks


def _of_parts(case: Case) -> Iterator[str]:
    if case.habit != "eval" and {*case.blocks} & {*_WRITING}:
        yield "written"
    if case.loss in _WHOLE_LOSSES:
        yield "whole loss"
    if _has_experts(case) and case.loss not in _BALANCED_LOSSES:
        yield "balance loss"


def _of_tensor(case: Case, layout: _Sizes) -> Iterator[str]:
    is_decoder = case.container == "decoder"
    if not is_decoder and not {*case.blocks} & {*_DIVISIBLE}:
        yield "nothing to divide"
    if {*case.blocks} & {*_RANDOM}:
        yield "masks"
    heads = 2 if is_decoder or case.width % 2 == 0 else 1
    is_grid = layout.found.get("tensor") == "2d"
    if (is_decoder or "attention" in case.blocks) and heads % (2 if is_grid else layout.tp):
        yield "heads"
    if case.loss == "cross_entropy" and is_decoder:
        yield "number of classes"
    if layout.sequence_parallel and not (is_decoder and {*case.blocks} <= {*_PER_POSITION}):
        yield "sequence"
    if is_grid:
        is_right = is_decoder and case.loss == "decoder_cross_entropy" and not _has_experts(case)
        if not is_right or not {*case.blocks} <= {*_ELEMENTWISE}:
            yield "grid"


def _of_context(case: Case, layout: _Sizes) -> Iterator[str]:
    if case.container not in _CUT_CONTAINERS or case.inputs not in ("tokens", "padded_tokens",
                                                                    "features"):  # fmt: skip
        yield "positions"
    if not {*case.blocks} <= {*_PER_POSITION}:
        yield "whole positions"
    if case.head == "pooled" and case.container != "decoder":
        yield "pooled"
    if case.container != "decoder":
        yield "nothing to divide"
    if any(length % (2 * layout.cp) for _, length in case.batches):
        yield "length"


def _of_pipeline(case: Case, layout: _Sizes) -> Iterator[str]:
    if case.container not in _CUT_CONTAINERS and not case.example:
        yield "container"
    if "result" in case.container:
        yield "several results"
    if case.example and (layout.zero >= 2 or len({*case.batches}) > 1 or layout.tp > 1):
        yield "traced"
    modules = len(case.blocks) + (4 if case.container == "decoder" else 2)
    if case.container == "nested" or layout.pp * layout.vpp > modules:
        yield "few modules"
    if any(samples % (case.microbatches * layout.dp) for samples, _ in case.batches):
        yield "samples"
    if case.microbatches < layout.pp:
        yield "microbatches"
