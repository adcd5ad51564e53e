"""The group of ranks of several hosts whose wire is MPI."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.links.mpi_watch import MpiWatch
from unisono.links.mpi_wire import MpiLink
from unisono.native import Group, usable_cores
from unisono.runtime.finding import Found
from unisono.runtime.forming import form
from unisono.runtime.rendezvous import Met


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiGroup:
    """A group, and what it needs beside the native core."""

    met: Met
    link: MpiLink
    watch: MpiWatch | None
    """None if all ranks are on one host, which needs no wire."""

    @property
    def group(self) -> Group:
        """This rank's end."""
        return self.met.group

    def close(self) -> None:
        """Leaves in good order. What MPI has of the group lives until MPI is finalised."""
        self.group.close()
        if self.watch is not None:
            self.watch.close()


def open_mpi_group(found: Found, rank: int, link: MpiLink, *, timeout_s: float) -> MpiGroup:
    """Joins the group of the ranks that were `found`; rank r is rank r of `link`, too.

    Ranks of one host share memory, the others are reached by MPI; nothing else is opened to the
    network. Raises `RendezvousError` if ranks that look as if they were on one host are not.
    """
    here = found.host_of(rank)

    def open_group(fd: int, place: int, nonce: bytes) -> Group:
        if len(found.hosts) == 1:
            return Group(fd, place, nonce, usable_cores())
        ranks = len(found.contacts)
        return Group.of_hosts(fd, rank, ranks, here, nonce, usable_cores(), link.carrier)

    met = form(found, rank, timeout_s=timeout_s, open_group=open_group)
    away = [other for host in found.hosts if host != here for other in host]
    watch = MpiWatch(link, met.group, away) if away else None
    return MpiGroup(met=met, link=link, watch=watch)
