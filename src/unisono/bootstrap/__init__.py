"""Bootstrap: ranks find each other, form a group, and set up shared memory and connections.

Ranks exchange texts through a `BootstrapStore` (TCP, MPI, torch's store or any key-value store).
The ranks of one host then share a memory segment (`join_segment`). Ranks of several hosts share one
network per world (`GroupNetwork`). `join_group` runs all these steps and returns a `JoinedGroup`.
"""

from typing import TYPE_CHECKING

from unisono.bootstrap.group_config import GroupConfig, JoinedGroup, StagingShape
from unisono.bootstrap.group_network import GroupNetwork, TransportKind
from unisono.bootstrap.join_group import join_group
from unisono.bootstrap.shared_segment import join_segment
from unisono.bootstrap.single_copy import NO_SINGLE_COPY, SingleCopyRules, single_copy_for
from unisono.bootstrap.unix_socket import WATCH_S
from unisono.lazy_names import lazy_names

if TYPE_CHECKING:
    from unisono.bootstrap.authenticated_link import (
        LinkListener,
        dial_link,
        listen_for_links,
        own_address,
    )
    from unisono.bootstrap.key_value_store import KeyValueBootstrap
    from unisono.bootstrap.peer_exchange import this_host
    from unisono.bootstrap.reserved_port import reserved_port
    from unisono.bootstrap.store import BootstrapStore
    from unisono.bootstrap.tcp_address import keep_alive

__getattr__ = lazy_names(
    __name__,
    {
        "unisono.bootstrap.authenticated_link": [
            "LinkListener",
            "dial_link",
            "listen_for_links",
            "own_address",
        ],
        "unisono.bootstrap.key_value_store": ["KeyValueBootstrap"],
        "unisono.bootstrap.peer_exchange": ["this_host"],
        "unisono.bootstrap.reserved_port": ["reserved_port"],
        "unisono.bootstrap.store": ["BootstrapStore"],
        "unisono.bootstrap.tcp_address": ["keep_alive"],
    },
)

__all__ = [
    "NO_SINGLE_COPY",
    "WATCH_S",
    "BootstrapStore",
    "GroupConfig",
    "GroupNetwork",
    "JoinedGroup",
    "KeyValueBootstrap",
    "LinkListener",
    "SingleCopyRules",
    "StagingShape",
    "TransportKind",
    "dial_link",
    "join_group",
    "join_segment",
    "keep_alive",
    "listen_for_links",
    "own_address",
    "reserved_port",
    "single_copy_for",
    "this_host",
]
