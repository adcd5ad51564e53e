"""The torch.distributed backend `unisono`, for tensors in CPU memory.

    import torch.distributed as dist

    dist.init_process_group("unisono")

torch finds the backend through the entry point `torch.backends`, without an import. Importing
this package registers it too, for environments that turn the entry points off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BACKEND_NAME",
    "Options",
    "default_communicator",
    "register",
    "run_after_backward",
]

BACKEND_NAME = "unisono"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `init_process_group` and `new_group` take as `pg_options`; None: as the environment
    says. A group does not take over the options of another, but for those that it was split from.
    """

    reproducible: bool | None = None


def register() -> None:
    """Make the backend known to torch.distributed. Does nothing the second time.

    >>> from torch import distributed as dist
    >>> register()
    >>> BACKEND_NAME in dist.Backend.backend_list
    True
    """
    from torch import distributed as dist

    if BACKEND_NAME not in dist.Backend.backend_list:
        # A list: torch would take a plain string letter by letter.
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])


def default_communicator() -> Any:
    """Returns the communicator of torch's default group; None if that runs on another backend."""
    from torch import distributed as dist

    if not dist.is_initialized():
        return None
    return getattr(dist.group.WORLD, "communicator", None)


def run_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the backward pass under way, before `backward` returns."""
    from unisono.torch_backend import private

    private.run_after_backward(callback)


def _create(options: Any, pg_options: Any = None) -> Any:
    from unisono.torch_backend.creator import create

    return create(options, pg_options)


def _autoload() -> None:
    """Entry point that torch calls on each `import torch`, so it must never fail."""
    try:
        register()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise  # then it is not torch that is calling
        logging.getLogger(__name__).warning("could not register with torch", exc_info=True)


_autoload()
