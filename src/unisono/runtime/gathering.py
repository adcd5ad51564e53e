"""A group of ranks that know only where to meet: on one host or on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.config import Settings
from unisono.launchers import MPI, TCP, TORCH_STORE
from unisono.runtime.meeting import Meeting, Met
from unisono.runtime.rendezvous import meet

if TYPE_CHECKING:
    from unisono.runtime.boards import Board


def gather(meeting: Meeting, settings: Settings, board: Board | None = None) -> Met:
    """Joins the group; returns when all are there. They find each other at `board`, if there is
    one, else by the rendezvous.

    Where the rendezvous is a text of this job alone, all ranks are on this host, and nothing of the
    network is touched, nor even imported.

    Raises `RendezvousError` if they are not there within the timeout or disagree about who they
    are, `AuthenticationError` if this rank is not let in.
    """
    if meeting.rendezvous.startswith(MPI):
        from unisono.runtime.mpi_network import meet_by_mpi

        return meet_by_mpi(meeting, settings)
    if board is None and not meeting.rendezvous.startswith((TCP, TORCH_STORE)):
        return meet(meeting)
    from unisono.links.secret import job_secret
    from unisono.links.security import security_of
    from unisono.runtime.boards import board_of
    from unisono.runtime.network import meet_at

    secret = job_secret(settings)
    security = security_of(settings, secret)
    board = board or board_of(meeting.rendezvous, secret, security)
    assert board is not None, "the rendezvous is a place"
    return meet_at(board, meeting, settings, security)
