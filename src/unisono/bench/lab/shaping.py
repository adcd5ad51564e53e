"""Rate limits of links in a lab, as queues and as kernel settings of the senders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SEGMENTS = 65_536
_SHARE = 10  # number of tc's class for data to or from the first peer
_REST = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Configuration of the ports of a lab. By default, each port has one FIFO queue."""

    burst: str = "256k"
    """Amount of data that a port may transmit faster than its rate after a pause, in tc's
    notation."""
    segment_bytes: int = _SEGMENTS
    """Maximum bytes of a packet that a host passes to its link."""
    fair: bool = False
    """True if a port has a queue for each other host, and divides its rate evenly among the queues
    that are not empty."""
    first_window: int | None = None
    """Initial window of a connection, in packets of 1,448 bytes. None means the kernel's default,
    10."""
    settings: tuple[str, ...] = ()
    """Kernel settings of the hosts, in sysctl's notation."""

    def host_lines(self, interface: str, address: str) -> list[str]:
        """Returns commands for ip that configure a host's interface, which must be up."""
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
        """Returns commands for tc that limit one port to this rate. Packets are assigned to `peers`
        by their destination address (`way` is "dst") or source address ("src")."""
        if not self.fair:
            limit = f"tbf rate {rate} burst {self.burst} latency 100ms"
            return [f"qdisc add dev {interface} root handle 1: {limit}"]
        # Each class may use the whole rate. The guaranteed rate is small, so that classes share
        # evenly.
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
"""Links that connections share evenly, as simulators assume, without bursts after a pause.
Collectives have many pauses. The settings avoid three problems of TCP with pauses. BBR, the default
of some machines, mistakes pauses for a slow network. Slow start after each pause keeps connections
slow. Receive windows that grow with the bytes read per round trip stay small."""
