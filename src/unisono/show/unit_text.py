"""Human-readable times, sizes and rates."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """Returns a time with a unit.

    >>> time_text(0.00125), time_text(3.2e-6), time_text(12)
    ('1.25 ms', '3.2 us', '12 s')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor * (1 - 1e-9):
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def bytes_text(nbytes: float) -> str:
    """Returns a number of bytes with a unit, in powers of 1024.

    >>> bytes_text(64 << 20), bytes_text(1000)
    ('64 MiB', '1000 B')
    """
    unit = 0
    while nbytes >= 1024 and unit < 4:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def rate_text(rate: float) -> str:
    """Returns a rate with a unit.

    >>> rate_text(50e9), rate_text(1.25e6)
    ('50 GB/s', '1.25 MB/s')
    """
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= factor:
            return f"{rate / factor:.4g} {unit}"
    return f"{rate:.4g} B/s"
