"""The communicator for CUDA tensors of a process group."""

from __future__ import annotations

import importlib
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
    where = torch.device("cuda", torch.cuda.current_device())
    try:
        if not found[1]:
            raise UnsupportedError("ranks on several hosts, or without cuda-bindings")
        device = CudaDevice(host, where, FlagPage(host))
    except UnsupportedError:
        stream = CudaStream(where)
        path = HostMemory(host, stream)
        return DeviceCommunicator(host, stream, path, path)
    return DeviceCommunicator(host, device, PeerMemory(host, device), DeviceMessages(host, device))


def _can_share(comm: Any) -> bool:
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return False
    return len(comm.hosts) == 1
