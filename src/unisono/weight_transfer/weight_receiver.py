"""A worker's end: receives the weights of a trainer."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from unisono import config
from unisono.bootstrap import dial_link, this_host
from unisono.closing import Closing
from unisono.communicator import Communicator
from unisono.errors import PeerLostError, UnisonoError
from unisono.weight_transfer.array_bytes import Array, ArrayBytes, array_bytes
from unisono.weight_transfer.messages import (
    Accepted,
    Answer,
    Arrival,
    Closed,
    GroupPlace,
    Offer,
    Outcome,
    Ready,
    Start,
)
from unisono.weight_transfer.sender_address import SenderAddress
from unisono.weight_transfer.transfer import transfer


class WeightReceiver(Closing):
    """Receives weights from a `WeightSender`."""

    def __init__(self, address: str) -> None:
        """Connects to the sender with this address, the text of `WeightSender.address`. When this
        returns, the sender's next update includes this worker.

        Raises `ValueError` for another text, `RendezvousError` if the sender cannot be reached,
        `PeerLostError` if it ends.
        """
        where = SenderAddress.parse(address)
        self._settings = config.settings()
        self._link = dial_link(
            [(where.host, where.port)], where.key, other_end="the sender of weights"
        )
        self._comm: Communicator | None = None
        self.number = 0
        """Number of the last update that this worker has received; 0 before the first."""
        host = repr(this_host(self._settings.host_id))
        name = f"{socket.gethostname()} process {os.getpid()}-{id(self):x}"
        self._tell(Arrival(name=name, host=host))
        if not isinstance(self._next(), Accepted):
            raise self._lost()

    def receive(self, into: Mapping[str, Array] | None = None) -> Mapping[str, Array] | None:
        """Waits for the next update; returns its arrays by name, or None if the sender has closed.

        `into`: the worker's arrays, with the names, types and shapes of the sender's, such as the
        `state_dict()` of a model in CPU memory. They receive the values in place, and may hold
        values of two updates after an error. None: new arrays.

        Raises `ValueError` or `TypeError` if `into` does not fit the update (the other workers get
        it all the same), `PeerLostError` if the sender has ended.
        """
        self._tell(Ready())
        while True:
            offer = self._next()
            if isinstance(offer, Closed):
                self.close()
                return None
            assert isinstance(offer, Offer)
            arrays, contents = self._take(offer, into)
            self._tell(Answer())
            start = self._next()
            assert isinstance(start, Start)
            error = self._transfer(start.group, offer, contents)
            self._tell(Outcome(error=error))
            if error is None:
                self.number = offer.number
                return arrays

    def _take(
        self, offer: Offer, into: Mapping[str, Array] | None
    ) -> tuple[Mapping[str, Array], dict[str, ArrayBytes]]:
        """Returns the arrays of an update; refuses it if they do not fit."""
        try:
            if into is None:
                into = offer.manifest.allocate()
            contents = {name: array_bytes(name, each) for name, each in into.items()}
            offer.manifest.require(into)
        except (TypeError, ValueError) as error:
            self._tell(Answer(refusal=f"{type(error).__name__}: {error}"))
            raise
        return into, contents

    def _transfer(
        self, group: GroupPlace | None, offer: Offer, contents: Mapping[str, ArrayBytes]
    ) -> str | None:
        """Takes part in a transfer; returns its error, after which the sender tries again."""
        try:
            if group is not None:
                self._leave()
                self._comm = group.join(self._settings)
            assert self._comm is not None
            transfer(self._comm, offer.manifest, contents)
        except UnisonoError as error:
            self._leave()
            return str(error)
        return None

    def _leave(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def _tell(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError as error:
            raise self._lost() from error

    def _next(self) -> Any:
        try:
            return self._link.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _lost(self) -> PeerLostError:
        self._leave()
        return PeerLostError(
            "the sender of weights has ended, or has given up this worker; connect again with its "
            "address if it still runs"
        )

    def close(self) -> None:
        """Ends the connection: the sender's next update goes to the other workers."""
        self._leave()
        self._link.close()
