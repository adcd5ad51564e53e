"""Parser of the docstrings of algorithms, for the tables in the documentation and for the package
`show`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unisono.algorithms.registry import Algorithm

_LABELS = ("Rounds", "Bytes", "Reductions", "Source")
_LABEL = re.compile(rf"\b({'|'.join(_LABELS)}): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Fields of an algorithm's docstring, as text. `reductions` and `source` may be empty.

    >>> from unisono.algorithms import find
    >>> describe(find("all_gather", "ring")).rounds
    'n-1'
    """

    summary: str
    rounds: str
    bytes_sent: str
    reductions: str
    source: str


def describe(algorithm: Algorithm) -> Description:
    """Splits the docstring of an algorithm into its fields.

    >>> from unisono.algorithms import find
    >>> describe(find("all_reduce", "ring")).rounds
    '2(n-1)'
    """
    text = " ".join(algorithm.doc.split())
    found = dict.fromkeys(_LABELS, "")
    pieces = _LABEL.split(text)
    for label, words in zip(pieces[1::2], pieces[2::2], strict=True):
        found[label] = words.strip().removesuffix(".")
    return Description(
        summary=" ".join(algorithm.doc.partition("\n\n")[0].split()),
        rounds=found["Rounds"],
        bytes_sent=found["Bytes"],
        reductions=found["Reductions"],
        source=found["Source"],
    )
