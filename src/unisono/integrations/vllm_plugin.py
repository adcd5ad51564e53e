"""The entry point `vllm.general_plugins`, which vLLM calls in each of its processes.

It registers the weight transfer engine `unisono`. With `UNISONO_REPLACE=gloo`, groups of vLLM in
CPU memory communicate through Unisono instead of vLLM's own shared memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from unisono import config
from unisono.errors import UnsupportedError

ENGINE_NAME = "unisono"
_COMMUNICATOR = "unisono.integrations.vllm_communicator.communicator_of_group"
_WEIGHTS = "unisono.integrations.vllm_weights"
_log = logging.getLogger(__name__)


def register() -> None:
    """Registers with vLLM, in this process. A second call does nothing. Never raises: what this
    vLLM does not take is logged in one line, and vLLM goes on without it.
    """
    _attempt("the weight transfer engine", _offer_weight_transfer)
    if config.replaced_backend() == "gloo":
        _attempt("UNISONO_REPLACE in vLLM's groups", _serve_groups)


def _attempt(what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:  # vLLM must start without us
        _log.error(
            "%s of unisono does not work with this vLLM, which goes on without it: %s: %s",
            what, type(error).__name__, error,
        )  # fmt: skip


def _offer_weight_transfer() -> None:
    from vllm.distributed.weight_transfer import factory

    for registry, name in (
        (factory.WeightTransferEngineFactory, "UnisonoWeightTransferEngine"),
        (factory.WeightTransferTrainerFactory, "UnisonoTrainerWeightTransferEngine"),
    ):
        if ENGINE_NAME not in registry._registry:
            registry.register_engine(ENGINE_NAME, _WEIGHTS, name)


def _serve_groups() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    own = f"{CpuCommunicator.__module__}.{CpuCommunicator.__qualname__}"
    found = platform.get_device_communicator_cls()
    if found not in (own, _COMMUNICATOR):
        raise UnsupportedError(f"groups of the platform {platform.__name__} are made by {found}")
    platform.get_device_communicator_cls = classmethod(lambda cls: _COMMUNICATOR)
