"""Chooses the network interfaces for connections to other hosts, in NCCL's syntax."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import RendezvousError

_VIRTUAL = ("docker", "br-", "virbr", "veth", "vnet", "cni", "flannel", "cali", "podman", "lxcbr")
"""Name prefixes of interfaces to containers and virtual machines of this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """An interface that is up, and its address: IPv4, else global IPv6, unless the caller requested
    one version."""

    name: str
    address: str
    loopback: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A set of interface names. `names` are prefixes, or whole names if `exact`. If `exclude`, the
    set has all other names."""

    names: tuple[str, ...]
    exact: bool = False
    exclude: bool = False

    def index_of(self, name: str) -> int | None:
        """Returns the index of the first entry of `names` that matches; None if no entry
        matches.
        """
        fits = name.__eq__ if self.exact else name.startswith
        return next((index for index, entry in enumerate(self.names) if fits(entry)), None)


def parse(spec: str) -> Pattern:
    """Parses NCCL's syntax: `eth,ib` are prefixes, `=eth0` is a whole name, `^` excludes these
    names.

    Raises `ValueError` for a text without names.

    >>> parse("^=lo,docker0")
    Pattern(names=('lo', 'docker0'), exact=True, exclude=True)
    """
    exclude = spec.startswith("^")
    rest = spec[exclude:]
    exact = rest.startswith("=")
    names = tuple(entry.strip() for entry in rest[exact:].split(","))
    if not all(names) or any(set(name) & set("^= /") for name in names):
        raise ValueError(
            f"UNISONO_INTERFACE={spec!r} is not valid: give prefixes of names (eth,ib), whole "
            "names (=eth0,eth1), or names to exclude (^docker,lo or ^=docker0)"
        )
    return Pattern(names=names, exact=exact, exclude=exclude)


def choose_interfaces(
    spec: str, interfaces: Sequence[Interface], *, rails: int | None = None
) -> list[Interface]:
    """Returns the interfaces to use, at most `rails` of them. Each interface is a rail, over which
    a rank connects to other hosts.

    Interfaces that `spec` names are in the order of `spec`. Others are sorted by name, so that
    hosts with equal interfaces agree. An empty `spec` excludes interfaces to containers and virtual
    machines of this host. Loopback is used only if `spec` names it or no other interface is left.

    Raises `ValueError` for an invalid text, `RendezvousError` if no interface is left.

    >>> found = [Interface(name=n, address="192.0.2.1") for n in ("eth1", "docker0", "eth0")]
    >>> [[one.name for one in choose_interfaces(syntax, found)] for syntax in ("", "docker")]
    [['eth0', 'eth1'], ['docker0']]
    """
    ordered = sorted(interfaces, key=lambda one: (_natural_order(one.name), one.name))
    pattern = parse(spec) if spec else Pattern(names=_VIRTUAL, exclude=True)
    indexed = [(one, pattern.index_of(one.name)) for one in ordered]
    if pattern.exclude:
        chosen = _loopback_last([one for one, index in indexed if index is None])
    else:
        named = [(index, one) for one, index in indexed if index is not None]
        chosen = [one for _, one in sorted(named, key=lambda pair: pair[0])]
    if not chosen:
        raise RendezvousError(
            f"UNISONO_INTERFACE={spec!r} matches no interface of this host, which has "
            + (", ".join(map(str, ordered)) or "none that is up and has an address")
        )
    return chosen[:rails]


def available_interfaces(ip_version: int | None = None) -> list[Interface]:
    """Returns the interfaces of this host (of this network namespace) that are up and have an
    address. `ip_version` restricts the addresses to one version."""
    import psutil  # groups of one host do not need it

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
    """Chooses one IP address of an interface, whose addresses also include hardware addresses."""
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


def _natural_order(name: str) -> list[tuple[str, int]]:
    """Returns a sort key that puts eth2 before eth10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
