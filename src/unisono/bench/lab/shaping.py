"""How links of a lab are held to their rates: queues, and what feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SEGMENTS = 65_536
_SHARE = 10  # classes of peers are numbered from this on
_REST = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """The ports of a lab: by default one queue each, first in, first out."""

    burst: str = "256k"
    """What a port lets pass at once after a pause, as tc writes it."""
    segment_bytes: int = _SEGMENTS
    """The most that a host hands to its link as one packet."""
    fair: bool = False
    """A queue for each other host, which take turns."""
    first_window: int | None = None
    """Packets of 1,448 bytes that a connection may send before it has heard anything; None: the
    kernel's own choice, 10."""
    settings: tuple[str, ...] = ()
    """Of the hosts' kernels, as sysctl writes them."""

    def host_lines(self, interface: str, address: str) -> list[str]:
        """What ip is to be told on a host, whose interface is up."""
        lines = []
        if self.segment_bytes != _SEGMENTS:
            lines.append(f"link set {interface} gso_max_size {self.segment_bytes}")
        if self.first_window is not None:
            network = address.rsplit(".", 1)[0] + ".0/24"
            lines.append(
                f"route change {network} dev {interface} src {address} "
                f"initcwnd {self.first_window} initrwnd {self.first_window}"
            )
        return lines

    def limits(self, interface: str, rate: str, peers: Sequence[str], way: str) -> list[str]:
        """Lines for tc: one port at this rate. Packets of the `peers` are known by their addresses,
        which are where they go ("dst") or come from ("src")."""
        if not self.fair:
            limit = f"tbf rate {rate} burst {self.burst} latency 100ms"
            return [f"qdisc add dev {interface} root handle 1: {limit}"]
        # All may take the whole rate; what each is sure of is little, so that they share.
        rest = f"ceil {rate} burst {self.burst} cburst {self.burst} quantum {self.segment_bytes}"
        add = f"class add dev {interface} parent 1:"
        lines = [
            f"qdisc add dev {interface} root handle 1: htb default {_REST}",
            f"{add} classid 1:1 htb rate {rate} {rest}",
            f"{add}1 classid 1:{_REST} htb rate 1mbit {rest}",
        ]
        for number, address in enumerate(peers, _SHARE):
            lines += [
                f"{add}1 classid 1:{number} htb rate 1mbit {rest}",
                f"filter add dev {interface} parent 1: protocol ip prio 1 u32 "
                f"match ip {way} {address}/32 flowid 1:{number}",
            ]
        return lines


EVEN = Shaping(
    burst="32k",
    segment_bytes=16_384,
    fair=True,
    first_window=90,
    settings=(
        "net.ipv4.tcp_congestion_control=reno",
        "net.ipv4.tcp_slow_start_after_idle=0",
        "net.ipv4.tcp_rmem=4096 6291456 6291456",
        "net.ipv4.tcp_wmem=4096 4194304 4194304",
    ),
)
"""Links that are shared evenly, as simulators assume it, and that save up nothing in a pause.
Pauses are what collectives are full of: BBR, which some machines have by default, takes them for a
slow network, what begins slowly after each of them never gets fast, and windows that a receiver
opens by what it has read in a round trip stay small."""
