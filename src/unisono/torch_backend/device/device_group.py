"""The communicator for CUDA tensors of a process group."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from typing import Any

import numpy as np
import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.cuda_device import CudaDevice
from unisono.torch_backend.device.cuda_stream import CudaStream
from unisono.torch_backend.device.device_communicator import DeviceCommunicator
from unisono.torch_backend.device.device_messages import DeviceMessages
from unisono.torch_backend.device.flag_page import FlagPage
from unisono.torch_backend.device.host_memory import HostMemory
from unisono.torch_backend.device.lost_rank_watch import LostRankWatch
from unisono.torch_backend.device.peer_device import PeerDevice
from unisono.torch_backend.device.peer_memory import PeerMemory
from unisono.torch_backend.device.refusals import agree
from unisono.torch_backend.device.sharing_trial import require_sharing

_log = logging.getLogger(__name__)


def device_group(comm: Any, sibling: DeviceCommunicator | None = None) -> DeviceCommunicator | None:
    """Returns the communicator for CUDA tensors of a communicator's ranks. Collective.

    `sibling`: that of another group of this process, which shares its open allocations.

    Returns None if a rank has no CUDA device. Uses peer memory if all ranks are on one host and a
    trial shows that they can share memory, else host memory. Rank 0 logs the reason for host
    memory.
    """
    if not comm.all_gather(np.array([torch.cuda.is_available()])).all():
        return None
    host = comm.group(list(range(comm.size)))
    place = torch.device("cuda", torch.cuda.current_device())
    try:
        device = _shared_device(host, place, sibling and sibling.device)
    except UnsupportedError as error:
        if host.rank == 0:
            _log.warning("CUDA tensors of this group go through host memory: %s", error)
        return over_host_memory(host, CudaStream(place), str(error))
    return over_peer_memory(host, device)


def over_peer_memory(host: Any, device: PeerDevice) -> DeviceCommunicator:
    """Returns a communicator whose ranks open each other's memory. `device` has passed the
    trial."""
    watch = LostRankWatch(host, device)
    path, messages = PeerMemory(host, device, watch), DeviceMessages(host, device, watch)
    return DeviceCommunicator(host, device, path, messages)


def over_host_memory(host: Any, device: Any, reason: str) -> DeviceCommunicator:
    """Returns a communicator that copies data to the host and back, for this reason."""
    path = HostMemory(host, device)
    return DeviceCommunicator(host, device, path, path, reason)


def _shared_device(host: Any, place: torch.device, sibling: Any) -> CudaDevice:
    """Raises `UnsupportedError` on all ranks if they cannot share memory."""
    if len(host.hosts) > 1:
        raise UnsupportedError(f"the ranks are on {len(host.hosts)} hosts")
    problem: Exception | None = None
    try:
        importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        problem = error
    agree(host, problem, "cuda-bindings is missing (pip install 'unisono[cuda]')")
    found = sibling if isinstance(sibling, CudaDevice) else None
    device = CudaDevice(host, place, FlagPage(host), found)
    try:
        require_sharing(host, device, partial(torch.zeros, 64, dtype=torch.int64, device=place))
    except UnsupportedError:
        device.close()
        raise
    return device
