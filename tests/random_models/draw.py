"""Draws cases from seeds. A seed determines its case."""

from __future__ import annotations

import random
from collections.abc import Iterator

from random_models.batches import IGNORED_PARTS
from random_models.blocks import BLOCKS
from random_models.case import Case
from random_models.expected_refusals import refusal_reasons
from random_models.habits import HABITS
from random_models.losses import LOSSES
from random_models.models import CONTAINERS, HEADS, STEMS
from random_models.optimizers import OPTIMIZERS
from random_models.plain_blocks import PLAIN_BLOCKS
from random_models.written_blocks import WRITTEN_BLOCKS

_ORDINARY = ("linear", "linear_pair", "residual_mlp", "layer_norm", "tanh", "mlp", "attention")
_DECODER_LOSSES = ("cross_entropy", "decoder_cross_entropy", "flat", "flat_pad", "shifted")
_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb1p", "zbv", "dualpipev")
_DIVIDED_BY_MODULES = ("attention", "feed_forward", "experts", "layout_dropout")


_TRIES = 150
_REFUSED = 0.02
"""Part of the drawn cases with a reason to be refused that are kept."""


def draw_case(seed: int) -> Case:
    """Returns the case of a seed. Most cases that will probably be refused are drawn again."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 2, 2, 3, 4, 4, 1))
    case = _draw_case(draw, ranks)
    axes = _axes(case)
    for _ in range(_TRIES):  # with the axes of the first case, which are refused differently often
        if _axes(case) == axes and (not any(refusal_reasons(case)) or draw.random() < _REFUSED):
            break
        case = _draw_case(draw, ranks)
    return case


def _axes(case: Case) -> set[str]:
    """Returns the axes of a layout with several ranks."""
    return {part for part in case.layout.split(",") if part[:3] in ("dp=", "tp=", "pp=", "cp=")}


def _draw_case(draw: random.Random, ranks: int) -> Case:
    is_decoder = draw.random() < 0.2
    inputs = draw.choice(("tokens", "padded_tokens") if is_decoder else tuple(STEMS))
    blocks = _draw_blocks(draw, has_positions=inputs != "vectors" or is_decoder)
    layout = _draw_layout(draw, ranks, divisible=is_decoder or _is_divisible(blocks))
    microbatches = _draw_microbatches(draw, layout)
    head = draw.choice(("positions", "pooled") if is_decoder else ("positions", *HEADS))
    loss = _draw_loss(draw, head, is_decoder)
    if loss == "shifted" and (inputs == "vectors" or head == "pooled"):
        loss = "flat"
    container = draw.choice(("sequential", "sequential", *CONTAINERS))
    batches = _draw_batches(draw, microbatches)
    resumed = _draw_layout(draw, ranks, divisible=is_decoder) if draw.random() < 0.1 else None
    case = Case(
        seed=draw.randrange(1000),
        layout=layout,
        resumed=resumed,
        inputs=inputs,
        width=draw.choice((4, 5, 6, 7, 8)) if not is_decoder else draw.choice((4, 6, 8)),
        container="decoder" if is_decoder else container,
        blocks=blocks,
        head=head,
        loss=loss,
        ignored=draw.choice(("none", "none", *IGNORED_PARTS)),
        batches=batches,
        microbatches=microbatches,
        clip=draw.choice((None, 0.3, 5.0)),
        optimizer=draw.choice(("sgd", "momentum", "adamw", *OPTIMIZERS)),
        habit=_draw_habit(draw, ranks, resumed),
        autocast=draw.random() < 0.06,
        example="pp" in layout and draw.random() < 0.5,
    )
    return case


def _draw_habit(draw: random.Random, ranks: int, resumed: str | None) -> str:
    if draw.random() < 0.8:
        return "none"
    found = draw.choice(list(HABITS))
    depends = HABITS[found].needs_ranks and ranks == 1
    return "none" if depends or (found == "schedule" and resumed is not None) else found


def _is_divisible(blocks: tuple[str, ...]) -> bool:
    return any(name in _DIVIDED_BY_MODULES for name in blocks)


def _draw_blocks(draw: random.Random, *, has_positions: bool) -> tuple[str, ...]:
    """Half of the blocks are ordinary, so that unusual ones are often alone in their model."""
    known = [name for name, each in BLOCKS.items() if has_positions or not each.needs_positions]
    ordinary = [name for name in _ORDINARY if name in known]
    usual = [name for name in PLAIN_BLOCKS if name in known]
    written = [name for name in WRITTEN_BLOCKS if name in known]
    count = draw.choice((1, 2, 2, 3, 4))
    kinds = (ordinary, usual, written, known, known)
    return tuple(draw.choice(draw.choice(kinds)) for _ in range(count))


def _draw_layout(draw: random.Random, ranks: int, *, divisible: bool) -> str:
    axes = ["dp", "dp", "pp", "tp", *(("cp", "tp", "ep") if divisible else ())]
    sizes = dict.fromkeys(("dp", "tp", "pp", "cp"), 1)
    factors = draw.choice(((4,), (2, 2))) if ranks == 4 else (ranks,)
    for factor in factors:
        axis = draw.choice(axes)
        sizes["dp" if axis == "ep" else axis] *= factor
    options: dict[str, object] = {name: size for name, size in sizes.items() if size > 1}
    if draw.random() < 0.6:
        options["zero"] = draw.choice((1, 2, 3, 3))
    if sizes["pp"] > 1 and draw.random() < 0.6:
        options["schedule"] = draw.choice(_SCHEDULES)
        if options["schedule"] in ("interleaved", "zbv", "dualpipev"):
            options["vpp"] = 2
    if divisible and draw.random() < 0.3:
        options["ep"] = 2
    if sizes["tp"] > 1 and draw.random() < 0.3:
        options["sequence_parallel"] = 1
    elif sizes["tp"] == 4 and draw.random() < 0.6:
        options["tensor"] = "2d"
    if sizes["dp"] == 4 and draw.random() < 0.3:
        options["dp_replicate"] = 2
    return ",".join(f"{name}={value}" for name, value in options.items())


def _draw_microbatches(draw: random.Random, layout: str) -> int:
    if "dualpipev" in layout:
        return 2 * next(size for size in (2, 3, 4) if f"pp={size}" in layout)
    if "pp=3" in layout:
        return draw.choice((3, 6))
    return draw.choice((2, 2, 4)) if "pp" in layout else draw.choice((1, 1, 2, 3))


def _draw_loss(draw: random.Random, head: str, is_decoder: bool) -> str:
    if is_decoder:
        return draw.choice(_DECODER_LOSSES)
    channels = head in ("channels", "pooled")
    fitting = [name for name, kind in LOSSES.items() if not kind.channels or channels]
    if head == "channels":
        fitting = [
            name for name in fitting if LOSSES[name].channels or LOSSES[name].targets != "classes"
        ]
    if head == "masked":
        fitting = ["cross_entropy", "flat", "flat_lambda"]
    usual = [name for name in ("cross_entropy", "flat", "module", "squares") if name in fitting]
    return draw.choice(draw.choice((usual, fitting)))


def _draw_batches(draw: random.Random, microbatches: int) -> tuple[tuple[int, int], ...]:
    """Mostly batches of one shape; at times of several lengths, or of odd numbers of samples."""
    unit = 12 if microbatches % 3 == 0 else 8
    samples, length = unit * draw.choice((1, 1, 2)), draw.choice((4, 4, 6, 8, 5))
    steps = draw.choice((2, 3, 3, 4))
    kind = draw.random()
    if kind < 0.6:
        return ((samples, length),) * steps
    if kind < 0.8:
        return tuple((samples, draw.choice((4, 6, 8, 3))) for _ in range(steps))
    if kind < 0.9:
        return tuple((unit * draw.choice((1, 2, 3)), length) for _ in range(steps))
    return tuple((draw.randint(max(1, microbatches - 1), 9), length) for _ in range(steps))


def cases(first: int) -> Iterator[tuple[int, Case]]:
    """Yields the seeds from `first` on, with their cases."""
    seed = first
    while True:
        yield seed, draw_case(seed)
        seed += 1
