"""The communicator for CUDA tensors of a process group."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from unisono.torch_backend.device.cuda_device import CudaDevice
from unisono.torch_backend.device.device_communicator import DeviceCommunicator
from unisono.torch_backend.device.device_messages import DeviceMessages
from unisono.torch_backend.device.host_memory import HostMemory
from unisono.torch_backend.device.peer_memory import PeerMemory


def device_group(comm: Any) -> DeviceCommunicator | None:
    """Returns the communicator for CUDA tensors of a communicator's ranks. Collective.

    Returns None if a rank has no CUDA device. Uses peer memory if all ranks are on one host and can
    share memory, else host memory.
    """
    own = np.array([torch.cuda.is_available(), _can_share(comm)], np.uint8)
    found = comm.all_gather(own).reshape(comm.size, -1).all(axis=0)
    if not found[0]:
        return None
    host = comm.group(list(range(comm.size)))
    device = CudaDevice(host, torch.device("cuda", torch.cuda.current_device()))
    if found[1]:
        return DeviceCommunicator(
            host, device, PeerMemory(host, device), DeviceMessages(host, device)
        )
    path = HostMemory(host, device)
    return DeviceCommunicator(host, device, path, path)


def _can_share(comm: Any) -> bool:
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return False
    return len(comm.hosts) == 1
