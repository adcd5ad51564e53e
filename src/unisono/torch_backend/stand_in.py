"""Unisono in the place of Gloo, for programs that ask torch for gloo by name.

Torch makes each group in one function, from the text that names its backends. This module replaces
gloo by unisono for CPU tensors in that text, and makes the group answer to the name gloo. Other
devices keep their backends. A call of the constructor of torch's Gloo makes a Gloo group.

The module runs during `import torch`, so it imports what makes groups only when a group is made.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from unisono import config
from unisono.errors import UnsupportedError
from unisono.torch_backend import BACKEND_NAME, Options, communicator_of
from unisono.torch_backend.gloo_spans import asynchronous
from unisono.torch_backend.private import (
    backends_by_device,
    gloo_class,
    gloo_threads,
    prefixed,
    rename_backend,
    replace_function,
    replace_logging_data,
    replace_reading_of_profiles,
)
from unisono.torch_backend.stand_in_agreement import agree

GLOO = "gloo"
_READ = frozenset((
    "backend", "backend_options", "group_name", "group_rank", "group_size", "store", "timeout",
))  # fmt: skip


def stand_in(backend: str, *, watch: bool) -> None:
    """Gives unisono to programs that ask torch for `backend`, which must be "gloo".

    `watch` says that this process has made no Gloo group, so that a Gloo group in the store is one
    of another rank.
    """
    if backend != GLOO:
        raise ValueError(
            f"expected {GLOO!r}, the one backend that unisono can replace, not {backend!r}"
        )
    if gloo_class() is None:
        raise UnsupportedError("this torch was built without Gloo, so nothing asks for it")
    try:
        made_by_unisono = functools.partial(_made_by_unisono, watch=watch)
        replace_function("_new_process_group_helper", made_by_unisono)
        replace_function("split_group", _split_by_unisono)
    except AttributeError as error:
        raise UnsupportedError(_cure(str(error))) from error
    replace_reading_of_profiles(asynchronous)
    replace_logging_data(_logged_as_gloo)


def _cure(missing: str) -> str:
    return (
        f"torch {torch.__version__} makes its groups in a way that unisono does not know "
        f'({missing}): write init_process_group("{BACKEND_NAME}") instead of "{GLOO}"'
    )


def _made_by_unisono(make: Callable[..., Any], *, watch: bool) -> Callable[..., Any]:
    """Returns torch's function that makes groups, with unisono in the place of gloo."""
    signature = inspect.signature(make)
    unknown = _READ - set(signature.parameters)
    if unknown:
        raise UnsupportedError(_cure(f"no parameter {', '.join(sorted(unknown))}"))

    @functools.wraps(make)
    def make_instead(*args: Any, **options: Any) -> Any:
        call = signature.bind(*args, **options)
        asked = call.arguments["backend"]
        backends = _instead_of(asked, call.arguments, watch)
        if backends is None:
            return make(*args, **options)
        call.arguments["backend"] = ",".join(f"{kind}:{name}" for kind, name in backends.items())
        if len(backends) == 1 and not isinstance(call.arguments.get("backend_options"), Options):
            call.arguments["backend_options"] = None  # torch passes Gloo none either
        group, store = make(*call.args, **call.kwargs)
        if communicator_of(group) is not None:
            group.stand_in()
            rename_backend(group, asked)
            if (dist.get_rank() if dist.is_initialized() else group.rank()) == 0:
                _say_once()
        return group, store

    return make_instead


def _instead_of(asked: str, arguments: dict[str, Any], watch: bool) -> dict[str, str] | None:
    """Returns the backend of each device of a new group; None if torch makes it unchanged."""
    backends = backends_by_device(asked)
    rank, size = arguments["group_rank"], arguments["group_size"]
    if backends.get("cpu") != GLOO or rank is None:
        return None
    store = prefixed(arguments["store"], f"{arguments['group_name']}/")
    mine = "cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu"
    found = agree(store, rank, size, mine, arguments["timeout"].total_seconds(), watch=watch)
    if ":" not in asked and "cuda" not in found:  # gloo alone names it for CUDA tensors too
        return {"cpu": BACKEND_NAME}
    return {**backends, "cpu": BACKEND_NAME}


def _split_by_unisono(split: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `dist.split_group`, which also splits the groups of unisono."""

    @functools.wraps(split)
    def split_instead(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **others: Any,
    ) -> Any:
        parent = dist.group.WORLD if parent_pg is None else parent_pg
        if communicator_of(parent) is None:
            return split(parent_pg, split_ranks, timeout, pg_options, group_desc, **others)
        if not split_ranks:
            raise ValueError("split_ranks: expected one or more lists of ranks")
        backend = others.pop("backend", None)
        if backend not in (None, dist.get_backend(parent)):
            raise UnsupportedError(
                f"split_group(backend={backend!r}): a group of unisono is split with all of its "
                f"backends ({dist.get_backend_config(parent)}): leave backend out"
            )
        if pg_options is not None or others:
            named = ["pg_options"] if pg_options is not None else list(others)
            raise UnsupportedError(
                f"split_group({', '.join(named)}): a part of a group of unisono keeps the options "
                "of the group: leave them out"
            )
        from unisono.torch_backend.reserved import split_group

        return split_group(parent, split_ranks, timeout, group_desc)

    return split_instead


def _logged_as_gloo(get: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns DDP's method for its logging data, which name gloo and the options of its group."""

    @functools.wraps(get)
    def get_instead(model: Any) -> dict[str, Any]:
        data, group = get(model), model.process_group
        if communicator_of(group) is None or group.name() != GLOO:
            return data
        threads = gloo_threads(group.options)
        return {**data, "backend_name": GLOO, **config.gloo_network(), "gloo_num_threads": threads}

    return get_instead


@functools.cache
def _say_once() -> None:
    logging.getLogger("unisono").warning(
        "unisono serves the CPU tensors of groups that ask torch for gloo"
    )
