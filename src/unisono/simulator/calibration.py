"""From measurements to link models, how well those foretell what they were not fitted to, files."""

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
from unisono.simulator.measured import Sample, read
from unisono.topology import Floats

FORMAT = "unisono link models"
_VERSION = 1
_USUAL = {"nccl": ("ring", "direct"), "": ("direct", "ring")}
"""What a contestant is taken to run: the first that there is."""


def calibrate(
    samples: Sequence[Sample], *, algorithm: str | None = None, source: str = ""
) -> list[LinkModel]:
    """A model for each operation and number of ranks that was measured.

    `algorithm` is what ran: by default what the samples say most often; where they do not, a ring
    where NCCL did, else `direct`. Of a rank's bytes it says how many each message has. Raises
    `ValueError` for what cannot be fitted, and `UnsupportedError` for algorithms that the operation
    does not have.

    >>> times = [Sample(op="all_reduce", ranks=4, nbytes=n, seconds=6e-6 + 1.5e-9 * n)
    ...     for n in (1e3, 1e4, 1e5, 1e6)]
    >>> (model,) = calibrate(times, algorithm="ring")
    >>> round(model.regimes[0].alpha_s * 1e6, 3), round(model.bandwidth_Bps / 1e9, 3)
    (1.0, 1.0)
    """
    return [
        _model(alike, algorithm, source)
        for _, some in groupby(sorted(samples, key=_kind), key=_kind)
        for alike in [_alike(list(some), algorithm)]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Errors at every other size, of a model fitted to the rest; relative to what was measured, of
    several times of one size to their median."""

    mean: float
    median: float
    worst: float
    sizes: int


def holdout(
    samples: Sequence[Sample], *, algorithm: str | None = None, half: Literal[0, 1] = 0
) -> Holdout | None:
    """How well every other size foretells the rest, of one operation on one number of ranks: those
    from the least size on (`half` 0) or from the next (1), which then has to foretell the least.
    None where there are too few sizes, or times do not grow."""
    samples = _alike(samples, algorithm)
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
    """`holdout` of the half that foretells the other worse: which half is fitted is a choice that
    nobody should make by its outcome.

    >>> times = [
    ...     Sample(op="all_reduce", ranks=4, nbytes=n, seconds=6e-6 + 1.5e-9 * n)
    ...     for n in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
    ... ]
    >>> worst = worse_holdout(times, algorithm="ring")
    >>> worst is not None and worst.mean < 1e-6
    True
    """
    halves = (holdout(samples, algorithm=algorithm), holdout(samples, algorithm=algorithm, half=1))
    there = [held for held in halves if held is not None]
    return max(there, key=lambda held: held.mean, default=None)


def of_contestant(samples: Sequence[Sample], contestant: str | None) -> list[Sample]:
    """The samples of one contestant: by default of the first. Raises `ValueError`.

    >>> times = [
    ...     Sample(op="broadcast", ranks=2, nbytes=8, seconds=1e-6, contestant=name)
    ...     for name in ("gloo", "unisono")
    ... ]
    >>> [sample.contestant for sample in of_contestant(times, None)]
    ['gloo']
    """
    there = list(dict.fromkeys(sample.contestant for sample in samples))
    name = contestant or next(iter(there), "")
    if name not in there:
        raise ValueError(f"{name} was not measured; there are {', '.join(there) or 'no times'}")
    return [sample for sample in samples if sample.contestant == name]


def _kind(sample: Sample) -> tuple[str, int]:
    return sample.op, sample.ranks


def _alike(samples: Sequence[Sample], algorithm: str | None) -> Sequence[Sample]:
    """Where samples say what ran: those of one algorithm, by default of the one with most."""
    counts = Counter(sample.algorithm for sample in samples if sample.algorithm)
    if not counts:
        return samples
    name = algorithm or counts.most_common(1)[0][0]
    if name not in counts:
        raise ValueError(f"{name} was not measured; there are {', '.join(counts)}")
    return [sample for sample in samples if sample.algorithm == name]


def _model(samples: Sequence[Sample], algorithm: str | None, source: str) -> LinkModel:
    op, ranks = _kind(samples[0])
    name = algorithm or samples[0].algorithm or _usual(op, samples[0].contestant)
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


def _usual(op: str, contestant: str) -> str:
    there = names(op)
    wanted = _USUAL.get(contestant, _USUAL[""])
    return next((name for name in wanted if name in there), there[0])


def _error(regimes: tuple[Regime, ...], sizes: Floats, seconds: Floats) -> float:
    model = LinkModel(regimes=regimes, op="", ranks=2, algorithm="")
    return float(np.median(np.abs(model.at(sizes) / seconds - 1)))


# ---- files


def to_json(models: Iterable[LinkModel]) -> str:
    """Models as a file that `from_json` reads.

    >>> from_json(to_json([]))
    []
    """
    document = {"format": FORMAT, "version": _VERSION, "models": [asdict(m) for m in models]}
    return json.dumps(document, indent=2) + "\n"


def from_json(text: str) -> list[LinkModel]:
    """What `to_json` wrote. Raises `ValueError` for anything else."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a file of {FORMAT}")
    if document.get("version") != _VERSION:
        raise ValueError(f"version {document.get('version')} of {FORMAT}, not {_VERSION}")
    try:
        return [_from_dict(found) for found in document["models"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a file of {FORMAT}: {error}") from error


def _from_dict(found: dict[str, Any]) -> LinkModel:
    return LinkModel(**{**found, "regimes": tuple(Regime(**row) for row in found["regimes"])})


def models_of(text: str, *, source: str = "") -> list[LinkModel]:
    """The models of a text: one that `to_json` wrote, or measurements, which are then fitted.

    >>> models_of(to_json([]))
    []
    """
    if text.lstrip().startswith("{") and f'"{FORMAT}"' in text[:200]:
        return from_json(text)
    return calibrate(of_contestant(read(text), None), source=source)
