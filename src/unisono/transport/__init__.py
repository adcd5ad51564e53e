"""Connections between hosts: sockets, handshake, TLS and one event loop per rank; or MPI.

A `DialRequest` opens a connection and an `Acceptor` accepts one. Both ends prove that they know the
job's secret (`authenticate`), then the dialer identifies itself (`Introduction`). One `EventLoop`
thread serves all connections. This package does not depend on groups or on the states of ranks.
"""

from unisono.transport.acceptor import Acceptor
from unisono.transport.connection import Connection
from unisono.transport.dialer import Dial, DialFailure, DialRequest
from unisono.transport.event_loop import READ, WRITE, Doorbell, EventLoop, OneShotEvent, Timer
from unisono.transport.handshake import Handshake, ProofRefusedError, authenticate
from unisono.transport.introduction import (
    NO_GROUP,
    TAG_BYTES,
    ConnectionKind,
    Introduction,
    purpose_of,
    tag_of,
)
from unisono.transport.mpi_release import PendingRelease
from unisono.transport.mpi_transport import WATCH_TAG, MpiLink, load_mpi
from unisono.transport.network_interfaces import available_interfaces, choose_interfaces
from unisono.transport.secret import job_secret, random_secret
from unisono.transport.security import CLEAR, Security, security_of
from unisono.transport.silence import CHECK_INTERVAL_S, Silence
from unisono.transport.sockets import (
    Address,
    avoid_bbr,
    format_address,
    listen,
    prepare,
    probe_idle,
    retry_often,
)

__all__ = [
    "CHECK_INTERVAL_S",
    "CLEAR",
    "NO_GROUP",
    "READ",
    "TAG_BYTES",
    "WATCH_TAG",
    "WRITE",
    "Acceptor",
    "Address",
    "Connection",
    "ConnectionKind",
    "Dial",
    "DialFailure",
    "DialRequest",
    "Doorbell",
    "EventLoop",
    "Handshake",
    "Introduction",
    "MpiLink",
    "OneShotEvent",
    "PendingRelease",
    "ProofRefusedError",
    "Security",
    "Silence",
    "Timer",
    "authenticate",
    "available_interfaces",
    "avoid_bbr",
    "choose_interfaces",
    "format_address",
    "job_secret",
    "listen",
    "load_mpi",
    "prepare",
    "probe_idle",
    "purpose_of",
    "random_secret",
    "retry_often",
    "security_of",
    "tag_of",
]
