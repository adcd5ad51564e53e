"""Byte ranges: a model's parameters as one array of bytes, cut into equal shards and ranges.

A **shard** is the part of the array that one server holds. Shards are cut into **ranges**, the
units of pushes and pulls. A cut may divide a tensor, but not an element.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A parameter: its name, number of elements, element type, and bytes of an element."""

    name: str
    count: int
    dtype: str
    item_bytes: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements."""
        return self.count * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """The bytes from `start` to `stop` - 1."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes in the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of elements of a tensor: `count` elements from number `first` on.

    `start` is the byte of the whole array at which the run begins.

    `tensor` is the tensor's index in the argument of `ByteLayout`.
    """

    tensor: int
    first: int
    count: int
    start: int


class ByteLayout:
    """The positions of tensors in one array of bytes.

    Tensors are sorted by the size of their elements (largest first), then by type, then in the
    given order. So every element is aligned, without gaps.

    >>> layout = ByteLayout([
    ...     TensorSpec(name="bias", count=3, dtype="float32", item_bytes=4),
    ...     TensorSpec(name="scale", count=1, dtype="float64", item_bytes=8),
    ... ])
    >>> layout.nbytes, layout.starts
    (20, (8, 0))
    >>> [cut.nbytes for cut in layout.divide(ByteRange(start=0, stop=20), 2)]
    [8, 12]
    """

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.tensors = tuple(tensors)
        self._order = sorted(
            range(len(tensors)), key=lambda i: (-tensors[i].item_bytes, tensors[i].dtype, i)
        )
        starts = [0] * len(tensors)
        end = 0
        for index in self._order:
            starts[index] = end
            end += tensors[index].nbytes
        self.starts = tuple(starts)
        """First byte of each tensor, in the given order of tensors."""
        self.nbytes = end
        # A search must not find an empty tensor, which begins at the same byte as another tensor.
        self._order = [index for index in self._order if tensors[index].count]
        self._sorted_starts = [starts[index] for index in self._order]

    @property
    def whole(self) -> ByteRange:
        """The range of all bytes."""
        return ByteRange(start=0, stop=self.nbytes)

    def floor(self, byte: int) -> int:
        """Returns the first byte of the element that contains `byte`.

        For a byte after the last element, returns the end of the array.
        """
        if byte >= self.nbytes:
            return self.nbytes
        index = self._order[bisect_right(self._sorted_starts, byte) - 1]
        start = self.starts[index]
        return byte - (byte - start) % self.tensors[index].item_bytes

    def divide(self, whole: ByteRange, parts: int) -> tuple[ByteRange, ...]:
        """Cuts a range into `parts` ranges whose sizes are equal to within one element.

        Raises `ValueError` if a part would be empty.
        """
        cuts = [self.floor(whole.start + i * whole.nbytes // parts) for i in range(parts + 1)]
        found = tuple(ByteRange(start=start, stop=stop) for start, stop in pairwise(cuts))
        if not all(each.nbytes for each in found):
            raise ValueError(
                f"expected at least one element for each of {parts} servers, found {whole.nbytes} "
                "bytes of parameters: use fewer servers"
            )
        return found

    def ranges(self, shard: ByteRange, most_bytes: int) -> tuple[ByteRange, ...]:
        """Cuts a shard into ranges of equal size, of at most about `most_bytes` bytes each."""
        parts = max(1, -(-shard.nbytes // most_bytes))
        longest = max(spec.item_bytes for spec in self.tensors)
        return self.divide(shard, min(parts, max(1, shard.nbytes // longest)))

    def pieces(self, within: ByteRange) -> tuple[Piece, ...]:
        """Returns the parts of tensors that lie in a range, in the order of their bytes."""
        found = []
        place = max(bisect_right(self._sorted_starts, within.start) - 1, 0)
        for index in self._order[place:]:
            start, spec = self.starts[index], self.tensors[index]
            low, high = max(start, within.start), min(start + spec.nbytes, within.stop)
            if low >= high:
                break
            first, count = (low - start) // spec.item_bytes, (high - low) // spec.item_bytes
            found.append(Piece(tensor=index, first=first, count=count, start=low))
        return tuple(found)

    def tensors_in(self, within: ByteRange) -> tuple[int, ...]:
        """Returns the tensors with elements in a range, in the order of their bytes."""
        return tuple(piece.tensor for piece in self.pieces(within))

    def describe(self, within: ByteRange) -> str:
        """Returns the bytes and tensor names of a range, as text for errors and logs."""
        names = [self.tensors[piece.tensor].name for piece in self.pieces(within)]
        listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"bytes {within.start} to {within.stop} ({listed})"
