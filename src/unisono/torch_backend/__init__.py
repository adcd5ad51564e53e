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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.errors import UnsupportedError
from unisono.extras import with_cure
from unisono.lazy_names import lazy_names

if TYPE_CHECKING:
    from unisono.torch_backend.private import (  # noqa: I001
        attention_on_cpu as attention_on_cpu,
        attention_on_cpu_backward as attention_on_cpu_backward,
        drop_probability as drop_probability,
        empty_tensors as empty_tensors,
        even_out_gradients as even_out_gradients,
        flatten as flatten,
        forget_hooks as forget_hooks,
        forget_meshes as forget_meshes,
        gradient_hook_counts as gradient_hook_counts,
        gradient_hooks as gradient_hooks,
        has_hooks as has_hooks,
        hide_from_dynamo as hide_from_dynamo,
        hooks_before as hooks_before,
        is_called_by as is_called_by,
        is_in_backward as is_in_backward,
        is_spectral_norm as is_spectral_norm,
        is_type_check as is_type_check,
        is_view as is_view,
        map_tensors as map_tensors,
        own_buffers as own_buffers,
        own_children as own_children,
        own_parameters as own_parameters,
        pipeline_stage_base as pipeline_stage_base,
        remove_gradient_hooks as remove_gradient_hooks,
        reset_of as reset_of,
        run_after_backward as run_after_backward,
        forget_forward_passes as forget_forward_passes,
        saved_by as saved_by,
        share_parts as share_parts,
        shell as shell,
        skip_message_setup as skip_message_setup,
        split_groups as split_groups,
        storage_number as storage_number,
        storage_uses as storage_uses,
        unflatten as unflatten,
        use_present_weights as use_present_weights,
        version_of as version_of,
        whole_parameter as whole_parameter,
        without_view as without_view,
    )
    from unisono.torch_backend.single_tensor import (
        all_gather_single as all_gather_single,
        reduce_scatter_single as reduce_scatter_single,
    )
    from unisono.torch_backend.convert import movable as movable
    from unisono.torch_backend.row_exchange import row_exchange_of as row_exchange_of
    from unisono.torch_backend.shared_tensors import empty as empty, zeros_for as zeros_for
    from unisono.torch_backend.group_creation import group_on_store as group_on_store

__all__ = [
    "BACKEND_NAME",
    "Options",
    "empty",
    "group_on_store",
    "register",
    "stand_in_for",
]

# The first use of a name imports its module, since `import torch` imports this package.
__getattr__ = lazy_names(
    __name__,
    {
        "unisono.torch_backend.convert": ["movable"],
        "unisono.torch_backend.group_creation": ["group_on_store"],
        "unisono.torch_backend.private": [
            "attention_on_cpu",
            "attention_on_cpu_backward",
            "drop_probability",
            "empty_tensors",
            "even_out_gradients",
            "flatten",
            "forget_hooks",
            "forget_meshes",
            "gradient_hook_counts",
            "gradient_hooks",
            "has_hooks",
            "hide_from_dynamo",
            "hooks_before",
            "is_called_by",
            "is_in_backward",
            "is_spectral_norm",
            "is_type_check",
            "is_view",
            "map_tensors",
            "own_buffers",
            "own_children",
            "own_parameters",
            "pipeline_stage_base",
            "remove_gradient_hooks",
            "reset_of",
            "run_after_backward",
            "forget_forward_passes",
            "saved_by",
            "share_parts",
            "shell",
            "skip_message_setup",
            "split_groups",
            "storage_number",
            "storage_uses",
            "unflatten",
            "use_present_weights",
            "version_of",
            "whole_parameter",
            "without_view",
        ],
        "unisono.torch_backend.row_exchange": ["row_exchange_of"],
        "unisono.torch_backend.shared_tensors": ["empty", "zeros_for"],
        "unisono.torch_backend.single_tensor": ["all_gather_single", "reduce_scatter_single"],
    },
)

BACKEND_NAME = "unisono"
_NEWEST_TESTED = (2, 15)
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


def communicator_of(group: Any, device: str = "cpu") -> Any:
    """Returns the communicator of a process group for tensors on a type of device; None if these
    tensors are served by another backend.

    The communicator for "cuda" says by `explain()` in which way data moves, and why.
    """
    if device != "cpu":
        others = getattr(group, "others", None)
        group = others.group if others is not None and device in others.backends else None
    return getattr(group, "communicator", None)


def default_communicator() -> Any:
    """Returns the communicator of torch's default group; None if the group runs on another
    backend."""
    from torch import distributed as dist

    return communicator_of(dist.group.WORLD) if dist.is_initialized() else None


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
