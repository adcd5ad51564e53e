"""A port of this host that no other process gets before a rank listens there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a port for a store that rank 0 opens later.

    The system gives the port to no other process that asks for a free port. The store can still
    bind it, since the store permits reuse and no socket listens here.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as holder:
        if dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
