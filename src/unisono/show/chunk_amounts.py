"""Human-readable amounts of data: fractions of N, or bytes if the size of a message is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from unisono.schedule import Collective
from unisono.show.unit_text import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The unit of amounts. N, the size of a rank's larger buffer, has `chunks` chunks and `nbytes`
    bytes."""

    chunks: int
    nbytes: int | None = None

    @classmethod
    def of(cls, collective: Collective, nbytes: int | None = None) -> Scale:
        """Returns the scale of a collective. `nbytes` is the size of the larger buffer, if
        known."""
        pieces = max(
            max(collective.input_pieces(rank), collective.output_pieces(rank))
            for rank in range(collective.ranks)
        )
        return cls(chunks=max(1, pieces * collective.parts), nbytes=nbytes)

    def text(self, count: int) -> str:
        """Returns an amount of `count` chunks as text.

        >>> [Scale(chunks=8).text(count) for count in (0, 1, 6, 8, 14)]
        ['0', 'N/8', '3/4 N', 'N', '1.75 N']
        >>> Scale(chunks=8, nbytes=64 << 20).text(3)
        '24 MiB'
        """
        share = Fraction(count, self.chunks)
        if self.nbytes is not None:
            return bytes_text(float(share * self.nbytes))
        if share == 0:
            return "0"
        if share == 1:
            return "N"
        if share > 1:
            return f"{float(share):.4g} N"
        top = share.numerator
        return f"N/{share.denominator}" if top == 1 else f"{top}/{share.denominator} N"

    def span(self, counts: Iterable[int]) -> str:
        """Returns the amounts of several ranks or links as text: one amount if all are equal, else
        a range."""
        counts = tuple(counts)
        least, most = min(counts, default=0), max(counts, default=0)
        return self.text(most) if least == most else f"{self.text(least)} to {self.text(most)}"
