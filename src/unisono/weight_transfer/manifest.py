"""The names, types and shapes of the arrays of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.weight_transfer.array_bytes import Array

_PACKED_BYTES = 2**20
"""Arrays below this size are sent together with others."""
_BUCKET_BYTES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One array."""

    name: str
    dtype: str
    """Name of the element type, the same in NumPy and torch: "float32", for example."""
    shape: tuple[int, ...]
    nbytes: int
    is_tensor: bool
    """True for a tensor of torch."""

    @classmethod
    def of(cls, name: str, array: Array) -> Entry:
        """Describes an array."""
        return cls(
            name=name,
            dtype=str(array.dtype).removeprefix("torch."),
            shape=tuple(array.shape),
            nbytes=int(array.nbytes),
            is_tensor=not isinstance(array, np.ndarray),
        )

    def allocate(self) -> Array:
        """Returns an array of this type and shape without values."""
        if not self.is_tensor:
            return np.empty(self.shape, self.dtype)
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))

    def text(self) -> str:
        """Returns type and shape, for errors."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All arrays of an update, in the order in which they are sent."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Manifest:
        """Describes arrays by name."""
        return cls(entries=tuple(Entry.of(name, each) for name, each in arrays.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in self.entries)

    def allocate(self) -> dict[str, Array]:
        """Returns new arrays by name."""
        return {each.name: each.allocate() for each in self.entries}

    def require(self, into: Mapping[str, Any]) -> None:
        """Raises `ValueError` unless the arrays of a worker are those of the update."""
        missing = [each.name for each in self.entries if each.name not in into]
        others = set(into) - {each.name for each in self.entries}
        if missing or others:
            raise ValueError(
                f"into: the worker has no {_some(missing)}, and the trainer sends no "
                f"{_some(sorted(others))}; the names of both must be equal"
            )
        for each in self.entries:
            own = Entry.of(each.name, into[each.name])
            if (own.dtype, own.shape) != (each.dtype, each.shape):
                raise ValueError(
                    f"{each.name}: the trainer sends {each.text()}, and the worker has {own.text()}"
                )

    def buckets(self) -> Iterator[list[Entry]]:
        """Yields the arrays that are sent together: a large one, or several small ones."""
        packed: list[Entry] = []
        for each in self.entries:
            if each.nbytes >= _PACKED_BYTES:
                yield [each]
                continue
            if sum(one.nbytes for one in packed) + each.nbytes > _BUCKET_BYTES:
                yield packed
                packed = []
            packed.append(each)
        if packed:
            yield packed


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "other array"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
