"""Fits link models to measurements, estimates their prediction errors, and reads and writes
them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any, Literal

import numpy as np

from unisono.algorithms import names
from unisono.simulator.fitting import fit
from unisono.simulator.link_model import LinkModel, Regime, message
from unisono.simulator.measurement_files import Sample, read
from unisono.topology import Floats

FORMAT = "unisono link models"
_VERSION = 1
_DEFAULT_ALGORITHMS = {"nccl": ("ring", "direct"), "": ("direct", "ring")}
"""Algorithms that each contestant is assumed to run, in order of preference."""


def calibrate(
    samples: Sequence[Sample], *, algorithm: str | None = None, source: str = ""
) -> list[LinkModel]:
    """Fits a model for each measured operation and number of ranks.

    `algorithm` names the algorithm that was measured, which determines the size of each message.
    The default is the algorithm of most samples. For samples without an algorithm, the default is
    `ring` for NCCL, and `direct` for other libraries. Raises `ValueError` if the samples cannot be
    fitted, and `UnsupportedError` if the operation does not have the algorithm.

    >>> times = [Sample(op="all_reduce", ranks=4, nbytes=n, seconds=6e-6 + 1.5e-9 * n)
    ...     for n in (1e3, 1e4, 1e5, 1e6)]
    >>> (model,) = calibrate(times, algorithm="ring")
    >>> round(model.regimes[0].alpha_s * 1e6, 3), round(model.bandwidth_Bps / 1e9, 3)
    (1.0, 1.0)
    """
    return [
        _model(chosen, algorithm, source)
        for _, group in groupby(sorted(samples, key=_kind), key=_kind)
        for chosen in [_of_algorithm(list(group), algorithm)]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Relative errors of a model at alternate sizes, after a fit to the other sizes. Each predicted
    time is compared with the median of the times measured at its size."""

    mean: float
    median: float
    worst: float
    sizes: int


def holdout(
    samples: Sequence[Sample], *, algorithm: str | None = None, half: Literal[0, 1] = 0
) -> Holdout | None:
    """Fits a model to alternate sizes of one operation and rank count, and predicts the other
    sizes.

    With `half` 0, the model is fitted to the first, third, fifth size and so on, in ascending
    order. With `half` 1, it is fitted to the second, fourth size and so on, and must extrapolate to
    the smallest size. Returns None if there are fewer than 4 sizes or the times do not grow with
    the size.
    """
    samples = _of_algorithm(samples, algorithm)
    sizes = sorted({sample.nbytes for sample in samples})
    if len(sizes) < 4:
        return None
    fitted, tested = set(sizes[half::2]), sizes[1 - half :: 2]
    try:
        (model,) = calibrate([s for s in samples if s.nbytes in fitted], algorithm=algorithm)
    except ValueError:
        return None
    measured = [median(s.seconds for s in samples if s.nbytes == size) for size in tested]
    errors = [
        abs(model.predict(size) / time_s - 1) for size, time_s in zip(tested, measured, strict=True)
    ]
    return Holdout(
        mean=float(np.mean(errors)),
        median=float(np.median(errors)),
        worst=max(errors),
        sizes=len(tested),
    )


def worse_holdout(samples: Sequence[Sample], *, algorithm: str | None = None) -> Holdout | None:
    """Runs `holdout` for both halves of the sizes, and returns the result with the larger mean
    error, so that a caller cannot report only the better half.

    >>> times = [
    ...     Sample(op="all_reduce", ranks=4, nbytes=n, seconds=6e-6 + 1.5e-9 * n)
    ...     for n in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
    ... ]
    >>> worst = worse_holdout(times, algorithm="ring")
    >>> worst is not None and worst.mean < 1e-6
    True
    """
    halves = (holdout(samples, algorithm=algorithm), holdout(samples, algorithm=algorithm, half=1))
    available = [held for held in halves if held is not None]
    return max(available, key=lambda held: held.mean, default=None)


