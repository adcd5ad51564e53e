"""Which network interfaces ranks speak to other hosts by, chosen in NCCL's syntax."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from unisono.errors import RendezvousError

_VIRTUAL = ("docker", "br-", "virbr", "veth", "vnet", "cni", "flannel", "cali", "podman", "lxcbr")
"""How the names begin of interfaces that lead to containers and virtual machines of this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """An interface that is up, and the one address of it that is used: IPv4, else global IPv6,
    unless one of them was asked for."""

    name: str
    address: str
    loopback: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Which names are meant: `names` are beginnings, or whole names if `exact`; all others if
    `exclude`."""

    names: tuple[str, ...]
    exact: bool = False
    exclude: bool = False

    def place(self, name: str) -> int | None:
        """The place in the list of the first entry that fits; None: none does."""
        fits = name.__eq__ if self.exact else name.startswith
        return next((place for place, entry in enumerate(self.names) if fits(entry)), None)


def parse(spec: str) -> Pattern:
    """Reads NCCL's syntax: `eth,ib` beginnings, `=eth0` whole names, `^` before all but these.

    Raises `ValueError` for a text that names nothing.

    >>> parse("^=lo,docker0")
    Pattern(names=('lo', 'docker0'), exact=True, exclude=True)
    """
    exclude = spec.startswith("^")
    rest = spec[exclude:]
    exact = rest.startswith("=")
    names = tuple(entry.strip() for entry in rest[exact:].split(","))
    if not all(names) or any(set(name) & set("^= /") for name in names):
        raise ValueError(
            f"UNISONO_INTERFACE={spec!r} is not understood: give beginnings of names (eth,ib), "
            "whole names (=eth0,eth1), or what to leave out (^docker,lo or ^=docker0)"
        )
    return Pattern(names=names, exact=exact, exclude=exclude)


def choose_interfaces(
    spec: str, interfaces: Sequence[Interface], *, rails: int | None = None
) -> list[Interface]:
    """The interfaces to use, at most `rails` of them, each a rail of its own.

    Those that `spec` names come in its order, others in that of their names, so hosts that are
    alike agree. An empty `spec` leaves out those that lead to containers and virtual machines of
    this host. Unless `spec` names it, loopback is used only if there is nothing else.

    Raises `ValueError` for a text that is not understood, `RendezvousError` if nothing is left.

    >>> found = [Interface(name=n, address="192.0.2.1") for n in ("eth1", "docker0", "eth0")]
    >>> [[one.name for one in choose_interfaces(syntax, found)] for syntax in ("", "docker")]
    [['eth0', 'eth1'], ['docker0']]
    """
    ordered = sorted(interfaces, key=lambda one: (_natural(one.name), one.name))
    pattern = parse(spec) if spec else Pattern(names=_VIRTUAL, exclude=True)
    placed = [(one, pattern.place(one.name)) for one in ordered]
    if pattern.exclude:
        chosen = _loopback_last([one for one, place in placed if place is None])
    else:
        named = [(place, one) for one, place in placed if place is not None]
        chosen = [one for _, one in sorted(named, key=lambda pair: pair[0])]
    if not chosen:
        raise RendezvousError(
            f"UNISONO_INTERFACE={spec!r} leaves no interface of this host, which has "
            + (", ".join(map(str, ordered)) or "none that is up and has an address")
        )
    return chosen[:rails]


def available_interfaces(ip_version: int | None = None) -> list[Interface]:
    """The interfaces of this host (of this network namespace) that are up and have an address, of
    this version if it is given."""
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        address = _preferred([entry.address for entry in entries], ip_version)
        if address is None or not (name in states and states[name].isup):
            continue
        loopback = ipaddress.ip_address(address).is_loopback
        found.append(Interface(name=name, address=address, loopback=loopback))
    return found


def _preferred(texts: Sequence[str], ip_version: int | None = None) -> str | None:
    """The address to use of those that an interface has (some are of the hardware)."""
    addresses = []
    for text in texts:
        try:
            addresses.append(ipaddress.ip_address(text))
        except ValueError:
            continue
    usable = [
        one
        for one in addresses
        if ip_version in (None, one.version) and (one.version == 4 or not one.is_link_local)
    ]
    best = min(usable, key=lambda one: (one.version, one.is_link_local), default=None)
    return None if best is None else str(best)


def _loopback_last(found: list[Interface]) -> list[Interface]:
    return [one for one in found if not one.loopback] or found


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts eth2 before eth10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
