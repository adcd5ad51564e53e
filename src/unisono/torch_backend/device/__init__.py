"""Collectives on tensors in device memory, such as that of a GPU, also of ranks that share a GPU.

`DeviceCommunicator` has the collectives of `Communicator` for device tensors. It sends headers and
detects failures over a communicator of the same ranks, in host memory. Data moves in one of two
ways. Over **peer memory**, ranks of one host open each other's device memory (CUDA IPC), and a
schedule's moves run on the device. Over **host memory**, data is copied to the host, goes through
the communicator, and is copied back; this works everywhere.

Calls have the order of streams: a call begins after the earlier work of the current stream, and
`wait` makes the current stream wait for the call. Unlike NCCL, `wait` also blocks the host until
all ranks have made the call; it does not wait for the device.
"""

from unisono.torch_backend.device.device_communicator import DeviceCommunicator
from unisono.torch_backend.device.device_group import device_group
from unisono.torch_backend.device.peer_device import Address, PeerDevice

__all__ = ["Address", "DeviceCommunicator", "PeerDevice", "device_group"]
