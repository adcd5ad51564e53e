"""A watch over a model's own initializers, which runs them on real memory, a module at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unisono.torch_backend import map_tensors, storage_number, version_of

_FORMS = frozenset(
    ("shape", "dtype", "layout", "ndim", "requires_grad", "names", "is_sparse", "size", "dim",
     "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__",
     "is_floating_point", "is_complex", "is_contiguous", "__hash__", "grad", "is_leaf", "grad_fn",
     "__repr__", "__format__", "is_nested")
)  # fmt: skip
"""Questions that memory without values answers."""
_OVERWRITE = frozenset(
    ("normal_", "uniform_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "log_normal_",
     "cauchy_", "geometric_", "random_", "constant_", "ones_", "zeros_", "eye_", "dirac_",
     "orthogonal_", "sparse_", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
     "kaiming_uniform_", "kaiming_normal_")
)  # fmt: skip
"""Functions that set all values of their first argument, whatever these were."""
_CPU = torch.device("cpu")
_LEAST_BYTES = 2**17


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedTensor:
    """A tensor on the device meta for which an initializer has values."""

    name: str
    owner: str
    """The name of the module that has the tensor."""
    tensor: torch.Tensor
    is_wanted: bool
    """False if its values come from elsewhere, so that they need not be computed."""


class InitializerWatch(TorchFunctionMode):
    """Gives tensors on meta memory while an initializer writes them.

    When the initializer goes on to the tensors of another module, the former ones are handed over
    and their memory is freed. So there is never more memory than for one module.
    """

    def __init__(
        self, tensors: Sequence[WatchedTensor], take: Callable[[str, torch.Tensor], None]
    ) -> None:
        """`take`: gets the name and the values of each tensor that has been written."""
        super().__init__()
        self._known = {storage_number(each.tensor): each for each in tensors}
        self._take = take
        self._memory: dict[int, torch.Tensor] = {}
        self._owner = ""
        self.written: set[str] = set()
        """The names of the tensors that the initializers have written."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        # the functions of torch.nn.init pass their arguments by name
        name, first = _name_of(func), args[0] if args else keywords.get("tensor")
        known = self._of(first)
        if known is not None and name in ("device", "is_meta", "is_cpu"):
            return {"device": _CPU, "is_meta": False, "is_cpu": True}[name]
        if known is not None and (name in _FORMS or not known.is_wanted):
            return func(*args, **keywords)
        if known is not None and name == "data":  # its writes would not count
            assert isinstance(first, torch.Tensor)
            if len(args) == 1:
                return self._real(first, name, first)
            return self._real(first, "copy_", first).copy_(args[1])
        found = func(
            *map_tensors(lambda x: self._real(x, name, first), list(args)),
            **map_tensors(lambda x: self._real(x, name, first), keywords),
        )
        is_own = isinstance(found, torch.Tensor) and any(
            found is each for each in self._memory.values()
        )
        return first if is_own and known is not None else found

    def _of(self, x: Any) -> WatchedTensor | None:
        if not isinstance(x, torch.Tensor) or not x.is_meta:
            return None
        return self._known.get(storage_number(x))

    def _real(self, x: torch.Tensor, function: str, first: Any) -> torch.Tensor:
        """Returns the memory of a tensor on meta; other tensors as they are."""
        known = self._of(x)
        if known is None or not known.is_wanted:
            return x
        if known.owner != self._owner:
            self.hand_over()
            self._owner = known.owner
        number = storage_number(known.tensor)
        if number not in self._memory:
            if known.name in self.written and not (
                x is first and _is_whole(x, known.tensor) and function in _OVERWRITE
            ):
                raise ValueError(
                    f"{known.name}: {function} needs its values again, after those of other "
                    "modules were drawn, but no rank keeps a whole model; expected initializers "
                    "that set a module's weights once, or weights="
                )
            self._memory[number] = _memory_like(known.tensor)
        real = self._memory[number]
        if _is_whole(x, known.tensor):
            return real
        return real.as_strided(x.shape, x.stride(), x.storage_offset())

    def hand_over(self) -> None:
        """Hands over what has been written, and frees the memory."""
        for number, values in self._memory.items():
            known = self._known[number]
            if version_of(values):
                self.written.add(known.name)
                self._take(known.name, values)
        self._memory.clear()


def _memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns memory for the values of a tensor, which goes back to the system when it is freed.

    The C library would keep what large tensors of changing sizes leave.
    """
    if tensor.nbytes < _LEAST_BYTES or not tensor.is_contiguous():
        return torch.empty_like(tensor, device=_CPU)
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _is_whole(x: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Returns True if x has all elements of a tensor, in the same places."""
    return (x.shape, x.stride(), x.storage_offset()) == (
        tensor.shape, tensor.stride(), tensor.storage_offset(),
    )  # fmt: skip


def _name_of(func: Any) -> str:
    """Returns the name of a function, or of the attribute that a getter reads."""
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name
