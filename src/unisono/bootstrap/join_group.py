"""Forms a group of ranks that know only the rendezvous, on one host or on several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.bootstrap.group_config import GroupConfig, JoinedGroup
from unisono.bootstrap.shared_segment import join_segment
from unisono.config import MPI, TCP, TORCH_STORE, Settings

if TYPE_CHECKING:
    from unisono.bootstrap.store import BootstrapStore


def join_group(
    group_config: GroupConfig, settings: Settings, bootstrap_store: BootstrapStore | None = None
) -> JoinedGroup:
    """Joins the group; returns when all ranks have joined. The ranks find each other through
    `bootstrap_store` if given, else through the rendezvous.

    If the rendezvous is not an address, all ranks are on this host. In this case the network is not
    used, and its modules are not imported.

    Raises `RendezvousError` if a rank is missing at the timeout, or if ranks disagree about rank or
    size. Raises `AuthenticationError` if this rank is rejected.
    """
    if group_config.rendezvous.startswith(MPI):
        from unisono.bootstrap.mpi_network import join_by_mpi

        return join_by_mpi(group_config, settings)
    if bootstrap_store is None and not group_config.rendezvous.startswith((TCP, TORCH_STORE)):
        return join_segment(group_config)
    from unisono.bootstrap.store import store_of
    from unisono.bootstrap.tcp_network import join_by_tcp
    from unisono.transport import job_secret, security_of

    secret = job_secret(settings)
    security = security_of(settings, secret)
    bootstrap_store = bootstrap_store or store_of(group_config.rendezvous, secret, security)
    assert bootstrap_store is not None, "the rendezvous is an address"
    return join_by_tcp(bootstrap_store, group_config, settings, security)
