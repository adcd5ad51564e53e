"""A group of ranks that know only where to meet: on one host or on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.bootstrap.group_config import GroupConfig, JoinedGroup
from unisono.bootstrap.shared_segment import join_segment
from unisono.config import MPI, TCP, TORCH_STORE, Settings

if TYPE_CHECKING:
    from unisono.bootstrap.store import BootstrapStore


def join_group(
    meeting: GroupConfig, settings: Settings, board: BootstrapStore | None = None
) -> JoinedGroup:
    """Joins the group; returns when all are there. They find each other at `board`, if there is
    one, else by the rendezvous.

    Where the rendezvous is a text of this job alone, all ranks are on this host, and nothing of the
    network is touched, nor even imported.

    Raises `RendezvousError` if they are not there within the timeout or disagree about who they
    are, `AuthenticationError` if this rank is not let in.
    """
    if meeting.rendezvous.startswith(MPI):
        from unisono.bootstrap.mpi_network import join_by_mpi

        return join_by_mpi(meeting, settings)
    if board is None and not meeting.rendezvous.startswith((TCP, TORCH_STORE)):
        return join_segment(meeting)
    from unisono.bootstrap.store import store_of
    from unisono.bootstrap.tcp_network import join_by_tcp
    from unisono.transport import job_secret, security_of

    secret = job_secret(settings)
    security = security_of(settings, secret)
    board = board or store_of(meeting.rendezvous, secret, security)
    assert board is not None, "the rendezvous is a place"
    return join_by_tcp(board, meeting, settings, security)
