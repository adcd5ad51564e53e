"""The uncertainty of the fitted constants: the covariance of their logarithms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.planner.data_files import data_text

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ConstantCovariance:
    """Covariance of the logarithms of constants, as its lower triangular factor.

    The covariance is the product of the factor and its transpose. Without names, all constants are
    certain.

    >>> both = ConstantCovariance(names=("a", "b"), factor=((0.3,), (0.4, 0.3)))
    >>> round(both.variance([0, 1]), 6), round(both.without(["b"]).variance([1, 1]), 6)
    (0.25, 0.09)
    """

    names: tuple[str, ...] = ()
    """Names of the constants, as in `data/constants.json`."""
    factor: tuple[tuple[float, ...], ...] = ()
    """One row for each constant; row i has i + 1 numbers, or none for a constant that is
    certain."""

    def matrix(self) -> _Floats:
        """Returns the factor as a square matrix, which must not be changed."""
        return self._matrix

    @cached_property
    def _matrix(self) -> _Floats:
        found = np.zeros((len(self.names), len(self.names)))
        for i, row in enumerate(self.factor):
            found[i, : len(row)] = row
        return found

    def variance(self, gradient: Sequence[float] | _Floats) -> float:
        """Returns the variance of a value whose derivatives by the logarithms of the constants are
        `gradient`.
        """
        parts = np.asarray(gradient, np.float64) @ self.matrix()
        return float(parts @ parts)

    def without(self, names: Iterable[str]) -> ConstantCovariance:
        """Returns the covariance with these constants certain, for example after a measurement."""
        known = set(names)
        rows = zip(self.names, self.factor, strict=True)
        return replace(self, factor=tuple(() if name in known else row for name, row in rows))


@cache
def constant_covariances() -> Mapping[str, ConstantCovariance]:
    """Returns the covariances that the package ships: of the fit to all runs ("all"), and of the
    fits without one family, by family.
    """
    return covariances_from(json.loads(data_text("constant_covariances.json")))


def covariances_from(document: Mapping[str, Any]) -> dict[str, ConstantCovariance]:
    """Returns the covariances of a document such as `data/constant_covariances.json`."""
    names = tuple(document["names"])
    return {
        fit: ConstantCovariance(names=names, factor=tuple(tuple(row) for row in rows))
        for fit, rows in document["factors"].items()
    }


def covariances_text(covariances: Mapping[str, ConstantCovariance]) -> str:
    """Returns the JSON of covariances of the same constants, with one line for each row."""
    names = next(iter(covariances.values())).names
    fits = []
    for fit, found in covariances.items():
        rows = (json.dumps([float(f"{x:.3g}") for x in row]) for row in found.factor)
        fits.append(f"  {json.dumps(fit)}: [\n   " + ",\n   ".join(rows) + "\n  ]")
    factors = "{\n" + ",\n".join(fits) + "\n }"
    return f'{{\n "names": {json.dumps(names)},\n "factors": {factors}\n}}\n'