def of_contestant(samples: Sequence[Sample], contestant: str | None) -> list[Sample]:
    """Returns the samples of one contestant of a benchmark, such as `gloo`, by default of the first
    contestant. Raises `ValueError` if the contestant was not measured.

    >>> times = [
    ...     Sample(op="broadcast", ranks=2, nbytes=8, seconds=1e-6, contestant=name)
    ...     for name in ("gloo", "unisono")
    ... ]
    >>> [sample.contestant for sample in of_contestant(times, None)]
    ['gloo']
    """
    available = list(dict.fromkeys(sample.contestant for sample in samples))
    name = contestant or next(iter(available), "")
    if name not in available:
        raise ValueError(
            f"contestant {name!r} was not measured; measured: {', '.join(available) or 'none'}"
        )
    return [sample for sample in samples if sample.contestant == name]


def _kind(sample: Sample) -> tuple[str, int]:
    return sample.op, sample.ranks


def _of_algorithm(samples: Sequence[Sample], algorithm: str | None) -> Sequence[Sample]:
    """Returns the samples of one algorithm, by default of the most frequent algorithm. Returns all
    samples if no sample names an algorithm."""
    counts = Counter(sample.algorithm for sample in samples if sample.algorithm)
    if not counts:
        return samples
    name = algorithm or counts.most_common(1)[0][0]
    if name not in counts:
        raise ValueError(f"algorithm {name!r} was not measured; measured: {', '.join(counts)}")
    return [sample for sample in samples if sample.algorithm == name]


def _model(samples: Sequence[Sample], algorithm: str | None, source: str) -> LinkModel:
    op, ranks = _kind(samples[0])
    name = algorithm or samples[0].algorithm or _default_algorithm(op, samples[0].contestant)
    rounds, share = message(op, name, ranks)
    sizes, seconds, noise = (
        np.array([getattr(sample, field) for sample in samples], np.float64)
        for field in ("nbytes", "seconds", "noise")
    )
    sizes, seconds = sizes * share, seconds / rounds
    try:
        regimes = fit(sizes, seconds, noise)
    except ValueError as error:
        raise ValueError(f"{op} on {ranks} ranks: {error}") from error
    return LinkModel(
        regimes=regimes,
        op=op,
        ranks=ranks,
        algorithm=name,
        error=_error(regimes, sizes, seconds),
        source=source,
    )


def _default_algorithm(op: str, contestant: str) -> str:
    available = names(op)
    wanted = _DEFAULT_ALGORITHMS.get(contestant, _DEFAULT_ALGORITHMS[""])
    return next((name for name in wanted if name in available), available[0])


def _error(regimes: tuple[Regime, ...], sizes: Floats, seconds: Floats) -> float:
    model = LinkModel(regimes=regimes, op="", ranks=2, algorithm="")
    return float(np.median(np.abs(model.at(sizes) / seconds - 1)))


# ---- files


def to_json(models: Iterable[LinkModel]) -> str:
    """Returns models as JSON text that `from_json` reads.

    >>> from_json(to_json([]))
    []
    """
    document = {"format": FORMAT, "version": _VERSION, "models": [asdict(m) for m in models]}
    return json.dumps(document, indent=2) + "\n"


def from_json(text: str) -> list[LinkModel]:
    """Reads models that `to_json` wrote. Raises `ValueError` for any other text."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"expected a file of {FORMAT}")
    if document.get("version") != _VERSION:
        raise ValueError(f"expected version {_VERSION} of {FORMAT}, got {document.get('version')}")
    try:
        return [_from_dict(found) for found in document["models"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a file of {FORMAT}: {error}") from error


def _from_dict(found: dict[str, Any]) -> LinkModel:
    return LinkModel(**{**found, "regimes": tuple(Regime(**row) for row in found["regimes"])})


def models_of(text: str, *, source: str = "") -> list[LinkModel]:
    """Returns the models that `to_json` wrote to a text, or fits models to the measurements in a
    text.

    >>> models_of(to_json([]))
    []
    """
    if text.lstrip().startswith("{") and f'"{FORMAT}"' in text[:200]:
        return from_json(text)
    return calibrate(of_contestant(read(text), None), source=source)
