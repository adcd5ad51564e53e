"""Values of a program as bytes that torch reads without running code.

Plain values, tensors and NumPy arrays, in dictionaries, lists, tuples and sets, keep their types.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_ARRAY, _PART = "(array of NumPy)", "(part of a DTensor)"
"""The only key of a dictionary that stands for another value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredValue:
    """A value in a checkpoint."""

    data: bytes
    """The value as `torch.save` writes it."""
    digest: str
    """Equal for equal values."""
    is_part: bool
    """The value has parts of tensors that are divided over ranks."""

    @classmethod
    def of(cls, value: object, where: str) -> StoredValue:
        """Returns a copy of a value. Raises `ValueError` for a value that no checkpoint holds;
        `where` begins its text.

        >>> first, second = (StoredValue.of({"epoch": 1, "order": [2, 0]}, "") for _ in range(2))
        >>> first.digest == second.digest
        True
        """
        coder = _Coder()
        coded, buffer = coder.coded(value, where), io.BytesIO()
        torch.save(coded, buffer)
        digest = coder.digest.hexdigest()
        return cls(data=buffer.getvalue(), digest=digest, is_part=coder.is_part)


class _Coder:
    """Replaces what torch cannot read without running code, and sums up all values."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.is_part = False

    def coded(self, value: Any, where: str) -> Any:
        kind = type(value)
        self._add(f"{kind.__name__}:")
        if kind in _PLAIN:
            self._add(repr(value))
            return value
        if isinstance(value, DTensor):
            self.is_part = True
            return {_PART: self._tensor(value.to_local())}
        if kind in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSUmM":
            data = value.tobytes()
            shape = None if isinstance(value, np.generic) else value.shape
            self._add(f"{value.dtype.str}{shape}", data)
            return {_ARRAY: (value.dtype.str, shape, data)}
        if kind in (dict, OrderedDict, Counter):
            self._add(f"{len(value)}")
            if all(type(key) in (*_PLAIN, tuple) for key in value):
                pairs = value.items()
                return kind(
                    {
                        self.coded(key, where): self.coded(each, f"{where}[{key!r}]")
                        for key, each in pairs
                    }
                )
        if kind in (list, tuple, torch.Size):
            self._add(f"{len(value)}")
            return kind([self.coded(each, f"{where}[{place}]") for place, each in enumerate(value)])
        if kind is set:
            self._add(repr(sorted(value, key=repr)))
            if all(type(each) in _PLAIN for each in value):
                return value
        raise ValueError(
            f"{where}: expected plain values, tensors and arrays of NumPy, in dictionaries, lists, "
            f"tuples and sets, got {kind.__qualname__}; save its state_dict() as these, and build "
            "it again from them"
        )

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy()
        self._add(f"{whole.dtype}{tuple(whole.shape)}", data.data)
        has_more = whole.untyped_storage().nbytes() != whole.nbytes
        return whole.clone() if has_more else whole

    def _add(self, text: str, data: bytes | memoryview = b"") -> None:
        self.digest.update(f"{len(text)} {text}".encode())
        self.digest.update(data)


def restored(coded: Any, like: Any, where: str) -> Any:
    """Returns the value that `StoredValue.of` received.

    `like`: a value of the same structure, whose tensors that are divided over ranks give theirs
    the same division. Raises `ValueError` if it has no such tensor.
    """
    if isinstance(coded, dict):
        if set(coded) == {_ARRAY}:
            return _array(*coded[_ARRAY])
        if set(coded) == {_PART}:
            return _divided(coded[_PART], like, where)
        known = like if isinstance(like, dict) else {}
        pairs = coded.items()
        return type(coded)(
            {key: restored(each, known.get(key), f"{where}[{key!r}]") for key, each in pairs}
        )
    if isinstance(coded, list | tuple):
        others = like if isinstance(like, list | tuple) and len(like) == len(coded) else ()
        found = [
            restored(each, others[place] if others else None, f"{where}[{place}]")
            for place, each in enumerate(coded)
        ]
        return type(coded)(found)
    return coded


def _array(kind: str, shape: tuple[int, ...] | None, data: bytes) -> np.ndarray | np.generic:
    values = np.frombuffer(data, dtype=np.dtype(kind))
    found: np.ndarray | np.generic = values[0] if shape is None else values.reshape(shape).copy()
    return found


def _divided(local: torch.Tensor, like: Any, where: str) -> DTensor:
    if not isinstance(like, DTensor) or like.to_local().shape != local.shape:
        raise ValueError(
            f"{where}: the checkpoint has a part {tuple(local.shape)} of a tensor that is divided "
            "over ranks; pass the object whose state it is to load(folder, extra=...)"
        )
    return DTensor.from_local(
        local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
