"""The torch.distributed backend `unisono`, for tensors in CPU memory and on CUDA devices.

    import torch.distributed as dist

    dist.init_process_group("unisono")

torch finds the backend through the entry point `torch.backends`, without an import. Importing
this package registers the backend too, for environments that disable entry points.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.errors import UnsupportedError
from unisono.extras import with_cure

__all__ = [
    "BACKEND_NAME",
    "Options",
    "register",
    "stand_in_for",
]

BACKEND_NAME = "unisono"
_NEWEST_TESTED = (2, 13)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of `init_process_group` and `new_group`, given as `pg_options`.

    A field that is None takes the value of the environment. A group does not inherit the options of
    another group, except those of its parent in `split_group`.
    """

    reproducible: bool | None = None


def register() -> None:
    """Registers the backend with torch.distributed. A second call does nothing.

    >>> from torch import distributed as dist
    >>> register()
    >>> BACKEND_NAME in dist.Backend.backend_list
    True
    """
    from torch import distributed as dist

    if BACKEND_NAME not in dist.Backend.backend_list:
        # torch would treat a plain string as a list of letters.
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=_devices())


def stand_in_for(backend: str) -> None:
    """Gives this backend to programs that ask torch for `backend`, which must be "gloo".

    From then on the process groups of `init_process_group("gloo")`, `new_group(backend="gloo")` and
    `cpu:gloo,cuda:nccl` use unisono for CPU tensors, and answer to the name gloo. All ranks must
    call this before they make the group. `UNISONO_REPLACE=gloo` does the same without a change of
    the program. A second call does nothing. Raises `ValueError` for another name, and
    `UnsupportedError` if this version of torch makes its groups in another way.

    >>> from torch import distributed as dist
    >>> stand_in_for("nccl")
    Traceback (most recent call last):
    ValueError: expected 'gloo', the one backend that unisono can replace, not 'nccl'
    """
    _stand_in(backend, watch=False)


def _stand_in(backend: str, *, watch: bool) -> None:
    register()
    from unisono.torch_backend.stand_in import stand_in

    stand_in(backend, watch=watch)


def _devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.version.cuda else ["cpu"]


def communicator_of(group: Any) -> Any:
    """Returns the communicator of a process group; None if the group runs on another backend."""
    return getattr(group, "communicator", None)


def default_communicator() -> Any:
    """Returns the communicator of torch's default group; None if the group runs on another
    backend."""
    from torch import distributed as dist

    return communicator_of(dist.group.WORLD) if dist.is_initialized() else None


def run_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the backward pass under way, before `backward` returns."""
    from unisono.torch_backend import private

    private.run_after_backward(callback)


def split_groups(module: Any) -> list[Any]:
    """Returns the groups of parameters that `fully_shard` splits for a module."""
    from unisono.torch_backend import private

    return private.split_groups(module)


def whole_parameter(parameter: Any) -> Any:
    """Returns the gathered parameter of an entry of `fsdp_params`; None before the first gather."""
    from unisono.torch_backend import private

    return private.whole_parameter(parameter)


def gradient_hooks(parameter: Any) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Returns a parameter's hooks of `register_hook` and `register_post_accumulate_grad_hook`."""
    from unisono.torch_backend import private

    return private.gradient_hooks(parameter)


def with_gradient_hooks(parameters: Sequence[Any]) -> list[int]:
    """Returns the places of the parameters that have hooks for their gradients."""
    from unisono.torch_backend import private

    return private.with_gradient_hooks(parameters)


def remove_gradient_hooks(parameter: Any) -> None:
    """Makes backward passes call no hooks of a parameter. Its mappings of hooks do not change."""
    from unisono.torch_backend import private

    private.remove_gradient_hooks(parameter)


def has_hooks(module: Any) -> bool:
    """Returns True if a module calls a hook in its forward or backward pass."""
    from unisono.torch_backend import private

    return private.has_hooks(module)


def storage_number(tensor: Any) -> int:
    """Returns a number that changes when a program assigns to a tensor's `data`."""
    from unisono.torch_backend import private

    return private.storage_number(tensor)


def forget_meshes() -> None:
    """Makes torch forget the groups of meshes that DTensors have used. Call after the groups are
    destroyed.
    """
    from unisono.torch_backend import private

    private.forget_meshes()


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns nested tuples, lists and dicts with a function's results in place of tensors."""
    from unisono.torch_backend import private

    return private.map_tensors(function, value)


def is_view(tensor: Any) -> bool:
    """Returns True if autograd sees the tensor as a view of another tensor."""
    from unisono.torch_backend import private

    return private.is_view(tensor)


def version_of(tensor: Any) -> int:
    """Returns a number that each operation that writes the tensor in place increases."""
    from unisono.torch_backend import private

    return private.version_of(tensor)


def is_spectral_norm(module: Any) -> bool:
    """Returns True for the parametrization of `torch.nn.utils.parametrizations.spectral_norm`."""
    from unisono.torch_backend import private

    return private.is_spectral_norm(module)


def pipeline_stage_base() -> Any:
    """Returns torch's base class of pipeline stages, which leaves messages to its subclasses."""
    from unisono.torch_backend import private

    return private.pipeline_stage_base()


def is_in_backward() -> bool:
    """Returns True if autograd runs a backward pass in this thread."""
    from unisono.torch_backend import private

    return private.is_in_backward()


def is_called_by(function: Callable[..., Any]) -> bool:
    """Returns True if a call of a Python function is active in this thread."""
    from unisono.torch_backend import private

    return private.is_called_by(function)


def storage_uses(tensor: Any) -> int:
    """Returns how many tensors and storages use a tensor's memory; 2 for the tensor alone."""
    from unisono.torch_backend import private

    return private.storage_uses(tensor)


def flatten(value: object) -> tuple[list[Any], object]:
    """Returns the leaves of nested tuples, lists and dicts, and their structure."""
    from unisono.torch_backend import private

    return private.flatten(value)


def unflatten(leaves: list[Any], structure: object) -> Any:
    """Returns the value that `flatten` has taken apart."""
    from unisono.torch_backend import private

    return private.unflatten(leaves, structure)


@functools.cache
def _log_untested_torch() -> None:
    """Logs once if this torch is newer than the newest version that all tests have passed on."""
    import torch

    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and (int(found[1]), int(found[2])) > _NEWEST_TESTED:
        newest = ".".join(map(str, _NEWEST_TESTED))
        _log.warning(
            "torch %s is newer than torch %s, the newest version that Unisono is tested with",
            torch.__version__, newest,
        )  # fmt: skip


def _create(options: Any, pg_options: Any = None) -> Any:
    from unisono.torch_backend.group_creation import create

    _log_untested_torch()
    return create(options, pg_options)


def _autoload() -> None:
    """Registers the backend when torch calls this entry point, on each `import torch`. A failure
    must not break the import.
    """
    try:
        register()
        _replace_as_told()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            # torch is not installed, so this is a direct import, which must fail
            raise with_cure(error, __name__) from None
        _log.warning("could not register with torch", exc_info=True)


@functools.cache
def _replace_as_told() -> None:
    """Replaces the backend that `UNISONO_REPLACE` names; once, since torch may call the entry point
    of a module that has just registered itself.
    """
    from unisono import config

    named = config.replaced_backend()
    if not named:
        return
    try:
        _stand_in(named, watch=True)
    except (ValueError, UnsupportedError) as error:
        logging.getLogger(__name__).error(
            "UNISONO_REPLACE replaces nothing, torch's own backends stay: %s", error
        )


_autoload()
