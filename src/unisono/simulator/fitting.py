"""Fits measured times by a piecewise linear function of the size. The fit has few lines and is
robust to outliers."""

from __future__ import annotations

import numpy as np

from unisono.simulator.link_model import Regime
from unisono.topology import Floats, Ints

_NOISE = 0.01
"""Relative error of the most exact measurements."""
_ROUNDS = 30


def fit(nbytes: Floats, seconds: Floats, noise: Floats | float = _NOISE) -> tuple[Regime, ...]:
    """Returns the lines of a piecewise linear fit of measured times over sizes, one regime per
    line.

    Several times of one size are replaced by their median, so that one slow run does not shift the
    fit. `noise` is the relative error of each time. A new regime begins if it reduces the sum of
    errors, in units of the noise, by more than a fixed cost: the logarithm of the number of sizes.
    The lines then minimise relative errors, with less weight on outliers. Raises `ValueError` for
    fewer than 2 sizes, for times that are not positive, and for times that do not grow with the
    size at the end.

    >>> sizes = np.array([1.0, 2, 4, 8, 16, 32, 64, 128]) * 1024
    >>> times = 1e-6 + sizes * 1e-10 + np.maximum(sizes - 8192, 0) * 4e-10
    >>> [(round(r.least), f"{r.alpha_s:.1e}", f"{r.byte_s:.1e}") for r in fit(sizes, times)]
    [(0, '1.0e-06', '1.0e-10'), (8192, '-2.3e-06', '5.0e-10')]
    """
    x, y = np.asarray(nbytes, np.float64), np.asarray(seconds, np.float64)
    if not (y > 0).all() or not (x >= 0).all():
        raise ValueError("a fit needs sizes of at least 0 and times above 0")
    relative_noise = np.maximum(np.broadcast_to(np.asarray(noise, np.float64), x.shape), _NOISE)
    sizes, which = np.unique(x, return_inverse=True)
    if len(sizes) < 2:
        raise ValueError(f"a fit needs at least 2 sizes, got {len(sizes)}")
    each = [np.flatnonzero(which == i) for i in range(len(sizes))]
    middle = np.array([np.median(y[rows]) for rows in each])
    spread = np.array([relative_noise[rows].mean() / np.sqrt(len(rows)) for rows in each])
    spread = np.maximum(spread, _NOISE)
    knots = sizes[_knots(sizes, middle, spread)]
    knots = _drop_knots(knots, sizes, middle, spread, float(np.log(len(sizes))))
    return _regimes(knots, _through(knots, sizes, middle, spread))


def _knots(x: Floats, y: Floats, noise: Floats) -> Ints:
    """Returns the indices of the sizes at which lines end. These sizes minimise the sum of the
    errors plus a fixed cost per line."""
    last, price = len(x) - 1, np.log(len(x))
    best, back = np.full(len(x), np.inf), np.zeros(len(x), np.int64)
    best[0] = 0.0
    for j in range(1, len(x)):
        for i in range(j):
            inner = slice(i + 1, j)
            line = np.interp(x[inner], x[[i, j]], y[[i, j]])
            total = best[i] + price + float(np.abs(line / y[inner] - 1) @ (1 / noise[inner]))
            if total < best[j]:
                best[j], back[j] = total, i
    found = [last]
    while found[0]:
        found.insert(0, int(back[found[0]]))
    return np.array(found)


def _drop_knots(knots: Floats, x: Floats, y: Floats, noise: Floats, price: float) -> Floats:
    """Removes knots as long as the remaining knots fit the times equally well. `_knots` returns
    more knots than necessary, because its lines go through single points."""

    def error(some: Floats) -> float:
        return float(
            np.abs((np.interp(x, some, _through(some, x, y, noise)) / y - 1) / noise).sum()
        )

    now = error(knots)
    while len(knots) > 2:
        fewer = [np.delete(knots, i) for i in range(1, len(knots) - 1)]
        errors = [error(some) for some in fewer]
        best = int(np.argmin(errors))
        if errors[best] > now + price:
            break
        knots, now = fewer[best], errors[best]
    return knots


def _through(knots: Floats, x: Floats, y: Floats, noise: Floats) -> Floats:
    """Returns the fitted time at each knot. The lines between the knots minimise the sum of the
    squares of (relative error / noise). Huber weights, which are updated in each iteration, reduce
    the influence of outliers."""
    basis = np.stack([np.interp(x, knots, row) for row in np.eye(len(knots))], axis=1)
    scaled = basis / (y * noise)[:, None]
    goal = 1 / noise
    weight = np.ones(len(x))
    found: Floats = np.zeros(len(knots))
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)
        found = np.asarray(np.linalg.lstsq(scaled * root[:, None], goal * root, rcond=None)[0])
        weight = 1 / np.maximum(1.0, np.abs(scaled @ found - goal))
    lowest = float(y.min())
    return np.maximum.accumulate(np.maximum(found, lowest / 2))


def _regimes(x: Floats, y: Floats) -> tuple[Regime, ...]:
    byte = np.diff(y) / np.diff(x)
    alpha = y[:-1] - byte * x[:-1]
    if byte[-1] <= 0:
        raise ValueError("the times do not grow with the size at the end; measure larger sizes")
    leasts = np.concatenate([[0.0], x[1:-1]])
    if alpha[0] < 0:  # very small sizes would get negative times
        leasts = np.concatenate([[0.0, x[0]], leasts[1:]])
        alpha, byte = np.append(0.0, alpha), np.append(y[0] / x[0], byte)
    return tuple(
        Regime(least=float(least), alpha_s=float(a), byte_s=float(b))
        for least, a, b in zip(leasts, alpha, byte, strict=True)
    )
